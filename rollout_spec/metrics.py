"""What is counted, and the one place where the names of metrics are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Self

PREFIX = "rollout/spec_"


@dataclasses.dataclass(frozen=True)
class Metric:
    """What the documentation says of one metric; `name` is without the PREFIX."""

    name: str
    meaning: str
    advice: str  # what a user does about it


METRICS = (
    Metric(
        "rollout_seconds",
        "Seconds in which the busiest server worked on training requests; weight syncs do not count.",
        "Compare two runs with `rollout-spec compare`.",
    ),
    Metric(
        "generated_tokens",
        "Tokens generated in this time, those of interrupted responses included.",
        "`rollout-spec compare` divides it by `rollout_seconds`.",
    ),
    Metric(
        "num_interrupted",
        "Requests that a weight sync interrupted; 0 in the synchronous trainer.",
        "Nothing to do: verl sends them again after the sync.",
    ),
    Metric(
        "tokens_per_step",
        "Generated tokens per decode step of a request. Steps without a draft count too.",
        "Near 1: drafts are rare or wrong. `rollout-spec replay` says how many tokens your text allows.",
    ),
    Metric(
        "accept_rate",
        "verl's own mean of the acceptance rate over requests, 0 for a request without a draft.",
        "Prefer `acceptance_rate`.",
    ),
    Metric(
        "accept_length",
        "verl's own mean of the acceptance length over requests.",
        "Prefer `tokens_per_step`.",
    ),
    Metric(
        "num_drafts",
        "Drafts verified in the step.",
        "If 0, check `share_off_*`.",
    ),
    Metric("num_draft_tokens", "Draft tokens verified in the step.", "`acceptance_rate` divides by it."),
    Metric("num_accepted_tokens", "Draft tokens accepted in the step.", "`acceptance_rate` counts them."),
    Metric(
        "acceptance_rate",
        "Accepted tokens per draft token.",
        "Low: fine while `achieved_gain` is above 1; with a fixed threshold, raise `min_survival`.",
    ),
    Metric(
        "num_failed_steps",
        "Engine steps in which drafting failed. The rollout went on without drafts.",
        "Above 0: the engine's log gives the reason once. Report it.",
    ),
    Metric(
        "num_untracked_rows",
        "Decoding requests that had no place in the index, summed over steps.",
        "Above 0: the index is full (raise `max_index_mb`), or a request held no text.",
    ),
    Metric(
        "share_on",
        "Share of the engine's steps in which drafting was on.",
        "If low at the end of a rollout, check `share_off_*`.",
    ),
    Metric(
        "draft_ms",
        "Milliseconds in the drafter per engine step, indexing included.",
        "Above 1: other work runs on the host's cores, or very many requests decode.",
    ),
    Metric(
        "expected_gain",
        "Speed of steps with drafts over plain ones, as `batch_threshold=auto` predicts it.",
        "Far above `achieved_gain`: step times vary; look for other work on the machine.",
    ),
    Metric(
        "achieved_gain",
        "The same ratio as measured, in the steps with drafts only. A whole rollout gains less.",
        "Below 1 for long: step times vary too much to predict. Set `batch_threshold` to a number.",
    ),
    Metric(
        "share_off_threshold",
        "Share of steps without drafts because more requests decode than `batch_threshold`.",
        "High throughout: raise `batch_threshold`, or take `auto`.",
    ),
    Metric(
        "share_off_cost",
        "Share of steps without drafts because drafts would gain less than 2 % over a plain step.",
        "Fine in full batches. High at the end of a rollout too: the text rarely repeats; run `replay`.",
    ),
    Metric(
        "num_model_passes",
        "Passes of a model that drafts beside the text.",
        "Compare it with `num_model_passes_left_out`.",
    ),
    Metric(
        "num_model_passes_left_out",
        "Passes of the model that the gate left out: drafting was off, or they would not have paid.",
        "High at the end of a rollout: the model is rarely right.",
    ),
    Metric(
        "model_ms",
        "Milliseconds of the host per engine step for the model's passes, without the GPU's own time.",
        "`rollout-spec compare` shows it beside `draft_ms`.",
    ),
    Metric(
        "model_share",
        "Share of the draft tokens that the model proposed too.",
        "Low: most drafts come from the text; the model may not be worth its passes.",
    ),
    Metric(
        "model_acceptance_rate",
        "Accepted tokens per draft token of the model.",
        "Falling: the head is stale. Train it too, or go without it.",
    ),
    Metric(
        "text_acceptance_rate",
        "Accepted tokens per draft token of the text alone.",
        "As for `acceptance_rate`.",
    ),
    Metric(
        "load_imbalance",
        "Tokens of the busiest rollout engine over the mean, where there are several.",
        "High with `routing=group`: take more prompts, a smaller `max_imbalance`, or `routing=verl`.",
    ),
)


@dataclasses.dataclass
class _Counters:
    def add(self, other: Self) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class EngineCounters(_Counters):
    """Counts of one engine's drafter since the last reading; a step is one `propose` call."""

    num_steps: int = 0  # engine steps in which at least one row decoded
    num_steps_on: int = 0  # of these, steps that drafted, would have, or found nothing to draft
    num_row_steps: int = 0  # decoding rows, summed over steps
    num_drafts: int = 0  # rows given at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # as the proposer sees it, bonus tokens excluded
    num_untracked_rows: int = 0  # decoding rows without a place in the index
    num_failed_steps: int = 0  # steps in which drafting failed and generation went on without
    draft_seconds: float = 0.0  # wall time inside the drafter, indexing included
    # Of a model that drafts beside the text; its tokens are those of a draft that begins as its own does
    num_model_passes: int = 0
    num_model_passes_left_out: int = 0
    model_seconds: float = 0.0  # of the host; a GPU's passes may end later
    num_model_draft_tokens: int = 0
    num_model_accepted_tokens: int = 0
    # Steps without drafts, by what decided so
    num_steps_off_threshold: int = 0  # more rows than batch_threshold
    num_steps_off_cost: int = 0  # no draft paid for its cost
    num_steps_off_probe: int = 0  # to measure a step without drafts
    # Over the steps with drafts that the automatic gate could compare
    gate_seconds: float = 0.0  # what they took
    gate_plain_seconds: float = 0.0  # what steps without drafts would have for the same tokens
    gate_expected_seconds: float = 0.0  # the same two, as foreseen
    gate_expected_plain_seconds: float = 0.0


@dataclasses.dataclass
class RequestCounters(_Counters):
    """Counts of one ended request, or the sums over several, taken where the tokens are verified.

    num_decode_steps counts the forwards that gave at least one token, the prefill's excluded, and
    num_decoded_tokens what they gave; num_accepted_tokens excludes bonus tokens.
    """

    num_decoded_tokens: int = 0
    num_decode_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclasses.dataclass
class RolloutReport:
    """What one rollout server has served for the training, under weights that have been replaced since."""

    engine: EngineCounters | None = None  # None: the engine has no drafter of ours (rollout.spec off)
    requests: list[RequestCounters] = dataclasses.field(default_factory=list)  # of every finished request
    num_generated_tokens: int = 0  # of every request, counted where it was served
    rollout_seconds: float = 0.0  # wall time with at least one request in the engine
    # Sums over what vLLM aborted, which includes every request that a stop string ended.
    aborted: RequestCounters = dataclasses.field(default_factory=RequestCounters)
    num_interrupted: int = 0  # requests that were aborted for a weight sync

    def add(self, other: RolloutReport) -> None:
        """Take in what the same server has served in another time."""
        if other.engine is not None:
            self.engine = self.engine or EngineCounters()
            self.engine.add(other.engine)
        self.requests += other.requests
        self.num_generated_tokens += other.num_generated_tokens
        self.rollout_seconds += other.rollout_seconds
        self.aborted.add(other.aborted)
        self.num_interrupted += other.num_interrupted


def rollout_metrics(reports: Iterable[RolloutReport]) -> dict[str, float]:
    """The token-weighted metrics of one training step over all rollout servers.

    Rollout time is that of the busiest server. Ratios appear only where their denominator is not 0.
    """
    reports = list(reports)
    engine, total, drafting = EngineCounters(), RequestCounters(), False
    for report in reports:
        if report.engine is not None:
            engine.add(report.engine)
            drafting = True
        for request in (*report.requests, report.aborted):
            total.add(request)
    values: dict[str, float] = {
        "rollout_seconds": max((report.rollout_seconds for report in reports), default=0.0),
        "generated_tokens": sum(report.num_generated_tokens for report in reports),
        "num_interrupted": sum(report.num_interrupted for report in reports),
    }
    if len(reports) > 1:
        most = max(report.num_generated_tokens for report in reports)
        values |= _ratio("load_imbalance", most * len(reports), values["generated_tokens"])
    if drafting or total.num_decode_steps:
        values |= {
            "num_drafts": total.num_drafts,
            "num_draft_tokens": total.num_draft_tokens,
            "num_accepted_tokens": total.num_accepted_tokens,
        }
        values |= _ratio("tokens_per_step", total.num_decoded_tokens, total.num_decode_steps)
        values |= _ratio("acceptance_rate", total.num_accepted_tokens, total.num_draft_tokens)
    if drafting:
        values |= {
            "num_failed_steps": engine.num_failed_steps,
            "num_untracked_rows": engine.num_untracked_rows,
        }
        values |= _engine_metrics(engine)
    return {PREFIX + name: float(value) for name, value in values.items()}


def engine_summary(engine: EngineCounters) -> str:
    """The same metrics of one engine's steps, in one line for its log."""
    values = _ratio("acceptance_rate", engine.num_accepted_tokens, engine.num_draft_tokens)
    values |= _engine_metrics(engine)
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def _engine_metrics(engine: EngineCounters) -> dict[str, float]:
    """What the gate did."""
    values = _ratio("share_on", engine.num_steps_on, engine.num_steps)
    values |= _ratio("draft_ms", engine.draft_seconds * 1e3, engine.num_steps)
    values |= _ratio("achieved_gain", engine.gate_plain_seconds, engine.gate_seconds)
    values |= _ratio("expected_gain", engine.gate_expected_plain_seconds, engine.gate_expected_seconds)
    for reason in ("threshold", "cost"):
        num_steps_off = getattr(engine, f"num_steps_off_{reason}")
        values |= _ratio(f"share_off_{reason}", num_steps_off, engine.num_steps)
    return values | _model_metrics(engine)


def _model_metrics(engine: EngineCounters) -> dict[str, float]:
    """What each source gave, where a model drafts beside the text."""
    if not engine.num_model_passes:
        return {}
    drafted, accepted = engine.num_model_draft_tokens, engine.num_model_accepted_tokens
    values: dict[str, float] = {
        "num_model_passes": engine.num_model_passes,
        "num_model_passes_left_out": engine.num_model_passes_left_out,
    }
    values |= _ratio("model_ms", engine.model_seconds * 1e3, engine.num_steps)
    values |= _ratio("model_share", drafted, engine.num_draft_tokens)
    values |= _ratio("model_acceptance_rate", accepted, drafted)
    others = engine.num_draft_tokens - drafted
    return values | _ratio("text_acceptance_rate", engine.num_accepted_tokens - accepted, others)


def _ratio(name: str, numerator: float, denominator: float) -> dict[str, float]:
    return {name: numerator / denominator} if denominator else {}
