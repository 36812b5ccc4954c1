"""Time and memory of the native index, seen from Python.

Every time is the least of several runs of a step: on a shared machine the least is what the code costs.
The text is synthetic: tokens by Zipf's law, between runs of earlier text.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import Int32Array
from rollout_spec.environment import environment
from rollout_spec.predict.engine import Cluster, Engine, step_together
from rollout_spec.predict.load import Request
from rollout_spec.predict.step_times import StepTimes
from rollout_spec_lab.bench.stopwatch import Stopwatch

NUM_SPECULATIVE_TOKENS = 8
SIZES = (2048, 32768, 131072)
GROUP_SIZE = 8
MAX_RESPONSE = 1024
NUM_ROWS = 64  # that decode in a whole step
TARGETS = {
    "us_per_token at 32768": 0.25,
    "bytes_per_token at 32768": 75.0,
    "step_ms": 1.0,
    "whole_step_p99_over_median": 5.0,
}


def measure_index(repeats: int) -> dict[str, Any]:
    text = synthetic_text(4 * max(SIZES))
    return {
        "environment": environment(),
        "targets": TARGETS,
        "sizes": measure_sizes(text, repeats),
        "step": measure_step(text, repeats),
        "whole_steps": measure_whole_steps(text, repeats),
    }


def synthetic_text(num_tokens: int, seed: int = 0) -> Int32Array:
    """Text as repetitive as a chain of thought: about half of it copies runs of what came before."""
    rng = np.random.default_rng(seed)
    text = np.minimum(rng.zipf(1.3, num_tokens), 50_000).astype(np.int32)
    at = 200
    while at < num_tokens:
        length = int(rng.integers(4, 24))
        begin = int(rng.integers(0, at - length))
        text[at : at + length] = text[begin : begin + length][: num_tokens - at]
        at += length + int(rng.integers(4, 24))
    return text


def measure_sizes(text: Int32Array, repeats: int) -> dict[str, Any]:
    """Microseconds per token of texts of each size, and the mean bytes per token of one alone in an index.

    Every size indexes the same tokens, cut into texts of this size that stay in one index: what is compared
    is the length of a text, not one text that fits the cache with one that does not.
    """
    sizes: dict[str, Any] = {}
    for size in SIZES:
        texts = text.reshape(-1, size)
        seconds = np.min([index_texts(texts)[0] for _ in range(repeats)], axis=0).sum()
        num_bytes = [index_texts(alone[None])[1] for alone in texts]
        sizes[str(size)] = {
            "us_per_token": 1e6 * float(seconds) / text.size,
            "bytes_per_token": float(np.mean(num_bytes)),
        }
    return sizes


def index_texts(texts: Int32Array, chunk: int = 512) -> tuple[list[float], float]:
    """Index texts, int32 [n, length], one after the other as groups of one index, `chunk` tokens a step.
    Returns the seconds of each step, and the bytes per token in the end."""
    zero = np.zeros(1, np.int32)
    seconds = []
    index = SuffixIndex(num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
    for text in texts:
        sequence = np.array([index.open_sequence(index.open_group(text[:0]))], np.int32)
        for level in range(chunk, len(text) + 1, chunk):
            levels = np.array([level], np.int32)
            begin = time.perf_counter()
            index.index_and_draft(sequence, text[None], zero, levels, zero)
            seconds.append(time.perf_counter() - begin)
    stats = index.stats()
    return seconds, stats.num_bytes / stats.num_tokens


def measure_step(text: Int32Array, repeats: int, tokens_per_row: int = 2048) -> dict[str, Any]:
    """A step for 256 rows, 32 groups of 8, one new token a row: the median of 64 such steps.

    Every row is a passage of its own but for the end, which repeats a sibling's earlier text: so the index is
    as large as such texts make it, and nearly every row drafts.
    """
    num_groups, num_steps = 32, 64
    n = num_groups * GROUP_SIZE
    token_ids = _repeating_rows(text, num_groups, tokens_per_row, num_steps)
    rows, budgets = np.arange(n, dtype=np.int32), np.full(n, NUM_SPECULATIVE_TOKENS, np.int32)
    seconds = np.empty((repeats, num_steps))
    drafted = np.empty((num_steps, n))
    for times in seconds:
        index = SuffixIndex(num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
        groups = [index.open_group(token_ids[0, :0]) for _ in range(num_groups)]
        sequences = np.array([index.open_sequence(groups[row // GROUP_SIZE]) for row in rows], np.int32)
        for level in range(64, tokens_per_row + 1, 64):
            index.index_and_draft(sequences, token_ids, rows, np.full(n, level, np.int32), 0 * budgets)
        for i in range(num_steps):
            levels = np.full(n, tokens_per_row + i + 1, np.int32)
            least, begin = SpecConfig.min_survival, time.perf_counter()
            result = index.index_and_draft(sequences, token_ids, rows, levels, budgets, least)
            times[i] = time.perf_counter() - begin
            drafted[i] = result.num_draft_tokens
    return {
        "step_ms": 1e3 * float(np.median(seconds.min(axis=0))),
        "rows": n,
        "draft_tokens_per_row": float(drafted.mean()),
        "share_of_rows_drafting": float((drafted > 0).mean()),
    }


def _repeating_rows(text: Int32Array, num_groups: int, tokens_per_row: int, num_steps: int) -> Int32Array:
    """[rows, tokens_per_row + num_steps]: rows whose last 32 + num_steps tokens repeat a sibling."""
    rng = np.random.default_rng(0)
    width, end = tokens_per_row + num_steps, 32 + num_steps
    begins = rng.integers(0, len(text) - width, num_groups * GROUP_SIZE)
    token_ids = np.stack([text[begin : begin + width] for begin in begins])
    for siblings in token_ids.reshape(num_groups, GROUP_SIZE, width):
        for row, begin in enumerate(rng.integers(0, tokens_per_row - 2 * end, GROUP_SIZE)):
            siblings[row, -end:] = siblings[(row + 1) % GROUP_SIZE, begin : begin + end]
    return token_ids


def make_requests(text: Int32Array, num_prompts: int) -> list[Request]:
    """Groups of GROUP_SIZE siblings: passages of the same part of the text. Every prompt comes twice, with
    all others in between."""
    rng = np.random.default_rng(0)
    width = 4 * MAX_RESPONSE
    windows = rng.integers(0, len(text) - width, num_prompts)
    requests = []
    for epoch in range(2):
        for prompt, begin in enumerate(windows):
            firsts = begin + rng.integers(0, width - MAX_RESPONSE, GROUP_SIZE)
            lengths = rng.integers(MAX_RESPONSE // 4, MAX_RESPONSE, GROUP_SIZE)
            for i, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
                name = f"{epoch}.{prompt}.{i}"
                response = text[first : first + length]
                requests.append(Request(name, name, str(prompt), text[begin : begin + 200], response))
    return requests


def measure_whole_steps(text: Int32Array, repeats: int) -> dict[str, Any]:
    """Steps of the whole drafter: requests that end and begin, groups evicted, history indexed.

    Both budgets are below what there is to keep. The times of steps are each the least of `repeats` runs; the
    first step is left out.
    """
    requests = make_requests(text, num_prompts=48)
    runs = [_time_engine(requests) for _ in range(repeats)]
    ms = 1e3 * np.array(runs).min(axis=0)[1:]
    median, p99 = np.median(ms), np.quantile(ms, 0.99)
    return {
        "rows": NUM_ROWS,
        "median_ms": float(median),
        "p99_ms": float(p99),
        "whole_step_p99_over_median": float(p99 / median),
    }


def _time_engine(requests: list[Request]) -> NDArray[np.float64]:
    """Seconds in the drafter of every step of an engine that serves the requests."""
    config = SpecConfig(history=GROUP_SIZE, batch_threshold=NUM_ROWS, max_index_mb=8)
    engine = Engine(config, StepTimes([(1, 0.01, 1.0)]), Cluster(1, NUM_ROWS))
    assert engine.drafter is not None
    catch_up = engine.drafter.catch_up

    def catch_up_for_a_while(has_time: Callable[[], bool]) -> None:
        """In the simulation's clock there is always time: two pieces are about a fiftieth of a step."""
        times = iter([has_time] * 2)
        catch_up(lambda: next(times, bool)())

    engine.drafter.catch_up = catch_up_for_a_while  # type: ignore[method-assign]
    stopwatch = Stopwatch(time.perf_counter)
    stopwatch.time(engine.drafter, "add", "remove", "draft")
    engine.enqueue(requests)
    totals = [0.0]
    while engine.queue:  # so every row is taken
        step_together([engine])
        totals.append(stopwatch.seconds)
    return np.diff(totals)
