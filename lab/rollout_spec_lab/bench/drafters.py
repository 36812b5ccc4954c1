"""Drafters side by side on recorded rollouts: every method sees the same steps, in turn, in one run.

The simulated verifier is that of `replay`: the responses of a line decode in lockstep, and a draft token is
accepted exactly when it equals the recorded one. vLLM's `ngram` and `suffix` are driven through the
code that its engine runs (vllm.v1.spec_decode; arctic_inference.suffix_decoding).
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollout_spec.config import SpecConfig, UserError
from rollout_spec.drafting.history import History, group_key
from rollout_spec.drafting.native import Int32Array
from rollout_spec.predict.replay import ReplayResult, replay_line
from rollout_spec.predict.replay_drafters import IndexDrafter, ReplayDrafter, drafts_of_line
from rollout_spec.trace import Rollout

SUFFIX_PACKAGE = "arctic-inference==0.1.1"  # what vLLM 0.24 asks for
_CACHE = {"min_token_prob": 0.1, "max_cached_requests": 10_000}  # vLLM's defaults, as all of suffix_server
SUFFIX: dict[str, dict[str, float]] = {
    "suffix_server": _CACHE | {"max_tree_depth": 24, "max_spec_factor": 1.0},
    "suffix_server_tuned": _CACHE | {"max_tree_depth": 64, "max_spec_factor": 4.0},
}
NGRAM = (2, 5)
OF_MODELS = ("model", "sam+model")
PRICED = ("sam", "sam+model")
NUM_ROOTS = 256  # of prices that are tried
FIGURES = {  # of a result, and what a table calls them
    "tokens_per_step": "tokens/step",
    "draft_tokens_per_step": "drafted/step",
    "acceptance_rate": "acceptance",
    "tail_tokens_per_step": "tail",
}


class MissingError(UserError):
    """A method needs a package that is not installed."""


def require_arctic_inference() -> None:
    """Raise MissingError where what vLLM's `suffix` runs on is not installed."""
    try:
        import arctic_inference.suffix_decoding  # noqa: F401
    except ImportError as error:
        raise MissingError(
            f"vLLM's suffix needs {SUFFIX_PACKAGE}: pip install './lab[bench]', or faster as "
            f"lab/bench.md describes ({error})"
        ) from error


def require(method: str) -> None:
    """Import the packages of a method. The message of a MissingError says how they are installed."""
    if method in SUFFIX:
        require_arctic_inference()
    if method in (*SUFFIX, "ngram"):
        try:
            from vllm.v1.spec_decode import ngram_proposer, suffix_decoding  # noqa: F401
        except ImportError as error:
            message = f"the methods ngram and suffix* are vLLM's, `pip install vllm==0.24.0` ({error})"
            raise MissingError(message) from error


class Suffix(ReplayDrafter):
    """vLLM's `suffix` as a server runs it: its proposer, on one cache of ArcticInference for all lines.
    That cache is its history: `start` needs no earlier responses."""

    def __init__(self, method: str, k: int) -> None:
        require(method)
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        self._k = k
        self._num_requests = 0
        named: dict[str, Any] = {f"suffix_decoding_{name}": value for name, value in SUFFIX[method].items()}
        # The fields that the proposer reads of a VllmConfig, which cannot be made without a model.
        config: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=k, **named),
            model_config=SimpleNamespace(max_model_len=1 << 30),  # no row reaches it
        )
        self._proposer = SuffixDecodingProposer(config)

    def start(self, line: Rollout, earlier: Sequence[Int32Array]) -> None:
        num_rows = len(line.responses)
        self._turns = [
            [len(line.prompt_token_ids) + begin for begin, _ in line.turns_of(row)] for row in range(num_rows)
        ]
        self._names = [""] * num_rows
        self._num_prompt_tokens, self._levels = np.zeros((2, num_rows), np.int32)

    def draft(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        sampled: list[list[int]] = [[] for _ in self._names]  # an absent row: as one that prefills
        for row, level in zip(rows, levels, strict=True):
            while self._turns[row] and level > self._turns[row][0]:  # a turn is a request of its own
                self._names[row] = str(self._num_requests)
                self._num_requests += 1
                self._num_prompt_tokens[row] = self._levels[row] = self._turns[row].pop(0)
            sampled[row] = token_ids[row, self._levels[row] : level].tolist()
            self._levels[row] = level
        proposed = self._propose(token_ids, sampled)
        found = [proposed[row][:budget] for row, budget in zip(rows, budgets, strict=True)]
        padded = [draft + [0] * (self._k - len(draft)) for draft in found]
        return np.array(padded, np.int32), np.array(list(map(len, found)), np.int32)

    def finish(self) -> None:
        self._names = []
        self._propose(np.empty((1, 0), np.int32), [])  # stops all requests

    def _propose(self, token_ids: Int32Array, sampled: list[list[int]]) -> Any:
        """Of the rows of a step, as vLLM's InputBatch has them."""
        batch = SimpleNamespace(
            req_ids=self._names, req_id_to_index={name: i for i, name in enumerate(self._names)},
            num_prompt_tokens=self._num_prompt_tokens, token_ids_cpu=token_ids,
            num_tokens_no_spec=self._levels,
        )  # fmt: skip
        return self._proposer.propose(self._k, batch, sampled)


class Ngram(ReplayDrafter):
    """vLLM's `ngram` (prompt lookup), its numba code, for matches of 5 to 2 tokens."""

    def __init__(self, k: int) -> None:
        require("ngram")
        from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

        self._propose, self._k = batch_propose_numba, k

    def draft(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        num_tokens = np.zeros(len(token_ids), np.int32)
        num_tokens[rows] = levels
        drafts = np.zeros((len(token_ids), self._k), np.int32)
        numbers = np.zeros(len(token_ids), np.int32)
        wanted = [int(row) for row, budget in zip(rows, budgets, strict=True) if budget]
        if wanted:
            longest = token_ids.shape[1]
            self._propose(wanted, num_tokens, token_ids, *NGRAM, longest, self._k, drafts, numbers)
        return drafts[rows], np.minimum(numbers[rows], budgets)


class Model(ReplayDrafter):
    """The line's model alone: all that it drafts."""

    def __init__(self, k: int) -> None:
        self._k = k

    def start(self, line: Rollout, earlier: Sequence[Int32Array]) -> None:
        self._line = line

    def draft(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        tokens = drafts_of_line(self._line, rows, levels, self._k).tokens[rows]
        numbers = np.logical_and.accumulate(tokens >= 0, axis=1).sum(axis=1)
        return tokens, np.minimum(numbers, budgets).astype(np.int32)


def make_drafter(method: str, config: SpecConfig) -> ReplayDrafter:
    """The drafter of a method; a MissingError if that needs a package that is not installed."""
    if method in PRICED:
        return IndexDrafter(config, mixes=method == "sam+model")
    if method in SUFFIX:
        return Suffix(method, config.num_speculative_tokens)
    return {"ngram": Ngram, "model": Model}[method](config.num_speculative_tokens)


def all_runs(
    methods: Sequence[str], config: SpecConfig, ks: Sequence[int], histories: Sequence[int],
    prices: Sequence[float],
) -> list[tuple[str, SpecConfig]]:  # fmt: skip
    """Every combination for `replay_all`; those that are not PRICED run once."""
    return [
        (method, dataclasses.replace(config, num_speculative_tokens=k, history=history, min_survival=price))
        for history, k, method in itertools.product(histories, ks, methods)
        for price in (prices if method in PRICED else prices[:1])
    ]


def replay_all(lines: Iterable[Rollout], runs: Sequence[tuple[str, SpecConfig]]) -> list[dict[str, Any]]:
    """Replay a trace with every method and its options, line by line in turn: a result for each run.

    lines: for OF_MODELS with a model's drafts. Of the options `sam` takes those that `replay` takes, all take
    num_speculative_tokens and history, the responses of a line's group in lines before.

    Raises MissingError: a method needs a package that is not installed.
    """
    drafters = [make_drafter(method, config) for method, config in runs]
    results = [ReplayResult() for _ in runs]
    histories = {config.history: History(config.history, config.max_index_bytes) for _, config in runs}
    for line in lines:
        key = group_key(line.group)
        for (_, config), drafter, result in zip(runs, drafters, results, strict=True):
            earlier = histories[config.history].get(key)
            result.add(replay_line(drafter, line, earlier, config.num_speculative_tokens))
        for num_responses, history in histories.items():
            for response in line.responses if num_responses else ():
                history.add(key, response)
    return [_result(*run, result) for run, result in zip(runs, results, strict=True)]


def _result(method: str, config: SpecConfig, result: ReplayResult) -> dict[str, Any]:
    figures = result.to_dict()
    return {
        "method": method,
        "num_speculative_tokens": config.num_speculative_tokens,
        "history": config.history,
        "min_survival": config.min_survival if method in PRICED else None,
        "equal_drafts": None,
        **{figure: figures[figure] for figure in FIGURES},
    }


def at_equal_drafts(lines: Sequence[Rollout], config: SpecConfig, baseline: dict[str, Any]) -> dict[str, Any]:
    """The result of `sam` at about the least price at which it drafts no more than a result of `replay_all`.

    One price is not the same number of draft tokens in every text; at equal numbers drafters compare. The
    price is chosen knowing the whole trace. K and history are the baseline's.
    """

    def at(price: float) -> dict[str, Any]:
        options = {name: baseline[name] for name in ("num_speculative_tokens", "history")}
        [result] = replay_all(lines, [("sam", dataclasses.replace(config, min_survival=price, **options))])
        return result | {"equal_drafts": baseline["method"]}

    most = baseline["draft_tokens_per_step"]
    prices = [(root / NUM_ROOTS) ** 2 for root in range(1, NUM_ROOTS + 1)]  # more of them near 0
    drafts_no_more = bisect.bisect_left(
        prices[:-1], True, key=lambda price: at(price)["draft_tokens_per_step"] <= most
    )
    return at(prices[drafts_no_more])


def over_baselines(
    result: dict[str, Any], results: Sequence[dict[str, Any]]
) -> dict[str, tuple[float, float]]:
    """Tokens and draft tokens per step of a result over those of each of SUFFIX with the same K and history,
    among the results of one trace; one that drafted nothing has no ratios."""
    setting = ("num_speculative_tokens", "history")
    tokens, drafted, *_ = FIGURES
    return {
        other["method"]: (result[tokens] / other[tokens], result[drafted] / other[drafted])
        for other in results
        if other["method"] in SUFFIX and other[drafted] and all(other[n] == result[n] for n in setting)
    }
