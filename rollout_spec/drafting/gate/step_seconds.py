"""What an engine step takes, learned from every step."""

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from rollout_spec.drafting.gate.step import EndedStep, Floats

MEMORY = 512  # steps after which what was measured has mostly faded
ODD = 1.5  # times as slow or as fast as expected: a step that was disturbed, or that of another engine
FIRST_STEPS = 8  # plain ones, mostly decoding, before anything is believed
ODD_STEPS = 8  # in a row: this is another engine
STEPS_PER_FIT = 8
DOUBT = 0.01  # the weight, in steps, of the belief that each of the columns below takes no time

_BENDS = 2.0 ** np.arange(3, 15)  # tokens
_KNOTS = np.array([0.0, *_BENDS, 2 * _BENDS[-1]])
_TENS, _HUNDRED_THOUSANDS = 0.1, 1e-5  # so that doubt weighs all columns alike


def _curve(num_tokens: int) -> Floats:
    """The columns of a step's tokens: a constant; their number, and by how much it exceeds each bend; which
    bends it exceeds."""
    slopes = np.maximum(0.0, num_tokens - _KNOTS[:-1]) * _TENS
    return np.concatenate([[1.0], slopes, num_tokens > _BENDS])


def _besides(step: EndedStep, num_verified: float | Floats, pads_drafts: bool) -> dict[str, float | Floats]:
    """The columns after those: what takes time besides, in a step or several that verify so many tokens."""
    rows, is_slower = step.num_rows * _TENS, step.has_drafts != pads_drafts
    return {
        "verified": num_verified * _TENS,
        "prompts": step.num_prompt_tokens * _TENS,
        "context": step.num_context * _HUNDRED_THOUSANDS,
        "slower code": is_slower,
        "slower code by rows": is_slower * rows,
        "passes": step.num_passes,
        "passes by rows": step.num_passes * rows,
    }


_NAMES = tuple(_besides(EndedStep(0), 0, False))
_NUM_COLUMNS = len(_curve(0)) + len(_NAMES)


class StepSeconds:
    """Seconds of a step, as the sum of the columns; none takes less than no time.

    A fit by non-negative least squares (Lawson and Hanson 1974) of relative errors, to sums that fade. So a
    step that was disturbed hardly counts, and one that was fast counts much. What is not seen any more fades
    towards taking no time, and so is tried again.

    Args:
        pads_drafts: plain steps run the slower code, not steps with drafts: padding is there for that.
    """

    def __init__(self, pads_drafts: bool = False) -> None:
        self._pads_drafts = pads_drafts
        self._forget()

    def _forget(self) -> None:
        self._squares, self._products = np.zeros((_NUM_COLUMNS, _NUM_COLUMNS)), np.zeros(_NUM_COLUMNS)
        self._believe(np.zeros(_NUM_COLUMNS))
        self._num_plain = self._num_steps = self._num_odd = 0

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen. Where prompts come all the time there may be no plain ones."""
        return self._num_plain >= FIRST_STEPS or self._num_steps >= MEMORY

    def expected(self, step: EndedStep, nums_verified: npt.ArrayLike) -> Floats:
        """Seconds of steps like this one, float64, if they verify so many tokens besides their prompts."""
        nums = np.asarray(nums_verified, float)
        all_tokens = nums + step.num_prompt_tokens
        curve = np.interp(all_tokens, _KNOTS, self._curve) + self._jumps[np.searchsorted(_BENDS, all_tokens)]
        besides = _besides(step, nums, self._pads_drafts)
        return np.asarray(curve + sum(amount * self._found[name] for name, amount in besides.items()))

    def expected_pass(self, num_rows: int) -> float:
        """Seconds of one pass of a model over so many rows."""
        return self._found["passes"] + self._found["passes by rows"] * num_rows * _TENS

    def learn(self, step: EndedStep, seconds: float) -> float:
        """The step took so long; returns what was expected, 0.0 if nothing was known."""
        num_verified = step.num_tokens - step.num_prompt_tokens
        expected = float(self.expected(step, num_verified))
        odd = int(seconds > ODD * expected) - int(seconds < expected / ODD) if expected else 0
        self._num_odd = odd * (1 + max(0, odd * self._num_odd))  # in a row; negative: fast ones
        if abs(self._num_odd) == ODD_STEPS:
            self._forget()
        besides = _besides(step, num_verified, self._pads_drafts)
        columns = np.array([*_curve(step.num_tokens), *besides.values()]) / seconds
        # At first it forgets sooner: engines start slowly.
        keep = 1.0 - 1.0 / min(max(self._num_steps / 2, FIRST_STEPS), MEMORY)
        self._squares = keep * self._squares + columns[:, None] * columns
        self._products = keep * self._products + columns
        self._num_steps += 1
        self._num_plain += not (step.has_drafts or odd) and step.num_prompt_tokens <= num_verified
        if self._num_steps < 2 * FIRST_STEPS or self._num_steps % STEPS_PER_FIT == 0:
            self._fit()
        return expected

    def _fit(self) -> None:
        """To all that was learned. Doubt is relative too."""
        doubt = np.full(_NUM_COLUMNS, DOUBT * self._squares[0, 0] / min(self._num_steps, MEMORY))
        doubt[0] /= 100  # a step takes some time
        try:
            root = np.linalg.cholesky(self._squares + np.diag(doubt))
            found = nnls(root.T, np.linalg.solve(root, self._products))[0]
        except (np.linalg.LinAlgError, RuntimeError):  # by rounding: the last fit stays until the next one
            return
        self._believe(found)

    def _believe(self, seconds: Floats) -> None:
        """Take over the seconds of all columns."""
        constant, slopes, jumps, besides = np.split(seconds, np.cumsum([1, len(_BENDS) + 1, len(_BENDS)]))
        pieces = np.cumsum(np.cumsum(slopes) * _TENS * np.diff(_KNOTS))
        self._curve = constant + np.concatenate([[0.0], pieces])
        self._jumps = np.concatenate([[0.0], np.cumsum(jumps)])
        self._found = dict(zip(_NAMES, besides.tolist(), strict=True))
