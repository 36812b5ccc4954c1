"""The demo's speed: one process serves the same requests with drafts off and on, in turns.

Two trainings run one after the other, and a machine may change in between. Here two engines serve each set of
requests right after each other. So both sides of a pair have the same machine, the same policy and the same
tokens; only drafts differ. Knows neither torch nor vLLM: `turns_worker` serves.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.cli.models import prompt_rows, tokenized
from rollout_spec.config import SpecConfig
from rollout_spec.report.measures import Estimate, paired
from rollout_spec.report.responses import Agreement, agreement
from rollout_spec.report.runs import for_json, ratio
from rollout_spec_lab.bench.engine import EnginePlan
from rollout_spec_lab.bench.jobs import answers, last
from rollout_spec_lab.bench.load import Load
from rollout_spec_lab.bench.timeline import Timeline
from rollout_spec_lab.verl_cpu.activation import engine_is_cpu_build
from rollout_spec_lab.verl_cpu.environment import engine_environment

WORKER = "rollout_spec_lab.demo.turns_worker"
METHODS = ("keyed", "sam")  # plain vLLM with our random numbers: its tokens are those of `sam`
LEAST_PAIRS, MOST_PAIRS = 4, 64  # each method begins half of the pairs
MEMORY_SHARE = 0.4  # of an accelerator's memory, for each of the two engines


@dataclasses.dataclass(frozen=True)
class Turns:
    """What the pairs say: tokens per second without drafts and with them, intervals over pairs."""

    off: Estimate
    on: Estimate
    speedup: Estimate
    agreement: Agreement  # of the two sides' tokens
    seconds: Sequence[tuple[float, float]]  # of each pair, without drafts and with them
    tokens_per_step: float  # with drafts; NaN where nothing decoded
    acceptance_rate: float  # NaN where nothing was drafted

    def to_dict(self) -> dict[str, Any]:
        estimates = {name: getattr(self, name).to_dict() for name in ("off", "on", "speedup")}
        rates = {name: for_json(getattr(self, name)) for name in ("tokens_per_step", "acceptance_rate")}
        seconds = [list(pair) for pair in self.seconds]
        return estimates | rates | {"agreement": self.agreement.to_dict(), "seconds": seconds}


def prompts_of(config: Any, model: str, train_file: str, num_steps: int) -> list[list[int]]:
    """The prompts of a training's steps. Imports torch."""
    num_rows = config.data.train_batch_size * num_steps
    return tokenized(model, prompt_rows("--train-file", Path(train_file), num_rows))


def plan_of(config: Any, prompts: list[list[int]], model: Path) -> tuple[EnginePlan, int]:
    """What to serve, and how many prompts a training step takes; `config` is verl's of the training with
    drafts. The prompts are sampled as it does, by engines with its options and this policy."""
    rollout = config.actor_rollout_ref.rollout
    load = Load(
        prompts=prompts, group_size=rollout.n, max_tokens=config.data.max_response_length, natural_ends=True,
        temperature=rollout.temperature,
    )  # fmt: skip
    engine = {name: rollout[name] for name in ("max_num_seqs", "max_num_batched_tokens", "enforce_eager")}
    engine |= {"max_model_len": max(map(len, prompts)) + load.max_tokens}
    engine |= {} if engine_is_cpu_build() else {"gpu_memory_utilization": MEMORY_SHARE}
    further = rollout.engine_kwargs.vllm  # the drafter's own arguments, too
    engine |= {name: further[name] for name in ("block_size", "kv_cache_memory_bytes") if name in further}
    known = SpecConfig.__dataclass_fields__  # not a model that drafts: the text alone
    spec = {name: value for name, value in config.rollout.spec.items() if name in known}
    plan = EnginePlan(load, METHODS, str(model), rollout.dtype, engine, spec)
    return plan, config.data.train_batch_size


def serve_in_turns(plan: EnginePlan, size: int, seconds: float, folder: Path) -> Turns:
    """Serve pairs until the seconds are over, LEAST_PAIRS at least; in `folder` files stay if that fails.

    The load's prompts are taken `size` at a time, over and over, as a training takes them in its epochs.

    Raises EngineError: the process has failed.
    """
    pairs = list(itertools.islice(pairs_of(plan.load, size), MOST_PAIRS))
    job = {"engine_job": plan.job(0, METHODS[0]), "pairs": pairs, "seconds": seconds, "least": LEAST_PAIRS}
    environment = engine_environment() if engine_is_cpu_build() else {}  # as the trainings' engines have it
    return turns_of(last(answers(WORKER, job, "turns", folder, environment=environment))["pairs"])


def pairs_of(load: Load, size: int) -> Iterator[list[dict[str, Any]]]:
    """The requests of each pair, without end: those of the next `size` prompts; no name comes twice."""
    requests = load.requests(0)
    groups = [requests[i : i + load.group_size] for i in range(0, len(requests), load.group_size)]
    endless = itertools.cycle(groups)
    for number in itertools.count():
        pair = itertools.chain.from_iterable(itertools.islice(endless, min(size, len(groups))))
        yield [request | {"name": [*request["name"], number]} for request in pair]


def in_turn(number: int) -> Sequence[str]:
    """The methods in the order of a pair: each pair begins with the other one."""
    return METHODS if number % 2 == 0 else METHODS[::-1]


def turns_of(pairs: Sequence[Mapping[str, Mapping[str, Any]]]) -> Turns:
    """Each side of a pair is what `engine_worker.rollout` gives."""
    off, on = ([Timeline(**pair[method]["timeline"]).figures(0) for pair in pairs] for method in METHODS)

    def amounts(side: Sequence[Mapping[str, float]], *names: str) -> np.ndarray:
        return np.array([[one[name] for one in side] for name in names], float)

    speed = ("num_tokens", "makespan_s")

    def share(*names: str) -> float:
        return ratio(*amounts(on, *names).sum(axis=1).tolist())

    agreed = (
        agreement(one, other)
        for pair in pairs
        for one, other in zip(*(pair[method]["responses"] for method in METHODS), strict=True)
    )
    return Turns(
        *paired(amounts(off, *speed), amounts(on, *speed)),
        agreement=Agreement.sum(agreed),
        seconds=[(one["makespan_s"], other["makespan_s"]) for one, other in zip(off, on, strict=True)],
        tokens_per_step=share("num_decoded_tokens", "num_row_steps"),
        acceptance_rate=share("num_accepted_tokens", "num_draft_tokens"),
    )
