"""When to draft, and how much: speculation pays in the long tail, when few requests are left running.

A gate is asked twice in an engine step: `begin`, before anything is drafted, gives the price below which no
token is proposed (None: no drafts in this step); `choose` then keeps the tokens that pay.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rollout_spec.drafting.guard import Guard
from rollout_spec.drafting.step_cost import MAX_SLOWNESS, StepCost
from rollout_spec.metrics import EngineCounters

# Steps in a row that must agree before a gate opens or closes: a single arrival must not flip it.
HYSTERESIS_STEPS = 4

# The automatic gate. Steps are engine steps.
PROBE_EVERY = 32  # steps with drafts, after which one goes without, to measure a plain step
EXPLORE_EVERY = 16  # steps, after which a budget may go up to a number of tokens hardly measured yet
LOOK_EVERY = 8  # steps of a closed gate, of which one asks for drafts, to see whether they would pay
NUM_FIRST_STEPS = 4  # measured without drafts before the first draft
MIN_PRICE = 0.02  # a draft token less likely than this is never proposed
GAIN_MEMORY = 128  # steps after which gain and calibration have mostly forgotten what was
PRIOR_TOKENS = 8.0  # the weight of the belief that what is promised comes true
# Without drafts, steps in which two thirds of the belief in what they cost are lost.
MIN_FORGET_STEPS, MAX_FORGET_STEPS = 64, 256

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]


class Step(NamedTuple):
    """An engine step that has ended."""

    num_rows: int
    """Rows that got tokens in it, the decoding ones; a partial prefill is none."""
    num_context: int = 0
    """Tokens that these rows have now."""
    num_new_tokens: int = 0
    """Tokens that they got."""
    seconds: float | None = None
    """How long it took; None where it cannot be compared: other rows than before, or a prefill among them."""


class Gate(Protocol):
    weighs_costs: bool
    """Whether it reads more of a step than its rows."""

    def begin(self, step: Step, counters: EngineCounters) -> float | None:
        """The least survival at which a token is drafted now; None: draft nothing."""

    def choose(self, survivals: _Float32, numbers: _Int32, counters: EngineCounters) -> _Int32:
        """How much of each draft to verify.

        Args:
            survivals: float32 [n, K], of the draft up to and with this token; falling along a row.
            numbers: int32 [n], draft tokens of each row.

        Returns:
            int32 [n], at most `numbers`.
        """


def make_gate(batch_threshold: int | str) -> Gate:
    """The gate that `rollout.spec.batch_threshold` describes: a number of rows, or auto."""
    return AutoGate() if isinstance(batch_threshold, str) else FixedGate(batch_threshold)


class FixedGate:
    """A fixed threshold on the number of decoding requests (the CANN recipe's rule), with hysteresis.

    Args:
        batch_threshold: draft while at most this many requests decode; 0 never drafts.
    """

    weighs_costs = False

    def __init__(self, batch_threshold: int) -> None:
        self._batch_threshold = batch_threshold
        self._is_open: bool | None = None
        self._num_against = 0

    def begin(self, step: Step, counters: EngineCounters) -> float | None:
        says_open = step.num_rows <= self._batch_threshold
        self._num_against = 0 if says_open == self._is_open else self._num_against + 1
        if self._is_open is None or self._num_against >= HYSTERESIS_STEPS:
            self._is_open, self._num_against = says_open, 0
        if self._is_open:
            return 0.0
        counters.num_steps_off_threshold += 1
        return None

    def choose(self, survivals: _Float32, numbers: _Int32, counters: EngineCounters) -> _Int32:
        return numbers


class AutoGate:
    """Drafts where the expected gain is more than the measured cost.

    The time of a step is learned while the engine runs, apart for steps with and without drafts (engines run
    them through different code). A draft token pays while its survival is more than what its time would give
    elsewhere: seconds of the token x tokens per second. So a step's budget goes, over all rows, to the tokens
    most likely to be accepted. What a draft promises is corrected by what came true. A guard stands beside
    this model.
    """

    weighs_costs = True

    def __init__(self) -> None:
        self._plain, self._drafted = StepCost(), StepCost()
        self._num_plain = 0
        self._last: Step | None = None
        self._num_chosen = 0  # draft tokens that the step now running verifies
        self._promised = 0.0  # of these, what their survivals promise; uncorrected
        self._expected_seconds = 0.0
        self._least_verified = MIN_PRICE  # the least survival in the latest budget
        self._steps_since_plain = self._steps_since_draft = self._steps_since_explored = 0
        self._closed_at: int | None = None  # rows at which no draft paid
        self._num_refused = 0  # steps in a row in which none did
        # Decayed sums: what steps took, and what plain ones would have for the same tokens
        self._seconds = self._plain_seconds = 0.0
        # likewise: draft tokens promised to be accepted, and accepted
        self._num_promised = self._num_accepted = PRIOR_TOKENS
        self._guard = Guard()
        self._forget_steps = MIN_FORGET_STEPS
        self._since_open = (0.0, 0.0)  # seconds of steps with drafts, and of plain steps for the same tokens

    def begin(self, step: Step, counters: EngineCounters) -> float | None:
        self._learn(step, counters)
        self._last, self._num_chosen = step, 0
        self._steps_since_plain += 1
        self._steps_since_draft += 1
        num_stops = counters.num_guard_stops
        is_blocked = self._guard.blocks(step.num_rows, counters)
        if counters.num_guard_stops > num_stops:
            # What made drafts dear may be over after the pause: forget what they cost, and try.
            self._drafted = StepCost()
            self._closed_at, self._num_refused = None, 0
        if is_blocked:
            counters.num_steps_off_guard += 1
            return None
        if self._num_plain < NUM_FIRST_STEPS or self._steps_since_plain > PROBE_EVERY:
            counters.num_steps_off_probe += 1
            return None
        if self._closed_at is not None:
            # What made drafts dear may be over.
            self._drafted.forget(1.0 / self._forget_steps)
            # With more rows a token costs more, so what was too dear is so still.
            if 10 * step.num_rows >= 9 * self._closed_at and self._steps_since_draft % LOOK_EVERY:
                counters.num_steps_off_cost += 1
                return None
        return max(MIN_PRICE, self._least_verified / 2)

    def choose(self, survivals: _Float32, numbers: _Int32, counters: EngineCounters) -> _Int32:
        assert self._last is not None, "begin comes first"
        if not numbers.any():
            return numbers
        is_draft = np.arange(survivals.shape[1]) < numbers[:, None]
        sorted_survivals = np.sort(survivals[is_draft])[::-1].astype(float)
        num = self._best_budget(sorted_survivals * self._calibration)
        if num == 0:
            self._num_refused += 1
            if self._num_refused >= HYSTERESIS_STEPS:
                self._close(self._last.num_rows)
            counters.num_steps_off_cost += 1
            self._least_verified = max(MIN_PRICE, self._least_verified / 2)
            return np.zeros_like(numbers)
        self._closed_at, self._num_refused = None, 0
        num = self._explored(num, len(sorted_survivals))
        self._least_verified = float(sorted_survivals[num - 1])
        chosen = ((survivals >= np.float32(self._least_verified)) & is_draft).sum(axis=1).astype(np.int32)
        self._num_chosen = int(chosen.sum())
        self._steps_since_draft = 0
        num_rows, num_context = self._last.num_rows, self._last.num_context
        self._promised = float(sorted_survivals[: self._num_chosen].sum())
        self._expected_seconds = float(self._costs(np.array([num_rows + self._num_chosen]), num_context)[0])
        return chosen

    def _close(self, num_rows: int) -> None:
        """Draft no more, until a look shows that drafts would pay."""
        self._closed_at = num_rows
        taken, plain = self._since_open
        if taken > 0.0:
            # The more often drafts have lost, the longer that is remembered.
            self._forget_steps = (
                min(2 * self._forget_steps, MAX_FORGET_STEPS) if taken > plain else MIN_FORGET_STEPS
            )
        self._since_open = (0.0, 0.0)

    @property
    def _calibration(self) -> float:
        return self._num_accepted / self._num_promised

    def _best_budget(self, survivals: npt.NDArray[np.float64]) -> int:
        """How many draft tokens to verify; survivals of all rows' draft tokens, the largest first."""
        assert self._last is not None
        num_rows, num_context = self._last.num_rows, self._last.num_context
        plain = float(self._plain.seconds(num_rows, num_context))
        gain = max(1.0, self._plain_seconds / self._seconds) if self._seconds > 0.0 else 1.0
        costs = self._costs(num_rows + 1 + np.arange(len(survivals)), num_context)
        net_gains = np.cumsum(survivals) - gain * num_rows / plain * (costs - plain)
        best = int(np.argmax(net_gains))
        return best + 1 if net_gains[best] > 0.0 else 0

    def _explored(self, num: int, most: int) -> int:
        """A budget of `num` draft tokens, or now and then one that shows what the next larger would cost."""
        assert self._last is not None
        self._steps_since_explored += 1
        knot = self._drafted.unmeasured_above(self._last.num_rows + num)
        if num == most or self._steps_since_explored < EXPLORE_EVERY or knot is None:
            return num
        self._steps_since_explored = 0
        return min(most, knot - self._last.num_rows)

    def _costs(self, nums_tokens: npt.NDArray[np.int64], num_context: int) -> npt.NDArray[np.float64]:
        """Seconds of steps with drafts, never less than a plain one."""
        assert self._last is not None
        plain = float(self._plain.seconds(self._last.num_rows, num_context))
        costs = self._drafted.seconds_from(self._last.num_rows, plain, nums_tokens, num_context)
        return np.maximum(costs, plain)

    def _learn(self, step: Step, counters: EngineCounters) -> None:
        """From the step that has ended, which verified what was chosen after the one before."""
        last = self._last
        if last is None or step.seconds is None:
            return
        num_rows, num_context = step.num_rows, last.num_context
        if self._num_chosen == 0:
            if self._num_plain > 0:
                self._guard.learn_plain(step.seconds / float(self._plain.seconds(num_rows, num_context)))
            seconds = self._plain.learn(num_rows, num_context, step.seconds)
            self._num_plain += 1
            self._steps_since_plain = 0
            self._remember(seconds, seconds, 0.0, 0)
            return
        self._drafted.learn(num_rows + self._num_chosen, num_context, step.seconds)
        seconds = min(step.seconds, MAX_SLOWNESS * self._expected_seconds)
        seconds_per_token = float(self._plain.seconds(num_rows, num_context)) / num_rows
        plain_seconds = seconds_per_token * step.num_new_tokens
        counters.gate_seconds += seconds
        counters.gate_plain_seconds += plain_seconds
        counters.gate_expected_seconds += self._expected_seconds
        expected_tokens = num_rows + self._promised * self._calibration
        counters.gate_expected_plain_seconds += seconds_per_token * expected_tokens
        self._remember(seconds, plain_seconds, self._promised, step.num_new_tokens - num_rows)
        self._since_open = (self._since_open[0] + seconds, self._since_open[1] + plain_seconds)
        self._guard.learn_drafted(seconds, plain_seconds)

    def _remember(self, seconds: float, plain_seconds: float, promised: float, num_accepted: int) -> None:
        forgotten = 1.0 / GAIN_MEMORY
        keep = 1.0 - forgotten
        self._seconds = keep * self._seconds + seconds
        self._plain_seconds = keep * self._plain_seconds + plain_seconds
        # Without drafts the correction fades, or what once broke its promise would never be tried again.
        self._num_promised = keep * self._num_promised + forgotten * PRIOR_TOKENS + promised
        self._num_accepted = keep * self._num_accepted + forgotten * PRIOR_TOKENS + num_accepted
