"""The demo's headline: the same requests with drafts off and on in turns, in one process.

Two trainings run one after the other, and a machine may change in between. Here two engines of one process
serve each set of requests right after each other, so both sides of a pair have the same machine, the same
policy and the same tokens; only drafts differ. Knows neither torch nor vLLM: `turns_worker` serves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec import trace
from rollout_spec.report.responses import Agreement, agreement
from rollout_spec.report.runs import paired
from rollout_spec.report.turns import Turns
from rollout_spec_lab.bench.engine import Load, Plan, answer
from rollout_spec_lab.bench.timeline import Timeline, measure

WORKER = "rollout_spec_lab.demo.turns_worker"
METHODS = ("off:coupled", "sam")  # plain vLLM with our noise: its tokens are those of `sam`
LEAST_PAIRS, MOST_PAIRS = 4, 64  # each method begins half of the pairs
# Of an accelerator's memory, for each of the two engines.
MEMORY_SHARE = 0.4


def plan_of(training: Path, model: Path, on_device: Mapping[str, Any]) -> tuple[Plan, int]:
    """What to serve: the prompts of a training, sampled as it did, by engines as large as its own.

    Args:
        training: the folder of a run with drafts: its configuration and its recorded rollouts are read.
        model: the policy.
        on_device: `device_arguments` of this machine.

    Returns:
        The plan, and how many prompts the training took in a step.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.load(training / "hydra" / ".hydra" / "config.yaml")
    rollout = config.actor_rollout_ref.rollout
    lines = [line for file in sorted((training / trace.FOLDER).glob("*.jsonl")) for line in trace.read_trace(file)]
    prompts = list(dict.fromkeys(tuple(line.prompt_token_ids.tolist()) for line in lines))
    engine = dict(on_device) or {"gpu_memory_utilization": MEMORY_SHARE, "enforce_eager": rollout.enforce_eager}
    load = Load(
        prompts=prompts, group_size=rollout.n, max_tokens=config.data.max_response_length, natural_ends=True,
        temperature=rollout.temperature, seed=config.data.seed or 0,
    )  # fmt: skip
    plan = Plan(
        load=load, methods=METHODS, model=str(model), dtype=rollout.dtype,
        engine=engine | {
            "max_num_seqs": rollout.max_num_seqs, "max_model_len": max(map(len, prompts)) + load.max_tokens
        },
        spec=OmegaConf.to_container(config.rollout.spec, resolve=True),
    )  # fmt: skip
    return plan, config.data.train_batch_size


def serve_in_turns(plan: Plan, size: int, seconds: float, folder: Path) -> Turns:
    """Serve pairs until the seconds are over, LEAST_PAIRS at least.

    Args:
        plan: its methods and repeats are not read. The load's prompts are taken `size` at a time, over and
            over, as a training takes them in its epochs.
        folder: where the process's files lie while it runs, and stay if it fails.

    Raises:
        EngineError: the process has failed.
    """
    pairs = list(itertools.islice(pairs_of(plan.load, size), MOST_PAIRS))
    job = plan.job(0, METHODS[0]) | {"pairs": pairs, "seconds": seconds, "least": LEAST_PAIRS}
    return figures(answer(WORKER, job, "turns", folder)["pairs"])


def pairs_of(load: Load, size: int) -> Iterator[list[dict[str, Any]]]:
    """The requests of each pair, without end: those of the next `size` prompts, with noise of their own."""
    requests = load.requests(0)
    groups = [requests[i : i + load.group_size] for i in range(0, len(requests), load.group_size)]
    endless = itertools.cycle(groups)
    for number in itertools.count():
        pair = itertools.chain.from_iterable(itertools.islice(endless, min(size, len(groups))))
        yield [one | {"name": [*one["name"], number]} for one in pair]


def in_turn(number: int) -> Sequence[str]:
    """The methods in the order of a pair: each pair begins with the other one."""
    return METHODS if number % 2 == 0 else METHODS[::-1]


def figures(pairs: Sequence[Mapping[str, Mapping[str, Any]]]) -> Turns:
    """What the pairs say. Each side of a pair is what `engine_worker.rollout` gives."""
    off, on = ([measure(Timeline(**pair[method]["timeline"]), 0) for pair in pairs] for method in METHODS)
    tokens_per_second = paired(*(_amounts(side, "num_tokens", "makespan_s") for side in (off, on)))
    return Turns(
        *tokens_per_second,
        agreement=_agreement(pairs),
        seconds=[(one["makespan_s"], other["makespan_s"]) for one, other in zip(off, on, strict=True)],
        tokens_per_step=_ratio(on, "num_decoded_tokens", "num_row_steps"),
        acceptance_rate=_ratio(on, "num_accepted_tokens", "num_draft_tokens"),
    )


def _agreement(pairs: Sequence[Mapping[str, Mapping[str, Any]]]) -> Agreement:
    found = [
        agreement(one, other)
        for pair in pairs
        for one, other in zip(*(pair[method]["responses"] for method in METHODS), strict=True)
    ]
    return Agreement(sum(one.num_tokens for one in found), sum(one.num_identical for one in found))


def _amounts(side: Sequence[Mapping[str, float]], *names: str) -> np.ndarray:
    return np.array([[one[name] for one in side] for name in names], float)


def _ratio(side: Sequence[Mapping[str, float]], numerator: str, denominator: str) -> float:
    above, below = _amounts(side, numerator, denominator).sum(axis=1)
    return float(above / below) if below else math.nan
