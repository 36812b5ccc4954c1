"""How long an engine step takes, measured while the engine runs: seconds by verified tokens and context."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Costs bend where a kernel's tile or a captured CUDA graph is full: at about these numbers of tokens.
KNOTS = np.array(sorted({1, 2, 3} | {2**i for i in range(2, 16)} | {3 * 2**i for i in range(1, 14)}), float)
ENOUGH = 4  # measurements that make a knot known
MEMORY = 64  # measurements after which a knot has mostly forgotten what it was
UNKNOWN_GROWTH = 0.5  # twice the tokens cost sqrt(2) times as long, until they are measured

_Floats = npt.NDArray[np.float64]


class StepCost:
    """Seconds of a step as a function of the tokens it verifies, a curve that never falls.

    A knot holds the mean time of the steps near it and the mean context they had; the seconds that a token of
    context costs are one slope for all knots (an analysis of covariance). What falls from knot to knot is
    noise and is averaged out. Between the measured knots the time is interpolated in logarithms, and beyond
    them it grows with the root of the number of tokens.
    """

    def __init__(self) -> None:
        self._seconds = np.zeros(len(KNOTS))
        self._contexts = np.zeros(len(KNOTS))
        self._weights = np.zeros(len(KNOTS))
        self._covariance = self._variance = 0.0

    @property
    def is_known(self) -> bool:
        return bool(self._weights.any())

    def unmeasured_above(self, num_tokens: int) -> int | None:
        """The next knot above that many tokens, if it was hardly ever measured."""
        knot = int(np.searchsorted(KNOTS, num_tokens, side="right"))
        hardly = knot < len(KNOTS) and self._weights[knot] < ENOUGH
        return int(KNOTS[knot]) if hardly else None

    def learn(self, num_tokens: int, num_context: int, seconds: float) -> None:
        """One step took this long.

        Args:
            num_tokens: tokens verified, draft tokens included.
            num_context: tokens in all rows of the step.
        """
        if self.is_known:
            # A pause of the process must not pass for the cost of a step; a lasting change comes through.
            seconds = min(seconds, 3.0 * self.seconds(np.array([num_tokens]), num_context)[0])
        position = np.interp(num_tokens, KNOTS, np.arange(len(KNOTS)))
        left = min(int(position), len(KNOTS) - 2)
        for knot, share in ((left, left + 1 - position), (left + 1, position - left)):
            if share > 0.0:
                self._learn_knot(knot, float(share), num_context, seconds)

    def _learn_knot(self, knot: int, share: float, num_context: int, seconds: float) -> None:
        if self._weights[knot] > 0.0:
            more_context = num_context - self._contexts[knot]
            keep = 1.0 - share / (4 * MEMORY)
            self._variance = keep * self._variance + share * more_context**2
            self._covariance = keep * self._covariance + share * more_context * (
                seconds - self._seconds[knot]
            )
        self._weights[knot] = min(self._weights[knot] + share, float(MEMORY))
        rate = share / self._weights[knot]
        self._seconds[knot] += rate * (seconds - self._seconds[knot])
        self._contexts[knot] += rate * (num_context - self._contexts[knot])

    def seconds(self, nums_tokens: npt.ArrayLike, num_context: int) -> _Floats:
        """float64, the shape of `nums_tokens`. At least one step must have been learned."""
        known = self._weights > 0.0
        slope = max(0.0, self._covariance / self._variance) if self._variance > 0.0 else 0.0
        of_context = slope * (num_context - self._contexts[known])
        times = np.maximum(self._seconds[known] + of_context, 0.1 * self._seconds[known])
        at, times = np.log(KNOTS[known]), np.log(never_falling(times, self._weights[known]))
        wanted = np.log(np.asarray(nums_tokens, float))
        outside = np.minimum(wanted - at[0], 0.0) + np.maximum(wanted - at[-1], 0.0)
        return np.exp(np.interp(wanted, at, times) + UNKNOWN_GROWTH * outside)


def never_falling(values: npt.ArrayLike, weights: npt.ArrayLike) -> _Floats:
    """Isotonic regression by pooling adjacent violators (Barlow et al. 1972); [n], as both arguments."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(np.asarray(values), np.asarray(weights), strict=True):
        pool = (float(value), float(weight), 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, mass, length = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, length + pool[2])
        pools.append(pool)
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])
