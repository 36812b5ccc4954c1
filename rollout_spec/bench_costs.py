"""What drafting costs an engine: the time of a step and of an indexed token, and bytes. Methods take turns.

A step is timed as vLLM's engine calls it, with what it has at hand: `propose` of vLLM's own proposers, and
`Drafter.step` of ours with an open gate.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from rollout_spec.bench_drafters import (
    NGRAM,
    OURS,
    SUFFIX,
    Batch,
    Settings,
    Suffix,
    our_config,
    require,
    settings_of,
)
from rollout_spec.drafter import Drafter
from rollout_spec.native import Float64Array, Int32Array
from rollout_spec.replay import Rollout, TraceError

BATCHES = (1, 8, 64, 256)
CONTEXT = 2048  # tokens of a row, prompt included, or what there is
NUM_STEPS = 32  # timed, each with one new token a row
NUM_ROUNDS = 5  # with rows of their own; more for small batches, whose rows are few
MIN_ROWS = 640  # in all rounds together: a 99th percentile takes many steps
SIZES = (2048, 32768, 131072)
TOKENS_PER_STEP = 512  # of all requests, to be indexed
BASELINE = "suffix"

Run = tuple[str, Settings]  # a method as it is measured
Propose = Callable[[Batch, list[list[int]]], list[list[int]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A request in the middle of its response."""

    line: int
    """Rows of the same line are siblings."""
    num_prompt_tokens: int
    token_ids: Int32Array


def add_costs(lines: Sequence[Rollout], results: Sequence[dict[str, Any]], ks: Iterable[int]) -> None:
    """Add to the results of a trace what their methods cost, whatever the history.

    tokens_per_row, us_per_row, p99_over_median: of a step, by the rows of the batch.
    suffix_over_us_per_row: the time of `suffix` over that of the same step: median, 10th and 90th percentile.
    us_per_row_by_length: of a step of one row alone, by its tokens.
    ns_per_indexed_token, bytes_per_token: by the tokens of a text.
    A value is None where there is nothing to measure: of off and oracle, which no engine could call, of ngram
    which keeps no index, and the ratio without the method `suffix`.

    Args:
        lines: of the trace.
        results: of `bench_drafters.measure`.
        ks: the numbers of draft tokens among the results.

    Raises:
        TraceError: the trace has no response that is long enough.
    """
    index = measure_index(lines, list(dict.fromkeys(result["method"] for result in results)))
    for k in ks:
        of_k = [result for result in results if result["num_speculative_tokens"] == k]
        runs = list(dict.fromkeys(_run(result) for result in of_k))
        steps = dict(zip(runs, measure_steps(lines, runs), strict=True))
        lengths = dict(zip(runs, measure_lengths(lines, runs), strict=True))
        for result in of_k:
            run = _run(result)
            result.update(steps[run] | {"us_per_row_by_length": lengths[run]} | index[result["method"]])


def _run(result: dict[str, Any]) -> Run:
    return result["method"], settings_of(result)


def measure_steps(
    lines: Sequence[Rollout], runs: Sequence[Run], batches: Sequence[int] = BATCHES
) -> list[dict[str, Any]]:
    """The time of a step in Python, for batches of so many rows; runs take turns, all with the same rows."""
    costs: list[dict[str, Any]] = [
        {"tokens_per_row": {}, "us_per_row": {}, "p99_over_median": {}, "suffix_over_us_per_row": {}}
        for _ in runs
    ]
    suffix = next((i for i, (method, _) in enumerate(runs) if method == BASELINE), None)
    for size in batches:
        rows = rows_of(lines)
        rounds = [list(islice(rows, size)) for _ in range(max(NUM_ROUNDS, MIN_ROWS // size))]
        per_row = _time_rounds(runs, rounds) / size
        num_tokens = float(np.mean([len(row.token_ids) for of_round in rounds for row in of_round]))
        for cost, times in zip(costs, per_row, strict=True):
            cost["tokens_per_row"][str(size)] = num_tokens
            found = _summary(times, None if suffix is None else per_row[suffix])
            for name, value in found.items():
                cost[name][str(size)] = value
    return costs


def measure_lengths(
    lines: Sequence[Rollout], runs: Sequence[Run], sizes: Sequence[int] = SIZES
) -> list[dict[str, float | None]]:
    """Microseconds of a step of one row with so many tokens of `long_text`; runs take turns."""
    costs: list[dict[str, float | None]] = [{} for _ in runs]
    for size in sizes:
        texts = long_text(lines, NUM_ROUNDS * (size + NUM_STEPS)).reshape(NUM_ROUNDS, -1)
        for cost, times in zip(costs, _time_rounds(runs, [[Row(0, 1, text)] for text in texts]), strict=True):
            cost[str(size)] = _summary(times, None)["us_per_row"]
    return costs


def _time_rounds(runs: Sequence[Run], rounds: Sequence[Sequence[Row]]) -> Float64Array:
    """Seconds of all steps of each run, [num_runs, num_rounds * NUM_STEPS]."""
    seconds = np.empty((len(runs), len(rounds), NUM_STEPS))
    for number, of_round in enumerate(rounds):
        for i in _turns(len(runs), number):
            seconds[i, number] = _time_steps(*runs[i], of_round)
    return seconds.reshape(len(runs), -1)


def _turns(num: int, number: int) -> list[int]:
    """0 to num - 1 in an order of its own for each round: what runs before leaves the memory as it is."""
    return np.random.default_rng(number).permutation(num).tolist()


def _summary(times: Float64Array, suffix: Float64Array | None) -> dict[str, Any]:
    if np.isnan(times[0]):
        return dict.fromkeys(("us_per_row", "p99_over_median", "suffix_over_us_per_row"))
    median = float(np.median(times))
    ratio = None
    if suffix is not None:
        values = map(float, np.percentile(suffix / times, [50, 10, 90]))
        ratio = dict(zip(("median", "p10", "p90"), values, strict=True))
    return {
        "us_per_row": 1e6 * median,
        "p99_over_median": float(np.percentile(times, 99)) / median,
        "suffix_over_us_per_row": ratio,
    }


def check(lines: Sequence[Rollout]) -> None:
    """Raise TraceError where no response is long enough for `rows_of`."""
    if not any(len(response) > NUM_STEPS for line in lines for response in line.responses):
        raise TraceError(f"no response has the {NUM_STEPS + 1} tokens that costs are measured with")


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


def _time_steps(method: str, settings: Settings, rows: Sequence[Row]) -> Float64Array:
    """Seconds of each step, [NUM_STEPS]; nan for what no engine could call."""
    batch = make_batch(rows)
    propose = engine_call(method, settings, batch, rows)
    seconds = np.full(NUM_STEPS, np.nan)
    if propose is None:
        return seconds
    levels = batch.num_prompt_tokens.copy()
    # The first step takes in what was said before and is not timed.
    for step in range(-1, NUM_STEPS):
        batch.num_tokens_no_spec[:] = [len(row.token_ids) - NUM_STEPS + 1 + step for row in rows]
        sampled = [
            row.token_ids[begin:end].tolist()
            for row, begin, end in zip(rows, levels, batch.num_tokens_no_spec, strict=True)
        ]
        levels[:] = batch.num_tokens_no_spec
        begin_time = time.perf_counter()
        propose(batch, sampled)
        if step >= 0:
            seconds[step] = time.perf_counter() - begin_time
    return seconds


def engine_call(method: str, settings: Settings, batch: Batch, rows: Sequence[Row]) -> Propose | None:
    """What an engine calls for the rows' drafts; None for a method that none could call."""
    k = settings.num_speculative_tokens
    num_rows, longest = batch.token_ids_cpu.shape
    if method in SUFFIX:
        suffix = Suffix(method, settings).proposer
        return lambda batch, sampled: suffix.propose(k, batch, sampled)
    if method == "ngram":
        require(method)
        from rollout_spec.vllm_drafters import ngram_proposer

        ngram = ngram_proposer(k, *NGRAM, num_rows, longest + k + 1)
        return lambda batch, sampled: ngram.propose(k, sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)
    if method not in OURS:
        return None
    drafter = Drafter(dataclasses.replace(our_config(method, settings), batch_threshold=num_rows))
    for name, row in zip(batch.req_ids, rows, strict=True):
        drafter.open(name, row.token_ids[: row.num_prompt_tokens], longest + k + 1, row.line)

    def propose(batch: Batch, sampled: list[list[int]]) -> list[list[int]]:
        nums_new_tokens = list(map(len, sampled))
        return drafter.step(batch.req_ids, nums_new_tokens, batch.token_ids_cpu, batch.num_tokens_no_spec)

    return propose


def measure_index(
    lines: Sequence[Rollout], methods: Sequence[str], sizes: Sequence[int] = SIZES
) -> dict[str, dict[str, Any]]:
    """Nanoseconds and bytes of an indexed token, by method and by the length of the texts.

    The tokens are the trace's responses, one after the other; behind them the same with the tokens permuted
    (see `endless`), as often as it takes. Every size indexes all of them, as the responses of as many
    requests, each of its own group, that run at once: a step brings TOKENS_PER_STEP tokens, to all requests
    alike. The methods take turns; times are medians of NUM_ROUNDS runs.
    """
    text = long_text(lines, max(sizes))
    kept = [method for method in methods if method in SUFFIX or method in OURS]
    nothing: dict[str, float | None] = dict.fromkeys(map(str, sizes))
    costs: dict[str, dict[str, Any]] = {
        method: {"ns_per_indexed_token": {**nothing}, "bytes_per_token": {**nothing}} for method in methods
    }
    for size in sizes:
        texts = text[: len(text) // size * size].reshape(-1, size)
        found: dict[str, list[tuple[float, float]]] = {method: [] for method in kept}
        for number in range(NUM_ROUNDS):
            for i in _turns(len(kept), number):
                found[kept[i]].append(_index_texts(kept[i], texts))
        for method in kept:
            nanoseconds, num_bytes = np.median(found[method], axis=0).tolist()
            costs[method]["ns_per_indexed_token"][str(size)] = nanoseconds
            costs[method]["bytes_per_token"][str(size)] = num_bytes
    return costs


def long_text(lines: Sequence[Rollout], num_tokens: int) -> Int32Array:
    """The responses of `endless` lines, one after the other."""
    responses: list[Int32Array] = []
    for line in endless(lines):
        responses += line.responses
        if sum(map(len, responses)) >= num_tokens:
            break
    return np.concatenate(responses)[:num_tokens]


def _index_texts(method: str, texts: Int32Array) -> tuple[float, float]:
    """Nanoseconds and bytes per token of texts, int32 [n, length]."""
    index = _Index(method, texts)
    num_new = TOKENS_PER_STEP // len(texts)
    start = time.perf_counter_ns()
    for level in range(num_new, texts.shape[1] + 1, num_new):
        index.step(level - num_new, level)
    return (time.perf_counter_ns() - start) / texts.size, index.num_bytes / texts.size


class _Index:
    """The index of an engine whose n requests say texts, int32 [n, length]; of a method in SUFFIX or OURS."""

    def __init__(self, method: str, texts: Int32Array) -> None:
        self._texts = texts
        self._names = [str(i) for i in range(len(texts))]
        self._cache = Suffix(method, Settings(1)).cache if method in SUFFIX else None
        if self._cache is not None:
            for name in self._names:
                self._cache.start_request(name, texts[0, :0])
            return
        self._drafter = Drafter(dataclasses.replace(our_config(method, Settings(1)), batch_threshold=0))
        for name in self._names:
            self._drafter.open(name, texts[0, :0], texts.shape[1], group=name)
        self._levels = np.zeros(len(texts), np.int32)  # what an engine has at hand

    def step(self, begin: int, end: int) -> None:
        """Every request has said its tokens from `begin` to `end`."""
        if self._cache is not None:
            for name, text in zip(self._names, self._texts, strict=True):
                self._cache.add_active_response(name, text[begin:end])
        else:
            self._levels.fill(end)
            self._drafter.step(self._names, [end - begin] * len(self._names), self._texts, self._levels)

    @property
    def num_bytes(self) -> int:
        if self._cache is None:
            return self._drafter.index.stats().num_bytes
        trees = [self._cache._global_tree, *self._cache._local_trees.values()]
        return sum(tree.estimate_memory() for tree in trees)
