"""What each part is to do: a job for `worker`, or the plan of its rollouts."""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollout_spec.config import SpecConfig
from rollout_spec.predict.step_times import Times
from rollout_spec_lab.bench import engine
from rollout_spec_lab.bench.jobs import EngineJob
from rollout_spec_lab.bench.load import Load

SEED = 0
ROOM = 512  # tokens after a context, for the steps that are timed


class Size(NamedTuple):
    num_prompts: int
    group_size: int
    max_num_seqs: int
    median_tokens: float
    max_tokens: int
    recorded_tokens: int  # of a recorded response, at most
    tail_threshold: int
    certified_tokens: int
    contexts: Sequence[int]
    nums_rows: Sequence[int]
    nums_drafts: Sequence[int]
    num_steps: int
    vocab_size: int  # of `verify` and `start`


ACCELERATOR = Size(
    num_prompts=16, group_size=8, max_num_seqs=64, median_tokens=256.0, max_tokens=2048, recorded_tokens=4096,
    tail_threshold=8, certified_tokens=128, contexts=[256, 2048, 7168], nums_rows=[1, 4, 16, 64],
    nums_drafts=[0, 1, 3, 7, 15], num_steps=8, vocab_size=151_936,
)  # fmt: skip
CPU = Size(
    num_prompts=4, group_size=4, max_num_seqs=8, median_tokens=40.0, max_tokens=200, recorded_tokens=200,
    tail_threshold=3, certified_tokens=32, contexts=[64, 384], nums_rows=[1, 4, 8], nums_drafts=[0, 3, 7],
    num_steps=4, vocab_size=32_000,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CheckPlan:
    seconds: float  # for all of it
    jobs: Mapping[str, Mapping[str, Any]]  # for `worker`, by the parts in their order; rollouts have none
    rollouts: engine.EnginePlan | str  # with as many `repeats` as there is time for; or why there are none
    rooflines: Mapping[str, Times] = dataclasses.field(default_factory=dict)  # of `engine.predict`
    described: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for the record, under `plan`


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy, and how it is served in all parts but `start`."""

    size: Size
    folder: str  # of the model
    has_weights: bool
    dtype: str
    on_device: Mapping[str, Any]  # vLLM's arguments for this machine
    given: Mapping[str, Any]  # the user's arguments for vLLM

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((Path(self.folder) / "config.json").read_text())

    @property
    def longest(self) -> int:
        """Tokens that it takes in all; what its configuration does not say is not checked here."""
        return int(self.config.get("max_position_embeddings") or 1 << 20)

    @property
    def engine(self) -> dict[str, Any]:
        dummy = {} if self.has_weights else {"load_format": "dummy"}
        return {"max_num_seqs": self.size.max_num_seqs, **self.on_device, **self.given, **dummy}


def rollouts(
    policy: Policy, load: Load, methods: Sequence[str], drafter: Mapping[str, Any] | None, repeats: int
) -> engine.EnginePlan:
    longest = max(map(len, load.prompts)) + load.max_tokens
    return engine.EnginePlan(
        load=load, methods=methods, model=policy.folder, dtype=policy.dtype, spec={}, model_drafter=drafter,
        repeats=repeats, tail_threshold=policy.size.tail_threshold,
        engine=policy.engine | {"max_model_len": longest},
    )  # fmt: skip


def start(policy: Policy, folder: Path) -> dict[str, Any]:
    """The job that starts engines, with a tiny policy of its own, made in `folder`."""
    own = {"folder": str(folder), "dtype": policy.dtype, "vocab_size": policy.size.vocab_size}
    return own | {"engine": {**policy.on_device, **policy.given}}


def verify(size: Size) -> dict[str, Any]:
    return {"nums_rows": size.nums_rows, "nums_drafts": size.nums_drafts, "vocab_size": size.vocab_size}


def certify(policy: Policy, rollouts: engine.EnginePlan) -> dict[str, Any]:
    """The job that certifies, with some prompts of the rollouts."""
    load, own = rollouts.load, {} if policy.has_weights else {"skip_tokenizer_init": True}
    return {"plan": {
        "model": policy.folder, "prompts": load.prompts[:4], "temperatures": [1.0],
        "nums_speculative_tokens": [SpecConfig.num_speculative_tokens], "batch_thresholds": [64],
        "group_sizes": [4], "max_tokens": min(policy.size.certified_tokens, load.max_tokens), "top_k": 0,
        "top_p": 1.0, "seed": SEED, "dtype": policy.dtype, "tolerance": None,
        "model_drafter": rollouts.model_drafter, "engine": {**rollouts.engine, **own},
    }}  # fmt: skip


def steps(policy: Policy) -> dict[str, Any]:
    size, longest = policy.size, policy.longest
    contexts = [one for one in size.contexts if one + ROOM <= longest] or [longest // 2]
    rows, drafts = max(size.nums_rows), max(size.nums_drafts)
    room = {"max_num_seqs": rows, "max_model_len": min(longest, max(contexts) + ROOM)}
    if not policy.on_device:
        room["max_num_batched_tokens"] = max(2048, rows * (1 + drafts))  # all rows in one step
    job = EngineJob(
        model=policy.folder, dtype=policy.dtype, seed=SEED, method="sam:0",
        spec={"num_speculative_tokens": drafts}, engine=policy.engine | room | {**policy.given},
    )  # fmt: skip
    return {
        "engine_job": job, "contexts": contexts, "nums_rows": size.nums_rows, "nums_drafts": size.nums_drafts,
        "num_steps": size.num_steps,
    }  # fmt: skip
