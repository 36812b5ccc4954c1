"""What is counted, and the one list of metrics: of each its name, its value and what a user reads of it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

PREFIX = "rollout/spec_"


@dataclasses.dataclass
class Counters:
    """Numbers, or lists, that add up, field by field."""

    def add(self, other: Self) -> None:
        for name, more in vars(other).items():
            if more is not None:  # None: nobody counts it
                mine = getattr(self, name)
                setattr(self, name, more if mine is None else operator.iadd(mine, more))

    def __add__(self, other: Self) -> Self:
        return self.sum((self, other))

    def take(self) -> Self:
        """The counts so far; this object counts on from nothing."""
        taken = dataclasses.replace(self)
        vars(self).update(vars(type(self)()))
        return taken

    @classmethod
    def sum(cls, each: Iterable[Self]) -> Self:
        total = cls()
        for one in each:
            total.add(one)
        return total

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class EngineCounters(Counters):
    """Counts of one engine's drafter since the last reading; a step is one draft for its rows."""

    num_steps: int = 0  # engine steps in which at least one row decoded
    num_steps_on: int = 0  # of these, those in which the gate was open
    num_row_steps: int = 0  # decoding rows, summed over steps
    num_drafts: int = 0  # rows given at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # as the proposer sees it, bonus tokens excluded
    num_untracked_rows: int = 0  # decoding rows that were not in the index
    num_unindexed_rows: int = 0  # decoding rows without drafts, as not all of their text was indexed yet
    num_texts_left_out: int = 0  # prompts, requests and earlier texts, for want of memory in the index
    num_samples_dropped: int = 0  # of the history, for want of memory
    num_resumed: int = 0  # requests that went on where their sample's text ended
    num_failed_steps: int = 0  # steps in which drafting failed and generation went on without
    draft_seconds: float = 0.0  # wall time inside the drafter, indexing included
    # Of a model that drafts beside the text: a draft's first tokens count, as far as it proposed the same
    num_model_passes: int = 0
    num_model_passes_left_out: int = 0
    num_model_draft_tokens: int = 0
    num_model_accepted_tokens: int = 0
    # Steps without drafts, by what decided so
    num_steps_off_threshold: int = 0  # more rows than batch_threshold, or than may be padded
    num_steps_off_cost: int = 0  # no draft paid for its cost
    num_steps_off_probe: int = 0  # to measure a step without drafts
    # Over the steps without prompts that the automatic gate timed; what it believed of them
    num_timed_steps: int = 0
    timed_seconds: float = 0.0
    error_seconds: float = 0.0  # between that and what it expected of each
    believed_plain_seconds: float = 0.0  # what each would have taken without drafts
    # Of these, over the steps with drafts
    num_drafted_steps: int = 0
    drafted_seconds: float = 0.0
    drafted_as_plain_seconds: float = 0.0  # what steps without drafts would have taken for the same tokens
    # Over those without
    plain_seconds: float = 0.0
    believed_of_plain_seconds: float = 0.0


@dataclasses.dataclass
class RequestCounters(Counters):
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
class RolloutReport(Counters):
    """What one rollout server has served for the training, under weights that have been replaced since."""

    engine: EngineCounters | None = None  # None: the engine has no drafter of ours (rollout.spec off)
    requests: RequestCounters = dataclasses.field(default_factory=RequestCounters)  # of the finished ones
    num_generated_tokens: int = 0  # of every request, counted where it was served
    rollout_seconds: float = 0.0  # wall time with at least one request in the engine
    # Sums over what vLLM aborted, which includes every request that a stop string ended.
    aborted: RequestCounters = dataclasses.field(default_factory=RequestCounters)
    num_interrupted: int = 0  # requests that were aborted for a weight sync


class Metric(NamedTuple):
    """One metric: how it comes about, and what the documentation says of it."""

    name: str  # without the PREFIX
    part: str  # of `_values`
    value: Callable[[Any], float | None]  # of that part; None: a ratio to nothing
    meaning: str
    advice: str  # what a user does about it


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _per(numerator: str, denominator: str, scale: float = 1.0) -> Callable[[Any], float | None]:
    return lambda counts: _ratio(scale * getattr(counts, numerator), getattr(counts, denominator))


def _load_imbalance(servers: Sequence[RolloutReport]) -> float | None:
    # Engines that served nothing may train: verl's separate_async has such.
    nums = [server.num_generated_tokens for server in servers if server.num_generated_tokens]
    return _ratio(max(nums) * len(nums), sum(nums)) if len(nums) > 1 else None


def _achieved_gain(counts: EngineCounters) -> float | None:
    gain = _ratio(counts.drafted_as_plain_seconds, counts.drafted_seconds)
    belief = _ratio(counts.plain_seconds, counts.believed_of_plain_seconds)
    return gain and gain * (belief or 1.0)


METRICS = (
    Metric("rollout_seconds", "servers",
        lambda servers: max((server.rollout_seconds for server in servers), default=0.0),
        "Seconds in which the busiest server worked on training requests; weight syncs do not count.",
        "Compare two runs with `rollout-spec compare`."),
    Metric("generated_tokens", "servers",
        lambda servers: sum(server.num_generated_tokens for server in servers),
        "Tokens generated in this time, those of interrupted responses included.",
        "`rollout-spec compare` divides it by `rollout_seconds`."),
    Metric("num_interrupted", "servers", lambda servers: sum(server.num_interrupted for server in servers),
        "Requests that a weight sync interrupted; 0 in the synchronous trainer.",
        "Nothing to do: verl sends them again after the sync."),
    Metric("tokens_per_step", "requests", _per("num_decoded_tokens", "num_decode_steps"),
        "Generated tokens per decode step of a request. Steps without a draft count too.",
        "Near 1: drafts are rare or wrong. `rollout-spec replay` says how many tokens your text allows."),
    Metric("num_drafts", "requests", lambda counts: counts.num_drafts,
        "Drafts verified in the training step.",
        "If 0, check `share_off_*`."),
    Metric("num_draft_tokens", "requests", lambda counts: counts.num_draft_tokens,
        "Draft tokens verified in the training step.",
        "`acceptance_rate` divides by it."),
    Metric("num_accepted_tokens", "requests", lambda counts: counts.num_accepted_tokens,
        "Draft tokens accepted in the training step.",
        "`acceptance_rate` counts them."),
    Metric("acceptance_rate", "requests", _per("num_accepted_tokens", "num_draft_tokens"),
        "Accepted tokens per draft token.",
        "Low: fine while `achieved_gain` is above 1; with a fixed threshold, raise `min_survival`."),
    Metric("num_failed_steps", "engine", lambda counts: counts.num_failed_steps,
        "Engine steps in which drafting failed. The rollout went on without drafts.",
        "Above 0: the engine's log gives the reason once. Report it."),
    Metric("num_resumed", "engine", lambda counts: counts.num_resumed,
        "Turns, and requests after an interruption, that went on where their sample's text ended.",
        "0 with an agent of several turns: its chat template changes what was said before."),
    Metric("num_untracked_rows", "engine", lambda counts: counts.num_untracked_rows,
        "Decoding requests that had no place in the index, summed over engine steps.",
        "Above 0: the index is full (raise `max_index_mb`), or a request held no text."),
    Metric("share_unindexed", "engine", _per("num_unindexed_rows", "num_row_steps"),
        "Share of the decoding requests' steps without drafts because their text was not indexed yet.",
        "High: prompts are long and answers short, or name samples, so that turns go on where they were."),
    Metric("num_texts_left_out", "engine", lambda counts: counts.num_texts_left_out,
        "Prompts, requests and earlier responses for which the index had no memory.",
        "Above 0: not all that runs at a time fits. Raise `max_index_mb`, or lower `history`."),
    Metric("num_samples_dropped", "engine", lambda counts: counts.num_samples_dropped,
        "Samples that the history gave up for newer ones, for want of memory.",
        "Above 0: not every prompt keeps `history` samples. Raise `max_index_mb`, or lower `history`."),
    Metric("share_on", "engine", _per("num_steps_on", "num_steps"),
        "Share of the engine's steps in which drafting was on.",
        "If low at the end of a rollout, check `share_off_*`."),
    Metric("draft_ms", "engine", _per("draft_seconds", "num_steps", 1e3),
        "Milliseconds in the drafter per engine step, indexing included.",
        "Above 1: other work runs on the host's cores, or very many requests decode."),
    Metric("achieved_gain", "engine", _achieved_gain,
        "Speed of steps with drafts over plain ones, with `batch_threshold=auto`. What plain steps would "
        "have taken is the gate's belief, corrected by those that it measured. A whole rollout gains less.",
        "Below 1 for long: step times vary too much to predict. Look for other work on the machine, or set "
        "`batch_threshold` to a number."),
    Metric("plain_step_ms", "engine", _per("believed_plain_seconds", "num_timed_steps", 1e3),
        "Milliseconds that the gate believes a step takes without drafts and prompts, in the mean.",
        "Compare with `drafted_step_ms`: drafts pay while tokens per step grow by more than the time does."),
    Metric("drafted_step_ms", "engine", _per("drafted_seconds", "num_drafted_steps", 1e3),
        "Milliseconds that steps with drafts took, without prompts.",
        "Far above `plain_step_ms`: drafts are dear here, so the gate takes few."),
    Metric("gate_error", "engine", _per("error_seconds", "timed_seconds"),
        "How far the gate was off: what steps took less what it believed, over what they took.",
        "Above 0.3 for long: step times vary; look for other work on the machine."),
    Metric("share_off_threshold", "engine", _per("num_steps_off_threshold", "num_steps"),
        "Share of engine steps without drafts: more requests decode than `batch_threshold`, or than can be "
        "padded.",
        "High throughout: raise `batch_threshold`, or take `auto`."),
    Metric("share_off_cost", "engine", _per("num_steps_off_cost", "num_steps"),
        "Share of engine steps without drafts because they would gain less than 1 % over a plain step.",
        "Fine in full batches. High at the end of a rollout too: the text rarely repeats; run `replay`."),
    Metric("share_off_probe", "engine", _per("num_steps_off_probe", "num_steps"),
        "Share of engine steps without drafts because the gate measured what plain steps take.",
        "Nothing to do: with `batch_threshold=auto` they are few."),
    Metric("num_model_passes", "model", lambda counts: counts.num_model_passes,
        "Passes of a model that drafts beside the text.",
        "Compare it with `num_model_passes_left_out`."),
    Metric("num_model_passes_left_out", "model", lambda counts: counts.num_model_passes_left_out,
        "Passes of the model that the gate left out: drafting was off, or they would not have paid.",
        "High at the end of a rollout: the model is rarely right."),
    Metric("model_share", "model", _per("num_model_draft_tokens", "num_draft_tokens"),
        "Share of the draft tokens that the model proposed too.",
        "Low: most drafts come from the text; the model may not be worth its passes."),
    Metric("model_acceptance_rate", "model", _per("num_model_accepted_tokens", "num_model_draft_tokens"),
        "Accepted tokens per draft token of the model.",
        "Falling: the head is stale. Train it too, or go without it."),
    Metric("load_imbalance", "servers", _load_imbalance,
        "Tokens of the busiest rollout engine over the mean of all that served, where there are several.",
        "High with `routing=group`: take more prompts, a smaller `max_imbalance`, or `routing=verl`."),
)  # fmt: skip


def _values(
    servers: Sequence[RolloutReport] | None, requests: RequestCounters | None, engine: EngineCounters | None
) -> dict[str, float]:
    """The metrics that have a value, by name. What is None nobody counts, and it has none."""
    model = engine if engine is not None and engine.num_model_passes else None
    parts = {"servers": servers, "requests": requests, "engine": engine, "model": model}
    found = {each.name: each.value(part) for each in METRICS if (part := parts[each.part]) is not None}
    return {name: float(value) for name, value in found.items() if value is not None}


def rollout_metrics(reports: Iterable[RolloutReport]) -> dict[str, float]:
    """The token-weighted metrics of one training step over all rollout servers.

    Rollout time is that of the busiest server. Ratios appear only where their denominator is not 0.
    """
    servers = list(reports)
    total = RolloutReport.sum(servers)
    requests = total.requests + total.aborted
    has_drafts = total.engine is not None or requests.num_decode_steps
    values = _values(servers, requests if has_drafts else None, total.engine)
    return {PREFIX + name: value for name, value in values.items()}


def engine_summary(engine: EngineCounters) -> str:
    """One engine's part of the same metrics, in one line for its log: ratios, and the passes of a model."""
    drafts = RequestCounters(
        num_draft_tokens=engine.num_draft_tokens, num_accepted_tokens=engine.num_accepted_tokens
    )
    names = [each.name for each in METRICS if each.part == "model" or not each.name.startswith("num_")]
    values = _values(None, drafts, engine)
    return ", ".join(f"{name} {values[name]:.3g}" for name in names if name in values)
