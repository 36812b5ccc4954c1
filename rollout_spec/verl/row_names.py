"""The names of samples: made in the trainer's process, where the rows are, and read where a sample begins.

A rollout server knows neither which row of the data a request is of, nor its number among the prompt's
samples, nor when the sample has ended. The trainer knows the rows: so each batch that it hands to its agent
loop manager, whatever the manager's class, has a column of names. verl's agent loop workers, and those that
derive from them, read it; uni-agent's framework does too (`uni_agent.py`). Where nobody reads it, verl's
client names samples by their first prompt (`client.py`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import verl.utils.tensordict_utils as tu
from tensordict import TensorDict  # type: ignore[import-untyped]

from rollout_spec.patches import wrap
from rollout_spec.sample_names import RowName
from rollout_spec.verl import sample_calls
from rollout_spec.verl.changes import NAMED_SAMPLES
from rollout_spec.vllm.keys import GROUP_KEY, SAMPLE_KEY

ROW = "rollout_spec_row"  # the column: of each row its name, as JSON
_running: ContextVar[Any] = ContextVar("_running", default=None)  # the name of the sample of an agent loop


class RowNames:
    """Names the rows of a trainer's batches, and numbers prompts that are drawn again in a step.
    `seed` is `actor_rollout_ref.rollout.seed`."""

    def __init__(self, seed: int) -> None:
        self._seed = int(seed)
        self._step: Any = None
        self._num_drawn: Counter[tuple[Any, ...]] = Counter()  # in this training step, of each prompt

    def add_to(self, prompts: TensorDict) -> TensorDict:
        """A copy of the batch, with the column `ROW`; the batch itself where it has no `raw_prompt`.

        A row's name is a `RowName`: no other row of a run has it, and a repeated run gives it again.
        """
        if "raw_prompt" not in prompts:
            return prompts
        step, validate = tu.get(prompts, "global_steps"), bool(tu.get(prompts, "validate", False))
        if step != self._step:
            self._step, self._num_drawn = step, Counter()
        none, names = [None] * len(prompts), []
        of_rows = (tu.get(prompts, key, none) for key in ("index", "raw_prompt", "tools_kwargs"))
        for index, raw_prompt, tools in zip(*of_rows, strict=True):
            prompt = ("val" if validate else "train", *prompt_name(index, raw_prompt, tools))
            names.append(json.dumps(RowName(self._seed, int(step or 0), *prompt, self._num_drawn[prompt])))
            self._num_drawn[prompt] += 1
        prompts = prompts.clone(recurse=False)
        tu.assign_non_tensor_stack(prompts, ROW, names)
        return prompts


def with_sample_name(row: str, number: Any, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a sample with its name and group: of the row of this name, from the column
    `ROW`, and which of its samples."""
    of_row, given = RowName(*json.loads(row)), sampling_params.get("extra_args") or {}
    named = {SAMPLE_KEY: [*of_row, int(number)], GROUP_KEY: of_row.group}
    return {**sampling_params, "extra_args": {**given, **named}}


def prompt_name(index: Any, raw_prompt: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[str, str]:
    """A prompt's index in its file, and a digest of its text and images: files are joined, and some have no
    index. `tools`: what its tools get, where some agents have the task itself."""
    prompt = [*raw_prompt, {"tools_kwargs": tools}] if tools else list(raw_prompt)
    text = json.dumps(prompt, sort_keys=True, default=_digest)
    return str(index), hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(value: Any) -> str | None:
    """The digest of an image, a video or a sound (bytes, PIL's, numpy's, torch's); None of anything else."""
    if hasattr(value, "numpy"):
        value = value.numpy(force=True)
    content = value if isinstance(value, bytes) else getattr(value, "tobytes", bytes)()
    return hashlib.sha256(content).hexdigest() if content else None


def patch_agent_loops(module: Any) -> None:
    """Let the workers of verl's module `agent_loop`, and all that derive from them, name and end samples."""

    @wrap(module.AgentLoopWorker, "_run_agent_loop", NAMED_SAMPLES)
    async def run_named(
        run: Any, self: Any, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> Any:
        row = kwargs.pop(ROW, None)
        if row is None:
            return await run(self, sampling_params, trajectory, **kwargs)
        sampling_params = with_sample_name(row, kwargs.get("session_id", 0), sampling_params)
        name = sampling_params["extra_args"][SAMPLE_KEY]
        sample_calls.calls_here.begin(name)
        _running.set(name)
        try:
            return await run(self, sampling_params, trajectory, **kwargs)
        finally:
            sample_calls.calls_here.end(name)

    @wrap(module.AgentLoopWorker, "_compute_score", NAMED_SAMPLES)
    async def score_ended(score: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        sample_calls.calls_here.end(_running.get())  # its agent loop has returned: the reward may take long
        return await score(self, *args, **kwargs)
