"""What an engine's steps take: a table that was measured or assumed, by the tokens that a step verifies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollout_spec.config import UserError
from rollout_spec.drafting.gate.step_cost import never_falling

_Point = tuple[float, float, float]


class Times(Protocol):
    """What an engine's steps take."""

    def seconds(
        self,
        num_tokens: int,
        drafted: bool,
        num_context: int = 0,
        num_tokens_of_others: int = 0,
        num_rows: int = 0,
    ) -> float:
        """Of a step that verifies and prefills num_tokens, with or without drafts among them.

        Args:
            num_context: tokens in all rows of the step.
            num_tokens_of_others: tokens of the other data-parallel ranks' steps, which run together with it.
            num_rows: requests in the step.
        """

    @property
    def without_drafter(self) -> Times:
        """Of the same engine where nothing drafts."""


class StepTimesError(UserError):
    """A table of step times that cannot be used; the message says why."""


class StepTimes:
    """Seconds of an engine step by the tokens it verifies, whatever its context.

    Linear between the points; before the first constant, behind the last on the line through the last two.
    What falls from point to point is noise and is averaged out.

    Args:
        points: (number of tokens, seconds, weight), any order.
        drafted: the same for steps with drafts, where engines run these through other code; else as `points`.

    Raises:
        StepTimesError: no points, or one that is not positive.
    """

    def __init__(self, points: Iterable[_Point], drafted: Iterable[_Point] = ()) -> None:
        self._plain = _curve(points)
        drafted = list(drafted)
        self._drafted = _curve(drafted) if drafted else self._plain

    @classmethod
    def parse(cls, text: str) -> StepTimes:
        """From "8:0.085,16:0.09,32:0.17", tokens and seconds, or the JSON file that `bench engine` writes."""
        path = Path(text)
        if path.is_file():
            return cls._from_file(path)
        try:
            return cls(
                [(float(n), float(s), 1.0) for n, s in (point.split(":") for point in text.split(","))]
            )
        except ValueError as error:
            raise StepTimesError(
                f"step times {text!r}: neither a file nor tokens:seconds,..., {error}"
            ) from None

    @classmethod
    def _from_file(cls, path: Path) -> StepTimes:
        try:
            table = json.loads(path.read_text())["step_times"]
            curves: dict[bool, list[_Point]] = {False: [], True: []}
            for row in table:
                point = (float(row["num_tokens"]), float(row["seconds"]), float(row["num_steps"]))
                curves[bool(row["drafted"])].append(point)
        except (ValueError, KeyError, TypeError) as error:
            raise StepTimesError(f"{path}: no step_times of `bench engine`: {error!r}") from None
        return cls(curves[False], curves[True])

    @property
    def without_drafter(self) -> StepTimes:
        return self

    def seconds(self, num_tokens: int, drafted: bool, *_: int, **__: int) -> float:
        at, seconds = self._drafted if drafted else self._plain
        if num_tokens <= at[-1] or len(at) == 1:
            return float(np.interp(num_tokens, at, seconds))
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]))
        return float(seconds[-1] + slope * (num_tokens - at[-1]))


def _curve(points: Iterable[_Point]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    table = np.array(sorted(points), float).reshape(-1, 3)
    at, seconds, weights = table.T
    if not len(at) or not np.isfinite(table).all() or at[0] < 1 or min(*seconds, *weights) <= 0:
        raise StepTimesError("step times: need at least one point, tokens from 1 and seconds above 0")
    return at, never_falling(seconds, weights)
