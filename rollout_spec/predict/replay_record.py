"""What drafting would give somebody's rollouts: the figures of a replay, and how batches run out."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.predict.engine import TAIL_ROWS
from rollout_spec.predict.load import assign, requests_of, rollouts_of
from rollout_spec.predict.replay import Counts, Replayed, ReplayResult
from rollout_spec.trace import Rollout

SHORT = 16  # tokens: responses with fewer are one class of lengths


def replay_record(
    lines: Sequence[Rollout], result: ReplayResult, num_replicas: int, max_num_seqs: int, max_imbalance: int
) -> dict[str, Any]:
    """What `replay --json` prints, of engines that run `max_num_seqs` requests at a time.

    It has `ReplayResult.to_dict`; lengths; by_step and by_length, the replay of some responses; tail_share of
    the engines' steps without drafts; running, the requests in each of these in the longest rollout.
    """
    running = [
        num_running([sum(len(turn.response) for turn in one.turns) for one in requests], max_num_seqs)
        for rollout in rollouts_of(lines)
        for requests in assign(requests_of(rollout, None), num_replicas, max_imbalance)
    ]
    lengths = [response.counts.num_tokens for response in result.responses]
    with_step = [response for response in result.responses if response.step is not None]
    by_length = _by(result.responses, lambda one: max(SHORT, 1 << one.counts.num_tokens.bit_length()))
    return {
        **result.to_dict(),
        "lengths": {
            "median": float(np.median(lengths)),
            "longest_tenth": float(np.quantile(lengths, 0.9)),
            "longest": max(lengths),
        },
        "by_step": [{"step": step, **figures} for step, figures in _by(with_step, lambda one: one.step)],
        "by_length": [
            {"from": end // 2 if end > SHORT else 0, "to": end - 1, **figures} for end, figures in by_length
        ],
        "batch": {"replicas": num_replicas, "max_num_seqs": max_num_seqs, "tail_rows": TAIL_ROWS},
        "tail_share": float((np.concatenate(running) <= TAIL_ROWS).mean()),
        "running": max(running, key=len).tolist(),
    }


def num_running(lengths: Iterable[int], max_num_seqs: int) -> npt.NDArray[np.int64]:
    """How many requests run in each plain step of an engine that serves them in turn, [steps]."""
    rows: list[int] = []  # the step at which each is free again
    begins, ends = [0], [0]
    for length in lengths:
        begins.append(heapq.heappop(rows) if len(rows) == max_num_seqs else 0)
        ends.append(begins[-1] + length)
        heapq.heappush(rows, ends[-1])
    num_steps = max(ends)
    return np.cumsum(np.bincount(begins, minlength=num_steps + 1) - np.bincount(ends))[:num_steps]


def _by(
    responses: Iterable[Replayed], key: Callable[[Replayed], Any]
) -> Iterator[tuple[int, dict[str, float]]]:
    """The figures of the responses of each key, in the order of keys."""
    found: defaultdict[int, list[Counts]] = defaultdict(list)
    for response in responses:
        found[key(response)].append(response.counts)
    for name, each in sorted(found.items()):
        total, names = Counts.sum(each), ("num_tokens", "tokens_per_step", "acceptance_rate")
        yield name, {"num_responses": len(each), **{figure: getattr(total, figure) for figure in names}}
