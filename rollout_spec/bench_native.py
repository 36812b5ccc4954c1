"""Time and memory of the native index, seen from Python.

Every time but that of evictions is the least of several runs of the same step: on a shared machine the least
is what the code costs. Without a trace the text is synthetic: tokens by Zipf's law, between runs of earlier
text.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafter import Drafter
from rollout_spec.history import History
from rollout_spec.index import SuffixIndex
from rollout_spec.native import Int32Array, Int64Array
from rollout_spec.price import PricedIndex
from rollout_spec.replay import read_trace

NUM_SPECULATIVE_TOKENS = 8
SIZES = (2048, 8192, 32768, 131072)
GROUP_SIZE = 8
PROMPT_LENGTH = 200
MODES = ("sam", "frequent", "earliest")
TARGETS = {
    "us_per_token at 32768": 0.2,
    "bytes_per_token at 32768": 64.0,
    "flatness 2048..131072": 1.5,
    "step_ms": 0.5,
    "step_p99_over_median": 5.0,
    "eviction max_ms": 1.0,
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


def load_text(trace: Path | None, num_tokens: int) -> Int32Array:
    """The first num_tokens tokens of the trace's responses, one after the other."""
    if trace is None:
        return synthetic_text(num_tokens)
    responses = [response for rollout in read_trace(trace) for response in rollout.responses]
    return np.concatenate(responses)[:num_tokens]


def index_texts(texts: Int32Array, mode: str, chunk: int = 512) -> tuple[Int64Array, float]:
    """Index texts, int32 [n, length], one after the other as groups of one index, `chunk` tokens a step.

    Returns:
        Nanoseconds of each step, [steps], and the bytes per token in the end.
    """
    zero = np.zeros(1, np.int32)
    nanoseconds = []
    with SuffixIndex(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, mode=mode) as index:
        for text in texts:
            sequence = np.array([index.open_sequence(index.open_group(text[:0]))], np.int32)
            for level in range(chunk, len(text) + 1, chunk):
                levels = np.array([level], np.int32)
                begin = time.perf_counter_ns()
                index.step(sequence, text[None], zero, levels, zero)
                nanoseconds.append(time.perf_counter_ns() - begin)
        stats = index.stats()
    return np.array(nanoseconds), stats.num_bytes / stats.num_tokens


def measure_sizes(text: Int32Array, mode: str, repeats: int) -> dict[str, Any]:
    """Microseconds and bytes per token of texts of each size.

    us_per_token: every size indexes the same tokens, cut into texts of this size that stay in one index: what
    is compared is the length of a text, not one text that fits the cache with one that does not.
    us_per_token_alone and bytes_per_token: of an index that holds one such text and nothing else.
    """
    sizes: dict[str, Any] = {}
    passages = text[: len(text) // SIZES[-1] * SIZES[-1]].reshape(-1, SIZES[-1])
    if not len(passages):
        passages = text[None, : len(text) // SIZES[0] * SIZES[0]]
    for size in (size for size in SIZES if size <= passages.shape[1]):
        kept = passages[:, : passages.shape[1] // size * size]
        runs = [index_texts(part.reshape(-1, size), mode) for _ in range(repeats) for part in kept]
        alone = [index_texts(part[None], mode) for _ in range(repeats) for part in kept.reshape(-1, size)]
        sizes[str(size)] = {
            "us_per_token": _least(runs, repeats) / 1e3 / kept.size,
            "us_per_token_alone": _least(alone, repeats) / 1e3 / kept.size,
            "bytes_per_token": float(np.mean([num_bytes for _, num_bytes in alone])),
        }
    return sizes


def _least(runs: list[tuple[Int64Array, float]], repeats: int) -> float:
    """The sum over all steps of the least time of each in `repeats` runs."""
    return float(np.stack([times for times, _ in runs]).reshape(repeats, -1).min(axis=0).sum())


def measure_step(text: Int32Array, mode: str, repeats: int, tokens_per_row: int = 2048) -> dict[str, Any]:
    """A step for 256 rows, 32 groups of 8, one new token a row: the median of 64 such steps.

    Every row is a passage of its own but for the end, which repeats what a sibling has said before: so the
    index is as large as such texts make it, and nearly every row drafts.
    """
    num_groups, group_size, num_steps, num_before = 32, GROUP_SIZE, 64, 32
    n = num_groups * group_size
    rng = np.random.default_rng(0)
    width, end = tokens_per_row + num_steps, num_before + num_steps
    begins = rng.integers(0, len(text) - width, n)
    token_ids = np.stack([text[begin : begin + width] for begin in begins])
    for siblings in token_ids.reshape(num_groups, group_size, width):
        for row, begin in enumerate(rng.integers(0, tokens_per_row - 2 * end, group_size)):
            siblings[row, -end:] = siblings[(row + 1) % group_size, begin : begin + end]
    rows, budgets = np.arange(n, dtype=np.int32), np.full(n, NUM_SPECULATIVE_TOKENS, np.int32)
    seconds = np.empty((repeats, num_steps))
    drafted = np.empty((num_steps, n))
    for times in seconds:
        with SuffixIndex(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, mode=mode, min_match_len=1) as index:
            sequences = np.empty(n, np.int32)
            for group_rows in rows.reshape(num_groups, group_size):
                group = index.open_group(token_ids[0, :0])
                sequences[group_rows] = [index.open_sequence(group) for _ in group_rows]
            for level in range(64, tokens_per_row + 1, 64):
                index.step(sequences, token_ids, rows, np.full(n, level, np.int32), 0 * budgets)
            for i in range(num_steps):
                levels = np.full(n, tokens_per_row + i + 1, np.int32)
                begin_time = time.perf_counter()
                result = index.step(sequences, token_ids, rows, levels, budgets)
                times[i] = time.perf_counter() - begin_time
                drafted[i] = result.num_draft_tokens
            bytes_per_token = index.stats().num_bytes / index.stats().num_tokens
    return {
        "step_ms": 1e3 * float(np.median(seconds.min(axis=0))),
        "rows": n,
        "draft_tokens_per_row": float(drafted.mean()),
        "share_of_rows_drafting": float((drafted > 0).mean()),
        "bytes_per_token": bytes_per_token,
    }


_Request = tuple[str, Int32Array, Int32Array]


def make_requests(text: Int32Array, num_prompts: int, group_size: int, max_response: int) -> list[_Request]:
    """Names, prompts and responses, of siblings one after the other: passages of the same part of the text.

    Every prompt comes twice, with all others in between.
    """
    rng = np.random.default_rng(0)
    width = 4 * max_response
    windows = rng.integers(0, len(text) - width, num_prompts)
    return [
        (f"{epoch}.{prompt}.{i}", text[begin : begin + PROMPT_LENGTH], text[first : first + length])
        for epoch in range(2)
        for prompt, begin in enumerate(windows)
        for i, (first, length) in enumerate(
            zip(
                begin + rng.integers(0, width - max_response, group_size),
                rng.integers(max_response // 4, max_response, group_size),
                strict=True,
            )
        )
    ]


class _Engine:
    """What an engine asks of its drafter: rows are filled from a queue, take what agrees with the recorded
    response of every draft, and end.
    """

    def __init__(
        self,
        drafter: Drafter,
        requests: list[_Request],
        num_rows: int,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._drafter = drafter
        self._clock = clock
        self._requests = requests[::-1]
        self._names = [""] * num_rows
        self._drafts: list[list[int]] = [[] for _ in self._names]
        longest = max(len(prompt) + len(response) for _, prompt, response in requests)
        self._token_ids = np.zeros((num_rows, longest), np.int32)
        self._levels, self._ends = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)

    def steps(self) -> Iterator[int]:
        """Nanoseconds in the drafter by `clock`, of every step in which all rows are taken."""
        while True:
            ended = np.flatnonzero(self._levels >= self._ends)
            if len(ended) > len(self._requests):
                return
            requests = [(int(row), *self._requests.pop()) for row in ended]
            nums_new = self._verify()
            begin = self._clock()
            for row, name, prompt, response in requests:
                if self._names[row]:
                    self._drafter.close(self._names[row])
                self._drafter.open(name, prompt, len(prompt) + len(response))
            spent = self._clock() - begin
            for row, name, prompt, response in requests:
                self._admit(row, name, prompt, response)
                nums_new[row] = 1
            self._levels += nums_new
            begin = self._clock()
            self._drafts = self._drafter.step(self._names, nums_new, self._token_ids, self._levels)
            yield spent + self._clock() - begin

    def _admit(self, row: int, name: str, prompt: Int32Array, response: Int32Array) -> None:
        end = len(prompt) + len(response)
        self._token_ids[row, : len(prompt)], self._token_ids[row, len(prompt) : end] = prompt, response
        self._names[row], self._levels[row], self._ends[row] = name, len(prompt), end

    def _verify(self) -> list[int]:
        nums_new = [1] * len(self._names)
        for row, draft in enumerate(self._drafts):
            level, end = int(self._levels[row]), int(self._ends[row])
            said = self._token_ids[row, level : min(end, level + len(draft))].tolist()
            agrees = [a == b for a, b in zip(draft, said, strict=False)]
            nums_new[row] = min([*agrees, False].index(False) + 1, max(0, end - level))
        return nums_new


def measure_steps(text: Int32Array, mode: str, repeats: int, num_rows: int = 64) -> dict[str, Any]:
    """Steps of the whole drafter: requests that end and begin, groups evicted, history indexed.

    step_p99_over_median: of the steps' times, each the least of `repeats` runs; the first step is left out.
    """
    # More prompts than idle groups are kept.
    requests = make_requests(text, num_prompts=48, group_size=GROUP_SIZE, max_response=1024)
    config = SpecConfig(mode=mode, history=GROUP_SIZE, batch_threshold=num_rows)
    runs = [list(_Engine(Drafter(config), requests, num_rows).steps()) for _ in range(repeats)]
    ms = np.array(runs).min(axis=0)[1:] / 1e6
    median, p99 = np.median(ms), np.quantile(ms, 0.99)
    return {
        "rows": num_rows,
        "num_steps": len(ms),
        "median_ms": float(median),
        "p99_ms": float(p99),
        "max_ms": float(ms.max()),
        "step_p99_over_median": float(p99 / median),
    }


class _Stopwatch:
    """Processor time of the thread in some methods of some objects."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def watch(self, owner: object, name: str, only_failures: bool = False) -> list[int]:
        """Returns the list that the time of every call is added to."""
        method = getattr(owner, name)
        calls: list[int] = []

        def watched(*args: Any) -> Any:
            begin, failed = time.thread_time_ns(), True
            try:
                result = method(*args)
                failed = False
            finally:
                if failed or not only_failures:
                    calls.append(time.thread_time_ns() - begin)
                    self.nanoseconds += calls[-1]
            return result

        setattr(owner, name, watched)
        return calls


def measure_evictions(
    text: Int32Array,
    mode: str,
    num_prompts: int = 16,
    group_size: int = 16,
    max_response: int = 8192,
    max_index_mb: int = 64,
    num_rows: int = 64,
) -> dict[str, Any]:
    """What eviction adds to a step, in processor time of the thread; one run, every step counts as it was.

    Both budgets are below what there is to keep. max_ms, p99_ms: of the steps that evict, the time of closing
    groups, of attempts that found no room, of the price, which forgets whom it follows when it has no room,
    and of the history, which drops its earliest responses. Of a closed group what is large is freed in the
    steps that follow: release_max_ms, see measure_release.
    """
    drafter = Drafter(
        SpecConfig(mode=mode, history=group_size, batch_threshold=num_rows, max_index_mb=max_index_mb)
    )
    drafter.history = History(group_size, max_index_mb << 14)
    watch = _Stopwatch()
    evicted = watch.watch(drafter, "_evict")
    failed = watch.watch(drafter.index, "step", only_failures=True)
    watch.watch(drafter.index, "open_group", only_failures=True)
    watch.watch(drafter.history, "add")
    if isinstance(drafter.index, PricedIndex):
        watch.watch(drafter.index.price, "_forget")
    requests = make_requests(text, num_prompts, group_size, max_response)
    engine = _Engine(drafter, requests, num_rows, time.thread_time_ns)
    steps, totals = np.array([(step, watch.nanoseconds) for step in engine.steps()]).T / 1e6
    added = np.diff(totals, prepend=0)
    evicting = added[added > 0]
    return {
        "rows": num_rows,
        "group_size": group_size,
        "max_response": max_response,
        "max_index_mb": max_index_mb,
        "num_steps": len(added),
        "num_groups_evicted": len(evicted),
        "num_attempts_failed": len(failed),
        "num_untracked_rows": drafter.counters.num_untracked_rows,
        "p99_ms": float(np.quantile(evicting, 0.99)),
        "max_ms": float(evicting.max()),
        "release_max_ms": measure_release(text, mode),
        "step_median_ms": float(np.median(steps)),
        "step_p99_ms": float(np.quantile(steps, 0.99)),
    }


def measure_release(text: Int32Array, mode: str) -> float:
    """The most milliseconds that a step of one token takes while a closed group, the text, is freed."""
    sequence, zero = np.zeros(1, np.int32), np.zeros(1, np.int32)
    with SuffixIndex(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, mode=mode) as index:
        group = index.open_group(text)
        sequence[0] = index.open_sequence(index.open_group(text[:0]))
        index.close_group(group)
        num_bytes, most = [index.stats().num_bytes, 0], 0
        while num_bytes[-1] != num_bytes[-2]:
            levels = np.array([len(num_bytes)], np.int32)
            begin = time.thread_time_ns()
            index.step(sequence, text[None], zero, levels, zero)
            most = max(most, time.thread_time_ns() - begin)
            num_bytes.append(index.stats().num_bytes)
    return most / 1e6


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def measure(trace: Path | None, repeats: int, modes: Iterable[str] = MODES) -> dict[str, Any]:
    """Everything, with what is needed to read the figures later."""
    text = load_text(trace, 4 * max(SIZES))
    return {
        "text": trace.name if trace else "synthetic",
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "targets": TARGETS,
        "modes": {mode: _measure_mode(text, mode, repeats) for mode in modes},
    }


def _measure_mode(text: Int32Array, mode: str, repeats: int) -> dict[str, Any]:
    sizes = measure_sizes(text, mode, repeats)
    flatness = {
        cost: max(size[cost] for size in sizes.values()) / min(size[cost] for size in sizes.values())
        for cost in ("us_per_token", "us_per_token_alone")
    }
    return {
        "sizes": sizes,
        "flatness": flatness["us_per_token"],
        "flatness_alone": flatness["us_per_token_alone"],
        "step": measure_step(text, mode, repeats),
        "steps": measure_steps(text, mode, repeats),
        "evictions": measure_evictions(text, mode),
    }
