"""The time that an engine step takes: the interface, and a table of measured or assumed times."""

from __future__ import annotations

import abc
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from rollout_spec.config import UserError

_Point = tuple[float, float, float]
SECONDS = (1e-9, 1e6)  # the least and the most that a step may take
USUAL = (1e-4, 5.0)  # and what a small one takes on any device

logger = logging.getLogger(__name__)


class Times(abc.ABC):
    """The seconds of an engine's steps, and what its KV cache has room for."""

    @abc.abstractmethod
    def seconds(
        self,
        num_tokens: int,  # that the step verifies or prefills
        drafted: bool,  # there are draft tokens among them
        num_context: int = 0,  # tokens in the KV cache of all its requests
        num_tokens_of_others: int = 0,  # of the other data-parallel ranks, which step at the same time
        num_rows: int = 0,  # requests in the step
    ) -> float:
        """The seconds of one step."""

    @property
    def kv_tokens(self) -> float:
        """Tokens that the KV cache of a data-parallel rank holds."""
        return math.inf

    def row_tokens(self, num_speculative_tokens: int) -> float:
        """Tokens that would fill what a running request takes of the KV cache beside its own; mostly 0."""
        return 0.0

    @property
    def without_drafter(self) -> Times:
        """The same engine's without a drafter."""
        return self


class StepTimes(Times):
    """The seconds of an engine step by its tokens; its context makes no difference.

    Between two points time grows linearly. Before the first point it is constant; after the last it goes on
    along the line through the last two. More tokens never take less time: where points say so, that is noise,
    and they are averaged.

    Args:
        points: (number of tokens, seconds, weight), in any order.
        drafted: the same for steps with draft tokens, if the engine runs other code for them.

    Raises UserError: there are no points, one is out of range, or two are of the same number of tokens.
    """

    def __init__(self, points: Iterable[_Point], drafted: Iterable[_Point] = ()) -> None:
        self._plain = _curve(points)
        drafted = list(drafted)
        self._drafted = _curve(drafted) if drafted else self._plain

    @classmethod
    def parse(cls, text: str) -> StepTimes:
        """Read tokens:seconds,... ("8:0.085,16:0.09"), or the JSON file that `bench engine` writes."""
        path = Path(text)
        if os.path.isfile(text):  # `Path.is_file` fails where the text is longer than a file's name
            try:
                return cls.of_rows(json.loads(path.read_text())["step_times"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(f"{path}: no step_times of `bench engine`: {error!r}") from None
        try:
            points = [(float(n), float(s), 1.0) for n, s in (point.split(":") for point in text.split(","))]
        except ValueError:
            raise UserError(f"step times {text!r}: neither a file nor tokens:seconds,...") from None
        times = cls(points)
        for doubt in _doubts(points):
            logger.warning("step times: %s", doubt)
        return times

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> StepTimes:
        """From num_tokens, seconds, num_steps and drafted; drafted steps stand for missing plain ones."""
        curves: dict[bool, list[_Point]] = {False: [], True: []}
        for row in rows:
            point = (float(row["num_tokens"]), float(row["seconds"]), float(row["num_steps"]))
            curves[bool(row["drafted"])].append(point)
        return cls(curves[False] or curves[True], curves[True])

    def seconds(self, num_tokens: int, drafted: bool, *_: int, **__: int) -> float:
        at, seconds = self._drafted if drafted else self._plain
        if num_tokens <= at[-1] or len(at) == 1:
            return float(np.interp(num_tokens, at, seconds))
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]))
        return float(seconds[-1] + slope * (num_tokens - at[-1]))


def _doubts(points: Iterable[_Point]) -> Iterator[str]:
    """What is unlikely in a table that somebody has typed."""
    at, seconds, _ = zip(*sorted(points), strict=True)
    if len(at) == 1:
        yield "there is one point, so more tokens take no more time"
    if list(seconds) != sorted(seconds):
        yield "more tokens take less time; this is taken for noise, and averaged"
    if not USUAL[0] <= seconds[0] <= USUAL[1]:
        yield f"{at[0]:g}:{seconds[0]:g} is an unlikely time: is the table in seconds?"


def _curve(points: Iterable[_Point]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    table = np.array(sorted(points), float).reshape(-1, 3)
    at, seconds, weights = table.T
    least, most = SECONDS
    fits = np.isfinite(table).all() and (at >= 1).all() and (weights > 0).all()
    if not len(at) or not fits or not ((least <= seconds) & (seconds <= most)).all():
        bounds = f"tokens from 1 and seconds from {least:g} to {most:g}"
        raise UserError(f"step times: need at least one point, {bounds}")
    if (twice := at[1:][at[1:] == at[:-1]]).size:
        raise UserError(f"step times: {twice[0]:g} tokens have more than one time")
    return at, isotonic_regression(seconds, weights=weights).x
