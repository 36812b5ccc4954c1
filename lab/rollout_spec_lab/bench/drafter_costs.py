"""What drafting costs an engine: the time of a step. Methods take turns.

A step is timed as vLLM's engine calls it, with what it has at hand: `propose` of vLLM's own proposers, and
`Drafter.draft` of ours with an open gate.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.native import Int32Array
from rollout_spec.trace import Rollout, TraceError
from rollout_spec_lab.bench.drafters import NGRAM, SUFFIX, Batch, Suffix, require

BATCHES = (1, 8, 64, 256)
CONTEXT = 2048  # tokens of a row, prompt included, or what there is
NUM_STEPS = 32  # timed, each with one new token a row
NUM_ROUNDS = 5  # with rows of their own; more for small batches, whose rows are few
MIN_ROWS = 640  # in all rounds together
CALLED = ("ngram", *SUFFIX, "sam")  # what an engine could call; off and oracle it could not

Propose = Callable[[Batch, list[list[int]]], list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A request in the middle of its response."""

    line: int
    """Rows of the same line are siblings."""
    num_prompt_tokens: int
    token_ids: Int32Array


def measure_costs(
    lines: Sequence[Rollout], methods: Sequence[str], config: SpecConfig, batches: Sequence[int] = BATCHES
) -> list[dict[str, Any]]:
    """What methods cost, each once, with the options of `config`.

    Returns:
        Of each method that an engine could call: us_per_row of a step, by the rows of the batch.

    Raises:
        TraceError: the trace has no response that is long enough.
    """
    check(lines)
    called = [method for method in dict.fromkeys(methods) if method in CALLED]
    costs: list[dict[str, Any]] = [
        {"method": method, "num_speculative_tokens": config.num_speculative_tokens, "us_per_row": {}}
        for method in called
    ]
    for size in batches:
        for cost, seconds in zip(costs, time_steps(lines, called, config, size), strict=True):
            cost["us_per_row"][str(size)] = 1e6 * seconds
    return costs


def check(lines: Sequence[Rollout]) -> None:
    """Raise TraceError where no response is long enough for `rows_of`."""
    if not any(len(response) > NUM_STEPS for line in lines for response in line.responses):
        raise TraceError(f"no response has the {NUM_STEPS + 1} tokens that costs are measured with")


def time_steps(
    lines: Sequence[Rollout], methods: Sequence[str], config: SpecConfig, size: int
) -> list[float]:
    """Seconds per row of a step in Python, for a batch of so many rows: medians; all have the same rows."""
    rows = rows_of(lines)
    seconds: list[list[float]] = [[] for _ in methods]
    for number in range(max(NUM_ROUNDS, MIN_ROWS // size)):
        of_round = list(islice(rows, size))
        for i in _turns(len(methods), number):
            seconds[i] += _time_round(methods[i], config, of_round)
    return [float(np.median(times)) / size for times in seconds]


def _turns(num: int, number: int) -> list[int]:
    """0 to num - 1 in an order of its own for each round: what runs before leaves the memory as it is."""
    return np.random.default_rng(number).permutation(num).tolist()


def _time_round(method: str, config: SpecConfig, rows: Sequence[Row]) -> list[float]:
    """Seconds of each of NUM_STEPS steps."""
    batch = make_batch(rows)
    propose = engine_call(method, config, batch, rows)
    levels = batch.num_prompt_tokens.copy()
    seconds = []
    # The first step takes in what was there before and is not timed.
    for step in range(-1, NUM_STEPS):
        batch.num_tokens_no_spec[:] = [len(row.token_ids) - NUM_STEPS + 1 + step for row in rows]
        sampled = [
            row.token_ids[begin:end].tolist()
            for row, begin, end in zip(rows, levels, batch.num_tokens_no_spec, strict=True)
        ]
        levels[:] = batch.num_tokens_no_spec
        begin_time = time.perf_counter()
        propose(batch, sampled)
        seconds.append(time.perf_counter() - begin_time)
    return seconds[1:]


def rows_of(lines: Sequence[Rollout]) -> Iterator[Row]:
    """Rows without end: the responses of a line, then those of the next, whatever is long enough."""
    for number, line in enumerate(endless(lines)):
        for response in line.responses:
            if len(response) > NUM_STEPS:
                num_prompt_tokens = len(line.prompt_token_ids)
                text = np.concatenate([line.prompt_token_ids, response])
                num_tokens = max(num_prompt_tokens + 1, CONTEXT) + NUM_STEPS
                yield Row(number, num_prompt_tokens, text[:num_tokens])


def endless(lines: Sequence[Rollout]) -> Iterator[Rollout]:
    """The lines, then again with the tokens of the trace permuted, each time anew: text that is as repetitive
    as the trace, but does not repeat it."""
    yield from lines
    texts = [text for line in lines for text in (line.prompt_token_ids, *line.responses)]
    vocabulary = np.unique(np.concatenate(texts))
    rng = np.random.default_rng(0)
    while True:
        permuted = rng.permutation(vocabulary)
        for line in lines:
            prompt, *responses = (
                permuted[np.searchsorted(vocabulary, text)]
                for text in (line.prompt_token_ids, *line.responses)
            )
            yield Rollout(line.group, line.step, prompt, responses)


def make_batch(rows: Sequence[Row]) -> Batch:
    """The rows with all their tokens; how many of them each has is to be set."""
    batch = Batch(
        req_ids=[str(i) for i in range(len(rows))],
        num_prompt_tokens=np.array([row.num_prompt_tokens for row in rows], np.int32),
        token_ids_cpu=np.zeros((len(rows), max(len(row.token_ids) for row in rows)), np.int32),
        num_tokens_no_spec=np.zeros(len(rows), np.int32),
    )
    for tokens, row in zip(batch.token_ids_cpu, rows, strict=True):
        tokens[: len(row.token_ids)] = row.token_ids
    return batch


def engine_call(method: str, config: SpecConfig, batch: Batch, rows: Sequence[Row]) -> Propose:
    """What an engine calls for the rows' drafts, by one of the methods in CALLED."""
    k = config.num_speculative_tokens
    num_rows, longest = batch.token_ids_cpu.shape
    if method in SUFFIX:
        suffix = Suffix(method, k).proposer
        return lambda batch, sampled: suffix.propose(k, batch, sampled)
    if method == "ngram":
        require(method)
        from rollout_spec_lab.bench.vllm_drafters import ngram_proposer

        ngram = ngram_proposer(k, *NGRAM, num_rows, longest + k + 1)
        return lambda batch, sampled: ngram.propose(k, sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)
    drafter = Drafter(dataclasses.replace(config, batch_threshold=num_rows))
    for name, row in zip(batch.req_ids, rows, strict=True):
        drafter.add(name, row.token_ids[: row.num_prompt_tokens], longest + k + 1, row.line)

    def propose(batch: Batch, sampled: list[list[int]]) -> list[list[int]]:
        nums_new_tokens = list(map(len, sampled))
        return drafter.draft(batch.req_ids, nums_new_tokens, batch.token_ids_cpu, batch.num_tokens_no_spec)

    return propose
