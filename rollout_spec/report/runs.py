"""Training runs read back from verl's logs, and what two of them say about each other."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.metrics import PREFIX
from rollout_spec.report.logs import Record, RunError, WandbRun, read_json_lines, read_log
from rollout_spec.report.responses import Agreement, looping_share

NUM_RESAMPLES = 10_000
MAX_DRIFT = 0.05  # above it, a ratio of two runs is as much the machine's as the drafts'
_SECONDS = PREFIX + "rollout_seconds"
# What stands in every step of a run that drafts, if it has a token.
_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "tokens_per_step")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Measure:
    """What is compared: per step `numerator / denominator`, over steps the ratio of their sums.

    The names are fields of `Step`; without a denominator every step weighs the same. The change from one run
    to the other is a ratio where the measure is a positive amount, else a difference.
    """

    name: str
    title: str
    unit: str
    numerator: str
    denominator: str = ""
    is_ratio: bool = True


MEASURES = (
    Measure("rollout_seconds", "Rollout time per step", "s", "rollout_seconds"),
    Measure("step_seconds", "Training step time", "s", "step_seconds"),
    Measure("tokens_per_second", "Generated tokens per second", "", "generated_tokens", "rollout_seconds"),
    Measure("tokens_per_step", "Tokens per step", "", "generated_tokens", "decode_steps"),
    Measure("acceptance_rate", "Acceptance rate", "%", "num_accepted_tokens", "num_draft_tokens", False),
    Measure("model_acceptance_rate", "Acceptance, model's", "%", "model_accepted", "model_drafted", False),
    Measure("text_acceptance_rate", "Acceptance, text's", "%", "text_accepted", "text_drafted", False),
    Measure("model_share", "Draft tokens, model's share", "%", "model_drafted", "num_draft_tokens", False),
    Measure("draft_ms", "Drafter, per engine step", "ms", "draft_ms"),
    Measure("model_ms", "Model on the host, per engine step", "ms", "model_ms"),
    Measure("num_model_passes", "Model's passes", "", "num_model_passes"),
    Measure("share_passes_left_out", "Model's passes left out", "%", "num_left_out", "all_passes", False),
    Measure("reward", "Reward", "", "reward", is_ratio=False),
    Measure("response_length", "Response length", "tokens", "response_length"),
    Measure("entropy", "Entropy", "nats", "entropy", is_ratio=False),
    Measure("training_ms", "Training without rollouts, per token", "ms", "update_ms", "trained_tokens"),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step as verl logged it; NaN where a value is missing.

    One without tokens of its own is a step too: an asynchronous trainer may have got its batch before the
    weights changed, and then the step before counts what it took.
    """

    step: int
    rollout_seconds: float
    step_seconds: float
    generated_tokens: int
    reward: float
    response_length: float
    entropy: float
    tokens_per_step: float
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    num_interrupted: float = 0.0  # requests that a weight sync interrupted
    update_ms: float = math.nan  # verl's old_log_prob and update_actor
    trained_tokens: float = math.nan  # that these had, prompts included
    wait_seconds: float = math.nan  # the trainer's, for its rollouts
    model_share: float = math.nan  # of the draft tokens, where a model drafts beside the text
    model_acceptance_rate: float = math.nan
    text_acceptance_rate: float = math.nan
    draft_ms: float = math.nan  # on the host, per engine step
    model_ms: float = math.nan
    num_model_passes: float = math.nan
    num_left_out: float = math.nan

    @property
    def decode_steps(self) -> float:
        return ratio(self.generated_tokens, self.tokens_per_step)

    @property
    def acceptance_rate(self) -> float:
        return ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def model_drafted(self) -> float:
        return self.model_share * self.num_draft_tokens

    @property
    def model_accepted(self) -> float:
        return self.model_acceptance_rate * self.model_drafted

    @property
    def text_drafted(self) -> float:
        return self.num_draft_tokens - self.model_drafted

    @property
    def text_accepted(self) -> float:
        return self.text_acceptance_rate * self.text_drafted

    @property
    def all_passes(self) -> float:
        return self.num_model_passes + self.num_left_out

    @property
    def share_passes_left_out(self) -> float:
        return ratio(self.num_left_out, self.all_passes)

    @property
    def tokens_per_second(self) -> float:
        return ratio(self.generated_tokens, self.rollout_seconds)

    @property
    def training_ms(self) -> float:
        return ratio(self.update_ms, self.trained_tokens)


@dataclasses.dataclass(frozen=True)
class Run:
    """The steps of one run."""

    name: str
    steps: tuple[Step, ...]
    looping_share: float = math.nan
    wandb: WandbRun | None = None

    def column(self, name: str) -> list[float]:
        return [getattr(step, name) for step in self.steps]

    def total(self, name: str) -> float:
        return sum(self.column(name))

    @property
    def trains_beside_rollouts(self) -> bool:
        """Whether rollouts were interrupted, or took clearly longer than the trainer waited for them."""
        # Requests start a moment before the wait does; that much does not slow the training.
        waited = (1.0 + MAX_DRIFT) * self.total("wait_seconds")
        return self.total("num_interrupted") > 0 or self.total("rollout_seconds") > waited

    def to_dict(self) -> dict[str, Any]:
        amounts = ("step", "rollout_seconds", "step_seconds", "generated_tokens")
        qualities = ("reward", "response_length", "entropy")
        return {name: plain(self.column(name)) for name in amounts + qualities} | {
            "tokens_per_step_by_step": plain(self.column("tokens_per_step")),
            "acceptance_rate_by_step": plain(self.column("acceptance_rate")),
            "num_drafts": int(self.total("num_drafts")),
            "num_interrupted": int(self.total("num_interrupted")),
            "looping_share": plain(self.looping_share),
        }


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; NaN where it is not known."""

    value: float
    ci95: tuple[float, float]

    def to_dict(self) -> dict[str, Any]:
        return {"value": plain(self.value), "ci95": plain(self.ci95)}


@dataclasses.dataclass(frozen=True)
class Compared:
    """One measure in both runs, and the change from `off` to `on`: on / off, or on - off."""

    measure: Measure
    off: Estimate
    on: Estimate
    change: Estimate

    def to_dict(self) -> dict[str, Any]:
        change = "ratio" if self.measure.is_ratio else "difference"
        return {"off": self.off.to_dict(), "on": self.on.to_dict(), change: self.change.to_dict()}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs over the same steps. `speedup` is the ratio of generated tokens per second."""

    off: Run
    on: Run
    measures: Mapping[str, Compared]
    agreement: Agreement | None = None  # of the first step; None where samples were not named and recorded
    left_out: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)  # steps of one run only

    @property
    def speedup(self) -> float:
        return self.measures["tokens_per_second"].change.value

    @property
    def speedup_ci95(self) -> tuple[float, float]:
        return self.measures["tokens_per_second"].change.ci95

    @property
    def drift(self) -> float:
        """How many times as long the machine took with `on` for what drafts do not touch: verl's training.

        NaN where it was not logged, took no time, or ran beside the rollouts: it then is no measure.
        """
        if self.off.trains_beside_rollouts or self.on.trains_beside_rollouts:
            return math.nan
        drift = self.measures["training_ms"].change.value
        return drift if 0.0 < drift < math.inf else math.nan

    @property
    def corrected_speedup(self) -> float:
        """The speedup had the machine not drifted."""
        return self.speedup * self.drift

    @property
    def has_drifted(self) -> bool:
        """Whether the machine differs too much between the runs for the speedup to be trusted."""
        return abs(self.drift - 1.0) > MAX_DRIFT

    @property
    def verdict(self) -> str:
        """faster, slower, or unclear: the interval holds 1, there is none, or the machine has drifted."""
        if self.has_drifted:
            return "unclear"
        low, high = self.speedup_ci95
        if low > 1.0:
            return "faster"
        return "slower" if high < 1.0 else "unclear"

    def to_dict(self) -> dict[str, Any]:
        over_all = ("tokens_per_second", "tokens_per_step", "acceptance_rate")
        values = [self.measures[name] for name in over_all]
        return {
            self.off.name: self.off.to_dict() | {c.measure.name: plain(c.off.value) for c in values},
            self.on.name: self.on.to_dict() | {c.measure.name: plain(c.on.value) for c in values},
            "speedup": plain(self.speedup),
            "first_step_agreement": self.agreement and dataclasses.asdict(self.agreement),
            "speedup_ci95": plain(self.speedup_ci95),
            "drift": plain(self.drift),
            "has_drifted": self.has_drifted,
            "corrected_speedup": plain(self.corrected_speedup),
            "measures": {name: compared.to_dict() for name, compared in self.measures.items()},
        }


def read_run(path: str | Path, name: str) -> Run:
    """Read a run from the log that verl left of it (see `logs.read_log`), and perhaps its recorded rollouts.

    Args:
        path: a folder, a file, or the name of a run at wandb.
        name: what to call the run in tables and keys.

    Raises:
        RunError: nothing there, no step carries rollout times, or a value is no number.
    """
    log = read_log(path)
    records = [(step, data) for step, data in log.records if data.get(_SECONDS) is not None]
    if records and not _is_whole(records[-1][1], [data for _, data in records[:-1]]):
        logger.warning("%s: step %d was not logged to its end, it is left out", log.source, records[-1][0])
        records.pop()
    steps = tuple(_steps(records, log.source))
    if not steps:
        raise RunError(
            f"{log.source}: no step has {PREFIX}rollout_seconds; was the run started with "
            "+rollout.spec=sam or +rollout.spec=off?"
        )
    return Run(name, steps, looping_share(Path(path)), log.wandb)


def _is_whole(last: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every count of a step was logged: tensorboard gets them one by one."""
    num_tokens = last.get(PREFIX + "generated_tokens")
    if num_tokens is None:
        return False
    counts = {PREFIX + name for name in _COUNTS} & {name for data in before for name in data}
    return not num_tokens or counts <= last.keys()


def read_steps(file: Path) -> Iterator[Step]:
    """The steps that the file logger has written so far."""
    return _steps(read_json_lines(file, logging.DEBUG), str(file))


def _steps(records: Iterable[Record], source: str) -> Iterator[Step]:
    """Records without rollout times (a validation) are passed over."""
    return (_step(step, data, source) for step, data in records if data.get(_SECONDS) is not None)


def _step(step: int, data: Mapping[str, Any], source: str) -> Step:
    def number(name: str, default: float | None = None) -> float:
        value = data.get(name, default)
        try:
            # The file logger writes NaN as null.
            return math.nan if value is None else float(value)
        except (TypeError, ValueError):
            raise RunError(f"{source}: step {step}: {name} is no number: {value!r}") from None

    def spec(name: str, default: float = 0.0) -> float:
        value = number(PREFIX + name, default)
        if not math.isfinite(value):
            raise RunError(f"{source}: step {step}: {PREFIX}{name} is no finite number")
        return value

    generated_tokens = int(spec("generated_tokens"))
    return Step(
        step=step,
        rollout_seconds=spec("rollout_seconds"),
        step_seconds=number("timing_s/step"),
        generated_tokens=generated_tokens,
        reward=number("critic/rewards/mean"),
        response_length=number("response_length/mean"),
        entropy=number("actor/entropy"),
        # A run that does not draft takes one decode step a token.
        tokens_per_step=spec("tokens_per_step", 1.0) if generated_tokens else math.nan,
        num_drafts=spec("num_drafts"),
        num_draft_tokens=spec("num_draft_tokens"),
        num_accepted_tokens=spec("num_accepted_tokens"),
        num_interrupted=spec("num_interrupted"),
        update_ms=1e3 * (number("timing_s/old_log_prob", 0.0) + number("timing_s/update_actor")),
        trained_tokens=number("perf/total_num_tokens"),
        wait_seconds=number("timing_s/gen"),
        model_share=number(PREFIX + "model_share"),
        model_acceptance_rate=number(PREFIX + "model_acceptance_rate"),
        text_acceptance_rate=number(PREFIX + "text_acceptance_rate"),
        draft_ms=number(PREFIX + "draft_ms"),
        model_ms=number(PREFIX + "model_ms"),
        num_model_passes=number(PREFIX + "num_model_passes"),
        num_left_out=number(PREFIX + "num_model_passes_left_out"),
    )


def compare(off: Run, on: Run, seed: int = 0, agreement: Agreement | None = None) -> Comparison:
    """Compare the steps that both runs have.

    The intervals are those of `paired` over steps: a step is drawn in both runs at once, because its prompts
    are the same. One step gives no interval (NaN).
    """
    common = {step.step for step in off.steps} & {step.step for step in on.steps}
    if not common:
        raise RunError(f"the runs {off.name} and {on.name} have no step in common")
    left_out = {run.name: [step.step for step in run.steps if step.step not in common] for run in (off, on)}
    off, on = (
        dataclasses.replace(run, steps=tuple(step for step in run.steps if step.step in common))
        for run in (off, on)
    )
    measures = {
        measure.name: Compared(
            measure, *paired(_amounts(off, measure), _amounts(on, measure), measure.is_ratio, seed)
        )
        for measure in MEASURES
    }
    return Comparison(off, on, measures, agreement, left_out)


def paired(
    off: np.ndarray, on: np.ndarray, is_ratio: bool = True, seed: int = 0
) -> tuple[Estimate, Estimate, Estimate]:
    """What was measured in pairs: both sides, and the change, each with a percentile bootstrap over pairs.

    Args:
        off, on: [numerator or denominator, pair]; a side's value is the ratio of the sums.

    Returns:
        `off`, `on`, and on / off, or on - off unless `is_ratio`.
    """
    draws = _draws(off.shape[1], seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        sides = [np.divide(*(amounts @ draws.T)) for amounts in (off, on)]
        change = sides[1] / sides[0] if is_ratio else sides[1] - sides[0]
    first, second, third = (_estimate(values, off.shape[1]) for values in (*sides, change))
    return first, second, third


@functools.lru_cache(maxsize=1)
def _draws(num_pairs: int, seed: int) -> np.ndarray:
    """[1 + resample, pair], how often a pair was drawn; first the pairs themselves, each once."""
    draws = np.random.default_rng(seed).multinomial(num_pairs, [1 / num_pairs] * num_pairs, NUM_RESAMPLES)
    return np.vstack([np.ones(num_pairs), draws])


def _amounts(run: Run, measure: Measure) -> np.ndarray:
    """[numerator or denominator, step]; both are 0 where a step lacks one of them: it does not count."""
    numerator = np.array(run.column(measure.numerator), float)
    denominator = np.array(run.column(measure.denominator), float) if measure.denominator else 1.0
    amounts = np.array(np.broadcast_arrays(numerator, denominator))
    amounts[:, ~np.isfinite(amounts).all(axis=0)] = 0.0
    return amounts


def _estimate(values: np.ndarray, num_pairs: int) -> Estimate:
    if num_pairs < 2 or not np.isfinite(values[0]):
        return Estimate(float(values[0]), (math.nan, math.nan))
    low, high = np.nanpercentile(np.where(np.isfinite(values[1:]), values[1:], np.nan), [2.5, 97.5])
    return Estimate(float(values[0]), (float(low), float(high)))


def ratio(numerator: float, denominator: float) -> float:
    """NaN where there is no denominator."""
    return numerator / denominator if denominator else math.nan


def plain(value: float | Iterable[float]) -> Any:
    """For JSON, which has no NaN: null instead."""
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return value if math.isfinite(value) else None
