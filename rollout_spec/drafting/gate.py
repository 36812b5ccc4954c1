"""When to draft, and how much: speculation pays in the long tail, when few requests are left running.

A gate is asked twice in an engine step: `begin`, before anything is drafted, gives the price below which no
token is proposed (None: no drafts in this step); `choose` then keeps the tokens that pay.
"""

from __future__ import annotations

from collections import Counter, deque
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
NUM_TRIES = 3  # of a number of tokens that by a guess does not pay
NUM_FIRST_STEPS = 4  # measured without drafts before the first draft
MIN_PRICE = 0.02  # a draft token less likely than this is never proposed
GAIN_MEMORY = 128  # steps after which gain and calibration have mostly forgotten what was
PRIOR_TOKENS = 8.0  # the weight of the belief that what is promised comes true
# Without drafts, steps in which two thirds of the belief in what they cost are lost.
MIN_FORGET_STEPS, MAX_FORGET_STEPS = 64, 256

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]


class Ranks(NamedTuple):
    """What every data-parallel rank of a mixture of experts knows of all of them, which step together."""

    num_steps: int
    """So far, with those that a rank runs without requests."""
    most_tokens: int
    """Tokens of the rank that verified most in the step."""


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
    ranks: Ranks | None = None
    """None: the engine core steps by itself."""


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

    def discard(self) -> None:
        """What was chosen is not verified: the step that runs is a plain one."""


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

    def discard(self) -> None:
        pass


class AutoGate:
    """Drafts where the expected gain is more than the measured cost.

    The time of a step is learned while the engine runs, apart for steps with and without drafts (engines run
    them through different code). A draft token pays while its survival is more than what its time would give
    elsewhere: seconds of the token x tokens per second. So a step's budget goes, over all rows, to the tokens
    most likely to be accepted. What a draft promises is corrected by what came true. A guard stands beside
    this model.

    Ranks that step together take as long as the one that verifies most. Each decides by itself, as if the
    others did as it does. All go without drafts in the same steps: what a rank alone would take for a plain
    step would hold the drafts of the others, so that drafts seemed to cost nothing.
    """

    weighs_costs = True

    def __init__(self) -> None:
        self._plain, self._drafted = StepCost(), StepCost()
        self._num_plain = 0
        self._last: Step | None = None
        self._is_probe = False  # the step now running is one in which all ranks go without drafts
        # Most tokens of a rank over this one's rows. At least one of these steps was without drafts, and
        # hardly all held a prefill: the least says how many times as many rows the fullest rank has.
        self._tokens_per_row: deque[float] = deque(maxlen=PROBE_EVERY + 1)
        self._num_chosen = 0  # draft tokens that the step now running verifies
        self._promised = 0.0  # of these, what their survivals promise; uncorrected
        self._expected_seconds = 0.0
        self._least_verified = MIN_PRICE  # the least survival in the latest budget
        self._steps_since_plain = self._steps_since_draft = self._steps_since_explored = 0
        self._closed_at: int | None = None  # rows at which no draft paid
        self._nums_tried = Counter[int]()  # by numbers of tokens
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
        if step.ranks is not None:
            self._tokens_per_row.append(step.ranks.most_tokens / step.num_rows)
        self._last, self._num_chosen = step, 0
        self._steps_since_plain += 1
        self._steps_since_draft += 1
        num_stops = counters.num_guard_stops
        is_blocked = self._guard.blocks(step.num_rows, counters)
        if counters.num_guard_stops > num_stops:
            # What made drafts dear may be over after the pause: forget what they cost, and try.
            self._drafted = StepCost()
            self._closed_at, self._num_refused = None, 0
        self._is_probe = self._must_probe(step)
        if is_blocked:
            counters.num_steps_off_guard += 1
            return None
        if self._is_probe:
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

    def _must_probe(self, step: Step) -> bool:
        if self._num_plain < NUM_FIRST_STEPS:
            return True
        if step.ranks is None:
            return self._steps_since_plain > PROBE_EVERY
        return step.ranks.num_steps % (PROBE_EVERY + 1) == 0

    def choose(self, survivals: _Float32, numbers: _Int32, counters: EngineCounters) -> _Int32:
        assert self._last is not None, "begin comes first"
        if not numbers.any():
            return numbers
        is_draft = np.arange(survivals.shape[1]) < numbers[:, None]
        sorted_survivals = np.sort(survivals[is_draft])[::-1].astype(float)
        num = self._explored(self._best_budget(sorted_survivals * self._calibration), len(sorted_survivals))
        if num == 0:
            self._num_refused += 1
            if self._num_refused >= HYSTERESIS_STEPS:
                self._close(self._last.num_rows)
            counters.num_steps_off_cost += 1
            self._least_verified = max(MIN_PRICE, self._least_verified / 2)
            return np.zeros_like(numbers)
        self._closed_at, self._num_refused = None, 0
        self._least_verified = float(sorted_survivals[num - 1])
        chosen = ((survivals >= np.float32(self._least_verified)) & is_draft).sum(axis=1).astype(np.int32)
        self._num_chosen = int(chosen.sum())
        self._steps_since_draft = 0
        self._promised = float(sorted_survivals[: self._num_chosen].sum())
        self._expected_seconds = float(self._costs(np.array([self._num_chosen]))[0])
        return chosen

    def discard(self) -> None:
        self._num_chosen = 0

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
        gain = max(1.0, self._plain_seconds / self._seconds) if self._seconds > 0.0 else 1.0
        costs, plain = self._costs(1 + np.arange(len(survivals))), self._plain_cost
        num_rows = self._most_rows(self._last.num_rows)
        net_gains = np.cumsum(survivals) - gain * num_rows / plain * (costs - plain)
        best = int(np.argmax(net_gains))
        return best + 1 if net_gains[best] > 0.0 else 0

    def _explored(self, num: int, most: int) -> int:
        """A budget of `num` draft tokens, or now and then one that shows what the next larger would cost.

        Where none pays by a guess, the guess is tried at once: an engine's first drafts seem dear.
        """
        assert self._last is not None
        self._steps_since_explored += 1
        knot = self._drafted.unmeasured_above(self._last.num_rows + num)
        if num == most or knot is None:
            return num
        if num == 0:
            if self._nums_tried[knot] == NUM_TRIES:
                return 0
            self._nums_tried[knot] += 1
        elif self._steps_since_explored < EXPLORE_EVERY:
            return num
        self._steps_since_explored = 0
        return min(most, knot - self._last.num_rows)

    def _most_rows(self, num_rows: int) -> int:
        """Rows of the fullest rank, while this one has so many: no rank's step is shorter than its."""
        ratios = self._tokens_per_row
        return round(max(1.0, min(ratios)) * num_rows) if len(ratios) == ratios.maxlen else num_rows

    @property
    def _plain_cost(self) -> float:
        """Seconds of a plain step."""
        assert self._last is not None
        return float(self._plain.seconds(self._most_rows(self._last.num_rows), self._last.num_context))

    def _costs(self, nums_draft_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds of steps with so many draft tokens, never less than a plain one."""
        assert self._last is not None
        num_rows, plain = self._most_rows(self._last.num_rows), self._plain_cost
        nums_tokens = np.maximum(num_rows, self._last.num_rows + nums_draft_tokens)
        costs = self._drafted.seconds_from(num_rows, plain, nums_tokens, self._last.num_context)
        return np.maximum(costs, plain)

    def _learn(self, step: Step, counters: EngineCounters) -> None:
        """From the step that has ended, which verified what was chosen after the one before."""
        last = self._last
        if last is None or step.seconds is None:
            return
        num_tokens = step.num_rows + self._num_chosen
        is_plain = self._num_chosen == 0
        if step.ranks is not None:
            num_tokens = step.ranks.most_tokens
            is_plain = self._is_probe
        if is_plain:
            self._learn_plain(num_tokens, last.num_context, step)
            return
        if self._drafted.was_cold(num_tokens):
            return
        if self._num_chosen:
            self._learn_gain(last, num_tokens, step, counters)
        if num_tokens > self._most_rows(step.num_rows):
            self._drafted.learn(num_tokens, last.num_context, step.seconds)

    def _learn_plain(self, num_tokens: int, num_context: int, step: Step) -> None:
        assert step.seconds is not None
        if self._num_plain > 0:
            self._guard.learn_plain(step.seconds / float(self._plain.seconds(num_tokens, num_context)))
        seconds = self._plain.learn(num_tokens, num_context, step.seconds)
        self._num_plain += 1
        self._steps_since_plain = 0
        self._remember(seconds, seconds, 0.0, 0)

    def _learn_gain(self, last: Step, num_tokens: int, step: Step, counters: EngineCounters) -> None:
        """From a step with drafts, in which a rank verified num_tokens.

        Of a step in which another one verified more counts what it would have taken otherwise.
        """
        assert step.seconds is not None
        num_rows, seconds = step.num_rows, step.seconds
        if num_tokens > num_rows + self._num_chosen:
            seconds *= self._expected_seconds / float(self._costs(np.array([num_tokens - num_rows]))[0])
        seconds = min(seconds, MAX_SLOWNESS * self._expected_seconds)
        plain = float(self._plain.seconds(self._most_rows(num_rows), last.num_context))
        seconds_per_token = plain / num_rows
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
