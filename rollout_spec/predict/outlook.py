"""What drafts would give rollouts that somebody has: replayed, and on engines of a given size."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.config import SpecConfig
from rollout_spec.predict.engine import ModelDrafter
from rollout_spec.predict.load import assign, requests_of, rollouts_of
from rollout_spec.predict.replay import Replayed, ReplayResult
from rollout_spec.predict.simulate import TAIL_ROWS, Cluster, simulate
from rollout_spec.predict.step_times import Times
from rollout_spec.trace import Rollout

SHORT = 16  # tokens: shorter responses are one class of lengths


def outlook(
    lines: Sequence[Rollout],
    result: ReplayResult,
    config: SpecConfig,
    cluster: Cluster,
    times: Times | None = None,
    model: ModelDrafter | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Figures of a replay and of the engines' batches, as JSON has them.

    Args:
        lines: what was replayed.
        config: of the drafter, with batch_threshold, which `predicted` heeds.
        times: of the engines' steps; without, nothing is predicted.
        model: that drafts beside the index in `predicted`.
        on_tokens: called with the tokens of each simulated step.

    Returns:
        `ReplayResult.to_dict`; lengths; by_step and by_length, the replay of some responses; tail_share of
        the engines' plain steps; running, the requests in each of these in the longest rollout; predicted,
        off and on, `simulate`'s figures.
    """
    running = [
        num_running([len(request.response) for request in requests], cluster.max_num_seqs)
        for rollout in rollouts_of(lines)
        for requests in assign(requests_of(rollout, None), cluster.num_replicas, cluster.by_group)
    ]
    steps = np.concatenate(running)
    predicted = times and {
        name: simulate(lines, cluster, one, times, TAIL_ROWS, on_tokens, drafter)
        for name, one, drafter in (("off", SpecConfig(method="off"), None), ("on", config, model))
    }
    lengths = [response.num_tokens for response in result.responses]
    return {
        **result.to_dict(),
        "tail_tokens_per_step": result.tail_tokens_per_step,
        "lengths": {
            "median": float(np.median(lengths)),
            "longest_tenth": float(np.quantile(lengths, 0.9)),
            "longest": max(lengths),
        },
        "by_step": [
            {"step": step, **figures} for step, figures in _by(result.responses, lambda one: one.step)
        ],
        "by_length": [
            {"from": end // 2 if end > SHORT else 0, "to": end - 1, **figures}
            for end, figures in _by(
                result.responses, lambda one: max(SHORT, 1 << one.num_tokens.bit_length())
            )
        ],
        "batch": {
            "replicas": cluster.num_replicas,
            "max_num_seqs": cluster.max_num_seqs,
            "tail_rows": TAIL_ROWS,
        },
        "tail_share": float((steps <= TAIL_ROWS).mean()),
        "running": max(running, key=len).tolist(),
        "predicted": predicted,
    }


def num_running(lengths: Iterable[int], max_num_seqs: int) -> npt.NDArray[np.int64]:
    """How many requests run in each plain step of an engine that serves them in turn, [steps]."""
    ends: list[int] = []
    changes: defaultdict[int, int] = defaultdict(int)
    for length in lengths:
        begin = heapq.heappop(ends) if len(ends) == max_num_seqs else 0
        heapq.heappush(ends, begin + length)
        changes[begin] += 1
        changes[begin + length] -= 1
    each = np.zeros(max(changes, default=0), np.int64)
    for step, change in changes.items():
        each[step : step + 1] += change
    return each.cumsum()


def _by(
    responses: Iterable[Replayed], key: Callable[[Replayed], int | None]
) -> Iterator[tuple[int, dict[str, float]]]:
    """The figures of the responses of each key, in its order; those without one are left out."""
    parts: defaultdict[int, list[Replayed]] = defaultdict(list)
    for response in responses:
        if (name := key(response)) is not None:
            parts[name].append(response)
    for name in sorted(parts):
        tokens, steps, drafted, accepted = np.sum([one[1:] for one in parts[name]], axis=0).tolist()
        decoded = tokens - sum(one.num_tokens > 0 for one in parts[name])  # the prefill gives the first
        yield (
            name,
            {
                "num_responses": len(parts[name]),
                "num_tokens": tokens,
                "tokens_per_step": decoded / steps if steps else 0.0,
                "acceptance_rate": accepted / drafted if drafted else 0.0,
            },
        )
