"""verl's agent loops, naming every sample and its group in the sampling parameters of each request.

A rollout server knows neither which prompt of the data set a request has, nor its number among the prompt's
samples, nor which part of a long prompt the samples share. An agent loop knows all three, also when a sample
is interrupted and goes on elsewhere. verl's `rollout.agent.agent_loop_manager_class` names the manager.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import verl.utils.tensordict_utils as tu
from tensordict import TensorDict  # type: ignore[import-untyped]
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rollout_spec.verl.client import Calls, name_calls
from rollout_spec.vllm.keys import GROUP_KEY, NAME_KEY

_OCCURRENCE = "rollout_spec_occurrence"  # a column of verl's batch, taken out before an agent loop runs


class KeyedAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's worker; it puts each sample's name into the sampling parameters, whatever the agent loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Defined here because Ray wraps and copies an inherited one, in which verl's super() then fails.
        super().__init__(*args, **kwargs)
        self._calls = Calls()
        self.llm_client: Any = name_calls(self.llm_client, self._calls)

    async def generate_sequences(self, batch: TensorDict) -> None:
        """Generate as verl does. Refuse if a server has died: an async trainer would replace prompts forever.

        Raises ActorDiedError, EngineDeadError: a rollout server, or the engine of one, has died.
        """
        if self._calls.death is not None:
            raise self._calls.death
        await super().generate_sequences(batch)

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> Any:
        occurrence = kwargs.pop(_OCCURRENCE, 0)
        name = sample_name(self.config.actor_rollout_ref.rollout.seed, trajectory, occurrence, kwargs)
        group = ":".join(prompt_name(kwargs["index"], kwargs["raw_prompt"]))
        extra_args = {**(sampling_params.get("extra_args") or {}), NAME_KEY: name, GROUP_KEY: group}
        named = {**sampling_params, "extra_args": extra_args}
        try:
            return await super()._run_agent_loop(named, trajectory, **kwargs)
        finally:
            self._calls.end(name)


class KeyedAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager, with `KeyedAgentLoopWorker`s. It numbers prompts that are drawn again in a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step: int | None = None
        self._num_drawn: Counter[tuple[Any, ...]] = Counter()  # in this training step, of each prompt
        self.agent_loop_workers_class = ray.remote(KeyedAgentLoopWorker)

    def generate_sequences(self, prompts: TensorDict) -> None:
        prompts = prompts.clone(recurse=False)
        step, validate = tu.get(prompts, "global_steps"), bool(tu.get(prompts, "validate", False))
        if step != self._step:
            self._step, self._num_drawn = step, Counter()
        numbers = []
        for index, raw_prompt in zip(tu.get(prompts, "index"), tu.get(prompts, "raw_prompt"), strict=True):
            name = (validate, *prompt_name(index, raw_prompt))
            numbers.append(self._num_drawn[name])
            self._num_drawn[name] += 1
        tu.assign_non_tensor_stack(prompts, _OCCURRENCE, numbers)
        super().generate_sequences(prompts)


def sample_name(
    seed: int, trajectory: Mapping[str, Any], occurrence: int, sample: Mapping[str, Any]
) -> list[Any]:
    """A name that no other sample of a run has, and that a run which repeats it gives again.

    Args:
        seed: `actor_rollout_ref.rollout.seed`.
        trajectory: verl's, with the training step and whether it is a validation.
        occurrence: how often the prompt has been drawn before in this step.
        sample: the fields of the sample; `index`, `raw_prompt` and `session_id` are read.

    Returns:
        Plain values: seed, step, train or val, the prompt's index and text, occurrence, number in the group.
    """
    kind = "val" if trajectory["validate"] else "train"
    prompt = prompt_name(sample["index"], sample["raw_prompt"])
    return [int(seed), int(trajectory["step"]), kind, *prompt, int(occurrence), int(sample["session_id"])]


def prompt_name(index: Any, raw_prompt: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """A prompt's index in its file, and a digest of its text and images: files are joined, and some have no
    index."""
    text = json.dumps(list(raw_prompt), sort_keys=True, default=_digest)
    return str(index), hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(value: Any) -> str | None:
    """The digest of an image, a video or a sound (bytes, PIL's, numpy's, torch's); None of anything else."""
    if hasattr(value, "numpy"):
        value = value.numpy(force=True)
    content = value if isinstance(value, bytes) else getattr(value, "tobytes", bytes)()
    return hashlib.sha256(content).hexdigest() if content else None
