"""SpecDecode-Bench (arXiv 2601.11580) with our drafter beside its methods, and its own time model.

Its authors recorded Llama-3.1-8B-Instruct on an H100: for every position of a response, how many tokens a
step would give with EAGLE's drafts and with n-gram's. A checkout of SpecDecode-Bench/simulator has the
recordings and the time model (`predictor.py`). As there, a step of R rows is that of R copies of one request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.config import SpecConfig, UserError
from rollout_spec.predict.model_drafts import with_drafts
from rollout_spec.predict.replay import Proposer, ReplayResult, replay_line
from rollout_spec.trace import Rollout, read_objects
from rollout_spec_lab.bench.drafters import make_proposer

MODEL = "llama3.1-8B"
NUM_EAGLE = 3  # tokens that EAGLE drafts beside our text
CONFIG = SpecConfig(num_speculative_tokens=15, history=0)
MATCHED = {"cnn": 0.4, "gsm8k": 0.2, "sharegpt": 0.2, "instructcoder": 0.8}
"""By dataset, how often n-gram drafts where nothing is accepted, as the authors' simulator has it."""
ROWS = (1, 8, 16, 32, 64, 128)
FIXED = (1, 3, 5)
OURS = {"ours, text alone": "sam", "ours, text and EAGLE": "sam+model"}
OUR_SECONDS = 40e-6  # of a step's drafts
PRICE = 0.05  # of the tokens per step
Steps = npt.NDArray[np.float64]
"""[steps, 4] of one response: tokens before a step, its draft tokens, what it gives, whether EAGLE drafts."""


class Request(NamedTuple):
    """A request, and after its first i + 1 tokens the tokens that a step gives, [n] each."""

    line: Rollout
    eagle: npt.NDArray[np.int64]
    ngram: npt.NDArray[np.int64]


class TimeModel(NamedTuple):
    """The authors' time model: seconds of a token in the KV cache, of a batched one, and of a step."""

    target_c_kv: float
    target_c_compute: float
    target_c_fixed: float
    draft_c_kv: float
    draft_c_fixed: float
    ngram_draft_percentage: float
    overhead_constant_per_step: float

    @classmethod
    def read(cls, checkout: Path) -> TimeModel:
        text = (checkout / "predictor.py").read_text()
        found = dict(re.findall(r"^    (\w+) = ([0-9.e+-]+)$", text, re.MULTILINE))
        if missing := [name for name in cls._fields if name not in found]:
            raise UserError(f"{checkout}/predictor.py: {missing[0]} is missing")
        return cls(*(float(found[name]) for name in cls._fields))

    def forward(self, num_context: Any, num_tokens: Any) -> Any:
        return num_context * self.target_c_kv + num_tokens * self.target_c_compute + self.target_c_fixed


def read(checkout: Path, dataset: str, limit: int | None = None) -> list[Request]:
    """Requests whose two runs both have an entry for each token of the response: likely of one text."""
    found = []
    for _, row in read_objects(checkout / f"data/{MODEL}/combined_{dataset}.jsonl"):
        response = np.array(row["generated_token_ids"], np.int32)
        lens = [np.array(row[f"acc_{name}"]["acc_len"], np.int64) for name in ("eagle", "ngram")]
        if len(response) > 1 and all(len(each) == len(response) for each in lens):
            prompt = np.array(row["prompt_token_ids"], np.int32)
            found.append(Request(Rollout(str(row["id"]), None, prompt, [response]), *lens))
    return found[:limit]


def with_eagle(requests: Sequence[Request], num_tokens: int) -> Iterator[Rollout]:
    """The lines with EAGLE's drafts. What it says where it is wrong is not recorded: see `model_drafts`."""
    rights = [np.minimum(np.append(0, each.eagle - 1)[: len(each.eagle)], num_tokens) for each in requests]
    every = np.concatenate(rights)
    rates = [(every > depth).sum() / max(1, (every >= depth).sum()) for depth in range(num_tokens)]
    each = iter(rights)
    return with_drafts((one.line for one in requests), lambda line, guesses: [next(each)], rates)


# ---- the steps of a response ----


def recorded_steps(
    gives: npt.NDArray[np.int64], num_drafted: int | None, eagle: Any, matched: float = 1.0
) -> Steps:
    """The steps of a recorded drafter with `num_drafted` tokens in each; None: as many as are accepted.

    Args:
        eagle: whether EAGLE drafts, for each position.
        matched: how often it drafts where nothing is accepted; time is linear in tokens, so the mean will do.
    """
    steps, done = [], 1
    while done < len(gives):
        accepted = int(gives[done - 1]) - 1
        drafted: float = accepted if num_drafted is None else num_drafted
        gained = min(accepted, int(drafted)) + 1
        steps.append((done, drafted if accepted else drafted * matched, gained, eagle[done - 1]))
        done += gained
    return np.array(steps, np.float64).reshape(-1, 4)


class _Noting(Proposer):
    """A proposer of lines of one response, which notes what each step drafts and where."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def start(self, line: Rollout, earlier: Any) -> None:
        self._prompt_len, self.noted = len(line.prompt_token_ids), [(0, 0)]
        self._proposer.start(line, earlier)

    def draft(self, rows: Any, token_ids: Any, levels: Any, max_draft_tokens: Any) -> Any:
        drafts, numbers = self._proposer.draft(rows, token_ids, levels, max_draft_tokens)
        self.noted.append((int(levels[0]) - self._prompt_len, int(numbers[0])))
        return drafts, numbers

    def finish(self) -> None:
        self._proposer.finish()

    def close(self) -> None:
        self._proposer.close()


def our_steps(lines: Sequence[Rollout], method: str, survival: float, is_fresh: bool) -> list[Steps]:
    """The steps of each line's response, with drafts of this survival at least.

    The drafter goes on from line to line, or begins afresh in each.
    """
    found, config = [], dataclasses.replace(CONFIG, min_survival=survival)
    with contextlib.ExitStack() as stack:
        proposer = None
        for line in lines:
            if proposer is None or is_fresh:
                stack.close()
                proposer = _Noting(make_proposer(method, config))
                stack.callback(proposer.close)
            replay_line(proposer, line, (), config.num_speculative_tokens, ReplayResult())
            done, drafted = np.array(proposer.noted[1:], np.float64).T
            gained = np.diff(np.append(done, len(line.responses[0])))
            passes = np.full(len(done), method != "sam")
            found.append(np.column_stack([done, drafted, gained, passes])[gained > 0])
    return found


def tokens_per_step(steps: Sequence[Steps]) -> float:
    return float(sum(each[:, 2].sum() for each in steps) / sum(map(len, steps)))


# ---- seconds ----


def speed(
    model: TimeModel, requests: Sequence[Request], steps: Sequence[Steps], rows: int,
    share: float = 0.0, own: float = 0.0,
) -> float:  # fmt: skip
    """Times the tokens per second without drafts, means over requests, as the authors have it.

    Args:
        share: what a step's drafts take of the time of its forward pass.
        own: seconds that they take besides, without EAGLE's.
    """
    plain_rates, rates = [], []
    for request, each in zip(requests, steps, strict=True):
        num_prompt, num = len(request.line.prompt_token_ids), len(request.eagle)
        done, drafted, _, passes = each.T
        prefill = model.forward(0, rows * num_prompt) + model.overhead_constant_per_step
        plain = (
            model.forward(rows * (num_prompt + np.arange(1, num)), rows) + model.overhead_constant_per_step
        )
        context = rows * (num_prompt + done)
        forward = model.forward(context, rows * (1 + drafted))
        eagle = passes * (context * model.draft_c_kv + model.draft_c_fixed)
        seconds = (1 + share) * forward + own + eagle + model.overhead_constant_per_step
        plain_rates.append(num / (prefill + plain.sum()))
        rates.append(num / (prefill + seconds.sum()))
    return float(np.mean(rates) / np.mean(plain_rates))


def price(model: TimeModel, requests: Sequence[Request], steps: Sequence[Steps], rows: int) -> float:
    """A draft token's price, by the gate's rule: as many tokens as its seconds would give otherwise."""
    context = np.mean([len(one.line.prompt_token_ids) + len(one.eagle) / 2 for one in requests])
    num_drafted, num_passes = np.concatenate(steps)[:, [1, 3]].mean(axis=0)
    seconds = model.forward(rows * context, rows * (1 + num_drafted)) + model.overhead_constant_per_step
    seconds += num_passes * model.draft_c_fixed
    return float(np.clip(rows * tokens_per_step(steps) / seconds * model.target_c_compute, 0.01, 0.9))


def measure(
    checkout: Path, dataset: str, rows: Sequence[int], limit: int | None, is_fresh: bool
) -> list[dict[str, Any]]:
    """Each method's tokens per step, ours at `PRICE`, and its speed by rows, ours at each one's own price.

    Args:
        limit: only this many requests, the first ones.
        is_fresh: our drafter begins afresh in each request, without what it learned from those before.

    Raises OSError, UserError: it is no checkout of the simulator.
    """
    model, requests = TimeModel.read(checkout), read(checkout, dataset, limit)
    found = []
    for name, steps, share in _recorded_methods(model, requests, MATCHED[dataset]):
        speeds = {n: speed(model, requests, steps, n, share) for n in rows}
        found.append({"method": name, "tokens_per_step": tokens_per_step(steps), "speed": speeds})
    lines = list(with_eagle(requests, NUM_EAGLE))
    for name, method in OURS.items():
        steps, speeds = our_steps(lines, method, PRICE, is_fresh), {}
        for n in rows:
            at_price = our_steps(lines, method, price(model, requests, steps, n), is_fresh)
            speeds[n] = speed(model, requests, at_price, n, own=OUR_SECONDS)
        found.append({"method": name, "tokens_per_step": tokens_per_step(steps), "speed": speeds})
    return found


def _recorded_methods(
    model: TimeModel, requests: Sequence[Request], matched: float
) -> Iterator[tuple[str, list[Steps], float]]:
    """Names, the steps of every request, and what a step's drafts take of the time of its forward pass."""
    ngram_share = model.ngram_draft_percentage
    for k in (*FIXED, None):
        steps = [recorded_steps(each.ngram, k, 0 * each.ngram, matched) for each in requests]
        yield f"n-gram, {k or 'oracle'}", steps, ngram_share
    for k in (*FIXED, None):
        steps = [recorded_steps(each.eagle, k, 0 * each.eagle + 1) for each in requests]
        yield f"EAGLE, {k or 'oracle'}", steps, 0.0
    for name, counts in (("oracle of both", True), ("the same, EAGLE at n-gram's cost", False)):
        steps = [
            recorded_steps(np.maximum(each.eagle, each.ngram), None, counts * (each.eagle > each.ngram))
            for each in requests
        ]
        yield name, steps, ngram_share
