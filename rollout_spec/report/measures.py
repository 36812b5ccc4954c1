"""What two training runs say about each other: measures with 95 % intervals, and whether to trust them."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.config import UserError
from rollout_spec.report.responses import Agreement
from rollout_spec.report.runs import MAX_DRIFT, Run, for_json, ratio

NUM_RESAMPLES = 10_000
FAR = 1.2  # a step that took that many times as long as the others was disturbed
FIRM = 8  # of fewer pairs, a bootstrap gives a rough interval, narrower than 95 %


class Measure(NamedTuple):
    """What is compared: per step `numerator / denominator`, over all steps the ratio of their sums.

    Both are names in `Step`; without a denominator every step weighs the same. The change from one run to the
    other is a ratio where the measure is a positive amount, else a difference.
    """

    name: str
    title: str
    unit: str
    numerator: str
    denominator: str = ""
    is_ratio: bool = True
    digits: int = 1  # that a table shows after the point

    @property
    def label(self) -> str:
        return self.title + (f" ({self.unit})" if self.unit else "")

    def amounts(self, run: Run) -> list[list[float]]:
        """[numerator or denominator, step]"""
        ones = [1.0] * len(run.steps)
        return [run.column(name) if name else ones for name in (self.numerator, self.denominator)]


MEASURES = (
    Measure("rollout_seconds", "Rollout time per training step", "s", "rollout_seconds"),
    Measure("step_seconds", "Training step time", "s", "step_seconds"),
    Measure("tokens_per_second", "Generated tokens per second", "", "generated_tokens", "rollout_seconds"),
    Measure("tokens_per_step", "Tokens per step", "", "generated_tokens", "decode_steps", digits=2),
    Measure("acceptance_rate", "Acceptance rate", "%", "num_accepted_tokens", "num_draft_tokens", False),
    Measure("draft_ms", "Drafter time per engine step", "ms", "draft_ms", digits=2),
    Measure("reward", "Reward", "", "reward", is_ratio=False, digits=3),
    Measure("response_length", "Response length", "tokens", "response_length"),
    Measure("entropy", "Entropy", "nats", "entropy", is_ratio=False, digits=3),
    Measure("training_ms", "Training without rollouts, per token", "ms", "update_ms", "trained_tokens",
            digits=3),
)  # fmt: skip


class Estimate(NamedTuple):
    """A value with its 95 % interval; NaN where it is not known."""

    value: float
    ci95: tuple[float, float]

    def to_dict(self) -> dict[str, Any]:
        return {"value": for_json(self.value), "ci95": for_json(self.ci95)}


class Compared(NamedTuple):
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
    def shown(self) -> list[Compared]:
        """The measures that at least one of the runs has."""
        return [each for each in self.measures.values() if np.isfinite([each.off.value, each.on.value]).any()]

    @property
    def speedup(self) -> Estimate:
        return self.measures["tokens_per_second"].change

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
    def has_drifted(self) -> bool:
        """Whether the machine differs so much between the runs that there is no speedup."""
        return abs(self.drift - 1.0) > MAX_DRIFT

    @property
    def disturbed(self) -> tuple[Run, int, float] | None:
        """The step whose training took longest beside its run's others: run, step, times their median.

        None where none took FAR times as long.
        """
        found = []
        for run in (self.off, self.on):
            of_steps = {step.step: ratio(step.update_ms, step.trained_tokens) for step in run.steps}
            for step, ms in of_steps.items():
                others = [each for other, each in of_steps.items() if other != step]
                found.append((run, step, float(ms / np.median(others)) if others else math.nan))
        far = [each for each in found if each[2] > FAR]
        return max(far, key=lambda each: each[2], default=None)

    @property
    def verdict(self) -> str:
        """faster, slower, or unclear: the interval holds 1, there is none, or the machine has drifted."""
        if self.has_drifted:
            return "unclear"
        low, high = self.speedup.ci95
        return "faster" if low > 1.0 else "slower" if high < 1.0 else "unclear"

    @property
    def warnings(self) -> list[str]:
        """Doubts about the choice of the two runs. They are compared all the same."""
        off, on = self.off, self.on
        if off.column("rollout_seconds") == on.column("rollout_seconds"):
            same = "Both runs took exactly the same time in every step"
            return [f"{same}: this looks like one run, given twice."]
        if off.has_drafter and not on.has_drafter:
            return [f"The runs look swapped: {off.name} was trained with drafts, {on.name} without."]
        if not on.has_drafter:
            return [f"Neither run had drafts: {on.name} was not trained with +rollout.spec=sam."]
        if off.has_drafter:
            return [f"Both runs had drafts: {off.name} was not trained with +rollout.spec=off."]
        return []

    def to_dict(self) -> dict[str, Any]:
        over_all = ("tokens_per_second", "tokens_per_step", "acceptance_rate")
        values = [self.measures[name] for name in over_all]
        return {
            self.off.name: self.off.to_dict() | {c.measure.name: for_json(c.off.value) for c in values},
            self.on.name: self.on.to_dict() | {c.measure.name: for_json(c.on.value) for c in values},
            "speedup": None if self.has_drifted else for_json(self.speedup.value),
            "first_step_agreement": self.agreement and self.agreement.to_dict(),
            "speedup_ci95": [None, None] if self.has_drifted else for_json(self.speedup.ci95),
            "drift": for_json(self.drift),
            "has_drifted": self.has_drifted,
            "warnings": self.warnings,
            "measures": {name: compared.to_dict() for name, compared in self.measures.items()},
        }


def compare(off: Run, on: Run, agreement: Agreement | None = None) -> Comparison:
    """Compare the steps that both runs have.

    The intervals are those of `paired` over steps: a step is drawn in both runs at once, because its prompts
    are the same. One step gives no interval (NaN).
    """
    common = {step.step for step in off.steps} & {step.step for step in on.steps}
    if not common:
        raise UserError(f"the runs {off.name} and {on.name} have no step in common")
    left_out = {run.name: [step.step for step in run.steps if step.step not in common] for run in (off, on)}
    steps = [tuple(step for step in run.steps if step.step in common) for run in (off, on)]
    off, on = dataclasses.replace(off, steps=steps[0]), dataclasses.replace(on, steps=steps[1])
    measures = {measure.name: _compared((off, on), measure) for measure in MEASURES}
    return Comparison(off, on, measures, agreement, left_out)


def _compared(runs: Sequence[Run], measure: Measure) -> Compared:
    """A step counts where both runs have the measure; a run that has it in no step is not asked."""
    amounts = np.array([measure.amounts(run) for run in runs])
    known = np.isfinite(amounts).all(axis=1)  # [run, step]
    known &= known[known.any(axis=1)].all(axis=0)
    off, on = np.where(known[:, None], amounts, 0.0)
    return Compared(measure, *paired(off, on, measure.is_ratio))


def paired(off: np.ndarray, on: np.ndarray, is_ratio: bool = True) -> tuple[Estimate, Estimate, Estimate]:
    """Estimate both sides of paired measurements and the change, each by a percentile bootstrap over pairs.

    As many pairs as there are are drawn, with repeats, again and again. Between the middle 95 % of the draws'
    values is the interval.

    off, on: [numerator or denominator, pair]; a side's value is the ratio of the sums.

    Returns `off`, `on`, and on / off, or on - off unless `is_ratio`.
    """
    draws = _draws(off.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        sides = [np.divide(*(amounts @ draws.T)) for amounts in (off, on)]
        change = sides[1] / sides[0] if is_ratio else sides[1] - sides[0]
    first, second, third = (_estimate(values, off.shape[1]) for values in (*sides, change))
    return first, second, third


@functools.lru_cache(maxsize=1)
def _draws(num_pairs: int) -> np.ndarray:
    """[1 + NUM_RESAMPLES, pair], how often a draw has each pair; the first draw has every pair once."""
    draws = np.random.default_rng(0).multinomial(num_pairs, [1 / num_pairs] * num_pairs, NUM_RESAMPLES)
    return np.vstack([np.ones(num_pairs), draws])


def _estimate(values: np.ndarray, num_pairs: int) -> Estimate:
    if num_pairs < 2 or not np.isfinite(values[0]):
        return Estimate(float(values[0]), (math.nan, math.nan))
    low, high = np.nanpercentile(np.where(np.isfinite(values[1:]), values[1:], np.nan), [2.5, 97.5])
    return Estimate(float(values[0]), (float(low), float(high)))
