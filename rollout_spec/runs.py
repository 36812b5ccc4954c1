"""Training runs read back from verl's file logger, and what two of them say about each other."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.metrics import PREFIX

METRICS_FILE = "metrics.jsonl"
TRACE_FOLDER = "rollouts"
NUM_RESAMPLES = 10_000


class RunError(ValueError):
    """A run that cannot be read or compared; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step as verl logged it; NaN where a value is missing."""

    step: int
    rollout_seconds: float
    generated_tokens: int
    reward: float
    response_length: float
    tokens_per_step: float
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float

    @property
    def acceptance_rate(self) -> float:
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def tokens_per_second(self) -> float:
        return _ratio(self.generated_tokens, self.rollout_seconds)


@dataclasses.dataclass(frozen=True)
class Run:
    """The steps of one run."""

    name: str
    steps: tuple[Step, ...]
    looping_share: float = math.nan

    @property
    def rollout_seconds(self) -> float:
        return sum(step.rollout_seconds for step in self.steps)

    @property
    def generated_tokens(self) -> int:
        return sum(step.generated_tokens for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return _ratio(self.generated_tokens, self.rollout_seconds)

    @property
    def tokens_per_step(self) -> float:
        """Over all decode steps of the run, so each training step weighs as much as it decoded."""
        decode_steps = sum(step.generated_tokens / step.tokens_per_step for step in self.steps)
        return _ratio(self.generated_tokens, decode_steps)

    @property
    def acceptance_rate(self) -> float:
        accepted = sum(step.num_accepted_tokens for step in self.steps)
        return _ratio(accepted, sum(step.num_draft_tokens for step in self.steps))

    @property
    def num_drafts(self) -> int:
        return int(sum(step.num_drafts for step in self.steps))

    def column(self, name: str) -> list[float]:
        return [getattr(step, name) for step in self.steps]

    def to_dict(self) -> dict[str, Any]:
        lists = ("step", "rollout_seconds", "generated_tokens", "reward", "response_length")
        return {name: _plain(self.column(name)) for name in lists} | {
            "tokens_per_step_by_step": _plain(self.column("tokens_per_step")),
            "acceptance_rate_by_step": _plain(self.column("acceptance_rate")),
            "tokens_per_second": _plain(self.tokens_per_second),
            "tokens_per_step": _plain(self.tokens_per_step),
            "acceptance_rate": _plain(self.acceptance_rate),
            "num_drafts": self.num_drafts,
            "looping_share": _plain(self.looping_share),
        }


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How many tokens of two runs' first rollouts are the same, each response up to its first difference."""

    num_tokens: int  # compared: up to and with the first that differs
    num_identical: int

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs over the same steps. `speedup` is the ratio of generated tokens per second."""

    off: Run
    on: Run
    speedup: float
    speedup_ci95: tuple[float, float]
    agreement: Agreement | None = None  # of the first step; None where samples were not named and recorded

    @property
    def verdict(self) -> str:
        """faster, slower, or unclear where the interval holds 1 (or there is no interval)."""
        low, high = self.speedup_ci95
        if low > 1.0:
            return "faster"
        return "slower" if high < 1.0 else "unclear"

    def to_dict(self) -> dict[str, Any]:
        return {
            self.off.name: self.off.to_dict(),
            self.on.name: self.on.to_dict(),
            "speedup": _plain(self.speedup),
            "speedup_ci95": _plain(list(self.speedup_ci95)),
            "first_step_agreement": None if self.agreement is None else self.agreement.to_dict(),
        }


def read_run(path: str | Path, name: str, is_looping: Callable[[Sequence[int]], bool] | None = None) -> Run:
    """Read a run: a folder with `metrics.jsonl` (and perhaps recorded rollouts), or the file alone.

    Args:
        path: the folder, or the JSON-lines file that verl's logger `file` wrote.
        name: what to call the run in tables and keys.
        is_looping: told a response's token ids; without it `looping_share` stays NaN.

    Raises:
        RunError: nothing there, or no step carries rollout times.
    """
    path = Path(path)
    file = path / METRICS_FILE if path.is_dir() else path
    steps = tuple(sorted(read_steps(file), key=lambda step: step.step))
    if not steps:
        raise RunError(
            f"{file}: no step has {PREFIX}rollout_seconds; was the run started with "
            "+rollout.spec=sam or +rollout.spec=off?"
        )
    share = math.nan
    if is_looping is not None and path.is_dir():
        share = looping_share(path / TRACE_FOLDER, is_looping)
    return Run(name, steps, share)


def read_steps(file: Path) -> Iterator[Step]:
    """The steps that a run has logged so far; lines without rollout times (validation) are passed over."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        raise RunError(f"{file}: no such file") from None
    # A run in progress may be writing its last line.
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line)
            data = record["data"]
        except (ValueError, TypeError, KeyError):
            raise RunError(f"{file}:{number}: not a line of verl's file logger") from None
        if data.get(PREFIX + "rollout_seconds"):
            yield _step(record["step"], data)


def _step(step: int, data: dict[str, Any]) -> Step:
    def spec(name: str, default: float = 0.0) -> float:
        return float(data.get(PREFIX + name, default))

    return Step(
        step=step,
        rollout_seconds=spec("rollout_seconds"),
        generated_tokens=int(spec("generated_tokens")),
        reward=float(data.get("critic/rewards/mean", math.nan)),
        response_length=float(data.get("response_length/mean", math.nan)),
        # A run that does not draft takes one decode step a token.
        tokens_per_step=spec("tokens_per_step", 1.0),
        num_drafts=spec("num_drafts"),
        num_draft_tokens=spec("num_draft_tokens"),
        num_accepted_tokens=spec("num_accepted_tokens"),
    )


def looping_share(folder: Path, is_looping: Callable[[Sequence[int]], bool]) -> float:
    """The share of recorded responses that `is_looping` says repeat themselves; NaN without any."""
    responses = [
        response
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_text().splitlines()
        for response in json.loads(line)["responses"]
    ]
    return _ratio(sum(map(is_looping, responses)), len(responses))


def first_step_agreement(off: Path, on: Path) -> Agreement | None:
    """Compare the tokens of the first training step of two runs, sample by sample.

    Before the second step nothing but the drafts tells the runs apart: with verify=coupled in both, the
    tokens are the same up to numerics.

    Args:
        off, on: the runs' folders.

    Returns:
        None unless both runs recorded samples of the same names.
    """
    ours, theirs = (_first_step_responses(folder / TRACE_FOLDER) for folder in (off, on))
    common = ours.keys() & theirs.keys()
    if not common:
        return None
    compared = identical = 0
    for name in common:
        one, other = ours[name], theirs[name]
        pairs = enumerate(zip(one, other, strict=False))
        agreed = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
        identical += agreed
        compared += min(agreed + 1, max(len(one), len(other)))
    return Agreement(compared, identical)


def _first_step_responses(folder: Path) -> dict[str, list[int]]:
    """Responses by the names of their samples, which begin with seed, training step, train or val."""
    named = [
        (name, response)
        for file in sorted(folder.glob("*.jsonl"))
        for record in map(json.loads, file.read_text().splitlines())
        for name, response in zip(record.get("names", []), record["responses"], strict=False)
        if name and name[2] == "train"
    ]
    first = min((name[1] for name, _ in named), default=0)
    return {json.dumps(name): response for name, response in named if name[1] == first}


def compare(off: Run, on: Run, seed: int = 0, agreement: Agreement | None = None) -> Comparison:
    """Compare the steps that both runs have.

    The interval is a percentile bootstrap over steps, paired: a step is drawn in both runs at once,
    because its prompts are the same. One step gives no interval (NaN).
    """
    common = {step.step for step in off.steps} & {step.step for step in on.steps}
    if not common:
        raise RunError(f"the runs {off.name} and {on.name} have no step in common")
    off, on = (
        dataclasses.replace(run, steps=tuple(step for step in run.steps if step.step in common))
        for run in (off, on)
    )
    rows = np.array([_amounts(off), _amounts(on)])  # run, step, (tokens, seconds)
    low = high = math.nan
    if len(common) > 1:
        draws = np.random.default_rng(seed).integers(len(common), size=(NUM_RESAMPLES, len(common)))
        low, high = np.percentile(_speedup(rows[:, draws].sum(axis=2)), [2.5, 97.5])
    return Comparison(off, on, float(_speedup(rows.sum(axis=1))), (float(low), float(high)), agreement)


def _amounts(run: Run) -> list[tuple[float, float]]:
    return [(step.generated_tokens, step.rollout_seconds) for step in run.steps]


def _speedup(sums: np.ndarray) -> np.ndarray:
    off, on = sums[..., 0] / sums[..., 1]
    return on / off


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _plain(value: float | Iterable[float]) -> Any:
    """For JSON, which has no NaN: null instead."""
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else None
