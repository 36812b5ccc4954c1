"""How long an engine step takes, measured while the engine runs: seconds by verified tokens and context."""

import numpy as np
import numpy.typing as npt

# Costs bend where a kernel's tile or a captured CUDA graph is full: at about these numbers of tokens.
KNOTS = np.array(sorted({1, 2, 3} | {2**i for i in range(2, 16)} | {3 * 2**i for i in range(1, 14)}), float)
_KNOTS: list[float] = KNOTS.tolist()
ENOUGH = 4  # measurements that make a knot known; as many near it may be cold
MEMORY = 64  # measurements after which a knot has mostly forgotten what it was
LEAST_WEIGHT = 0.25  # with less, of forgotten measurements, a knot is not known any more
LEAST_SPREAD = 0.01  # of squared contexts: while few were seen, what looks like their cost may be noise
LEAST_SHARE = 0.75  # of a knot's time that a step takes at least, whatever the context
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
        self._sizes: set[int] = set()  # numbers of tokens that have been verified
        self._nums_cold = np.zeros(len(KNOTS), int)

    def was_cold(self, num_tokens: int) -> bool:
        """Whether a step says nothing of later ones, being the first of its size: kernels are made then.

        Only the first few of the many sizes near one knot pass for cold, or it would never be known.
        """
        knot = int(np.searchsorted(KNOTS, num_tokens, side="right")) - 1
        if num_tokens in self._sizes or self._nums_cold[knot] == ENOUGH:
            return False
        self._sizes.add(num_tokens)
        self._nums_cold[knot] += 1
        return True

    def learn(self, num_tokens: int, num_context: int, seconds: float) -> None:
        """A step that verified `num_tokens`, draft tokens included, took this long; num_context: tokens in
        all rows."""
        position = np.interp(num_tokens, KNOTS, np.arange(len(KNOTS)))
        left = min(int(position), len(KNOTS) - 2)
        for knot, share in ((left, left + 1 - position), (left + 1, position - left)):
            if share > 0.0:
                # Fewer tokens than these take less; more may take as long.
                there = seconds * min(1.0, KNOTS[knot] / num_tokens) ** UNKNOWN_GROWTH
                self._learn_knot(knot, float(share), num_context, there)

    def forget(self, share: float) -> None:
        """Believe what was measured so far less, by this share: for where nothing is measured any more."""
        # However much was measured, ENOUGH is: it must not take a thousand steps to be doubted.
        self._weights = np.minimum(self._weights, ENOUGH) * (1.0 - share)

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
        times = never_falling(self._at_knots(num_context)[known], self._weights[known])
        return _interpolated(nums_tokens, KNOTS[known], times)

    def seconds_from(
        self, num_tokens: int, seconds: float, nums_tokens: npt.ArrayLike, num_context: int
    ) -> _Floats:
        """As `seconds`, for steps of at least `num_tokens` tokens, which take at least `seconds` seconds.

        A time that was measured once counts half; the other half is a guess from the time of fewer tokens.
        A time that was never measured lies between its neighbours.
        """
        below = int(np.searchsorted(KNOTS, num_tokens, side="right")) - 1
        measured, weights = self._at_knots(num_context).tolist(), self._weights.tolist()
        at: list[float] = []
        times: list[float] = []
        masses: list[float] = []
        for knot in range(below, len(KNOTS)):
            if at and weights[knot] < LEAST_WEIGHT:
                continue
            tokens = _KNOTS[knot] if at else float(num_tokens)
            guess = times[-1] * _growth(tokens / at[-1]) if at else seconds
            share = 1.0 / (1.0 + weights[knot] ** 2)
            times.append(share * guess + (1.0 - share) * measured[knot] * _growth(tokens / _KNOTS[knot]))
            at.append(tokens)
            masses.append(weights[knot] + 1.0)
        return _interpolated(nums_tokens, at, never_falling(times, masses))

    def _at_knots(self, num_context: int) -> _Floats:
        """Seconds at each knot with that much context; without meaning where the knot has no weight.

        With far less context than a knot has seen, as when most rows have ended, the slope is extrapolated
        and would promise steps that take no time: a step keeps LEAST_SHARE of the knot's.
        """
        spread = self._variance + LEAST_SPREAD * num_context**2
        slope = max(0.0, self._covariance / spread) if spread > 0.0 else 0.0
        of_context = slope * (num_context - self._contexts)
        return np.maximum(self._seconds + of_context, LEAST_SHARE * self._seconds)


def _growth(times_the_tokens: float) -> float:
    return float(times_the_tokens**UNKNOWN_GROWTH)


def _interpolated(nums_tokens: npt.ArrayLike, at: npt.ArrayLike, times: npt.ArrayLike) -> _Floats:
    """In logarithms, and beyond the points as UNKNOWN_GROWTH says."""
    points, values, wanted = (np.log(np.asarray(x, float)) for x in (at, times, nums_tokens))
    outside = np.minimum(wanted - points[0], 0.0) + np.maximum(wanted - points[-1], 0.0)
    return np.exp(np.interp(wanted, points, values) + UNKNOWN_GROWTH * outside)


def never_falling(values: npt.ArrayLike, weights: npt.ArrayLike) -> _Floats:
    """Isotonic regression by pooling adjacent violators (Barlow et al. 1972); [n], as both arguments."""
    values = np.asarray(values)
    if (values[1:] > values[:-1]).all():
        return values
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), np.asarray(weights).tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, mass, length = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, length + pool[2])
        pools.append(pool)
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])
