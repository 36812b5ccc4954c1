"""What a certificate counts: pairs of responses, configurations, the verdict. Knows no engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rollout_spec.config import UserError
from rollout_spec.metrics import RequestCounters
from rollout_spec.report.responses import Agreement, agreement


@dataclasses.dataclass(frozen=True)
class Sample:
    """One of the requests: which prompt, at which temperature, which of the group."""

    prompt: int
    temperature: float
    number: int

    def name(self, seed: int) -> list[Any]:
        return ["certify", seed, self.prompt, self.temperature, self.number]


@dataclasses.dataclass(frozen=True)
class Response:
    token_ids: list[int]
    logprobs: list[float]
    counters: RequestCounters


@dataclasses.dataclass(frozen=True)
class Configuration:
    num_speculative_tokens: int
    batch_threshold: int | str
    group_size: int
    temperature: float

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())


@dataclasses.dataclass(frozen=True)
class Pair:
    """The responses to one request, without drafts and with a configuration's."""

    sample: Sample
    off: Response
    on: Response

    @cached_property
    def agreement(self) -> Agreement:
        return agreement(self.off.token_ids, self.on.token_ids)

    @property
    def differs(self) -> bool:
        return self.agreement.num_identical < self.agreement.num_tokens

    @property
    def tokens(self) -> tuple[int, int]:
        """The two tokens at the first difference; -1 if that response has ended."""
        after = slice(self.agreement.num_identical, None)
        off, on = ((response.token_ids[after] or [-1])[0] for response in (self.off, self.on))
        return off, on


def of_runs(
    runs: Mapping[Configuration, Sequence[Pair]], differences: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The counts of each configuration, and of those together that say something. `differences`: the first
    one of each response, `explained` or not.

    Raises UserError: as `untested`.
    """
    counted = {where: of_pairs(pairs) for where, pairs in runs.items()}
    num_unexplained = sum(not one["explained"] for one in differences)
    reasons = untested(counted, num_unexplained)
    tested = [pair for where, pairs in runs.items() if where not in reasons for pair in pairs]
    return {
        **of_pairs(tested),
        "configurations": [dataclasses.asdict(where) | one for where, one in counted.items()],
        "untested": [f"{where}: {reason}" for where, reason in reasons.items()],
        "differences": differences,
        **logprob_differences(tested),
        "unexplained_differences": num_unexplained,
    }


def of_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    counters = RequestCounters.sum(pair.on.counters for pair in pairs)
    return {
        "tokens_compared": sum(pair.agreement.num_tokens for pair in pairs),
        "tokens_identical": sum(pair.agreement.num_identical for pair in pairs),
        "num_drafts": counters.num_drafts,
        "num_draft_tokens": counters.num_draft_tokens,
        "num_accepted_tokens": counters.num_accepted_tokens,
        "num_rejected_tokens": counters.num_draft_tokens - counters.num_accepted_tokens,
        "tokens_per_step": counters.num_decoded_tokens / max(counters.num_decode_steps, 1),
    }


def untested(
    counted: Mapping[Configuration, Mapping[str, Any]], num_unexplained: int
) -> dict[Configuration, str]:
    """The configurations that say nothing, because no draft token was rejected, and why.

    Raises UserError: they all are, and no difference is unexplained.
    """
    reasons = {
        where: "no draft token was rejected" if found["num_draft_tokens"] else "nothing was drafted"
        for where, found in counted.items()
        if not found["num_rejected_tokens"]
    }
    if len(reasons) == len(counted) and not num_unexplained:
        listed = "; ".join(f"{where}: {reason}" for where, reason in reasons.items())
        raise UserError(f"there is nothing to certify: {listed}")
    return reasons


def logprob_differences(pairs: Sequence[Pair]) -> dict[str, float]:
    same = [(pair, slice(pair.agreement.num_identical)) for pair in pairs]
    gaps = [np.subtract(pair.off.logprobs[at], pair.on.logprobs[at]) for pair, at in same]
    found = np.abs(np.concatenate([[], *gaps]))
    return {
        "mean_logprob_difference": float(found.mean()) if len(found) else 0.0,
        "max_logprob_difference": float(found.max()) if len(found) else 0.0,
    }


def passed(record: Mapping[str, Any]) -> bool:
    if record["tolerance"] == 0 and record["max_logprob_difference"]:
        return False
    return not record["unexplained_differences"]


def verdict(record: Mapping[str, Any]) -> str:
    if not passed(record):
        return "not certified"
    agreement = " up to rounding" if record["differences"] else ""
    if record["tolerance"] == 0:
        agreement = " bit for bit"
    if not record["untested"]:
        return f"certified{agreement}"
    num_all = len(record["configurations"])
    return f"certified in part{agreement}: {num_all - len(record['untested'])} of {num_all} configurations"
