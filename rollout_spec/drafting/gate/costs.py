"""What engine steps take and what drafts give, learned while the engine runs."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.drafting.gate.passes import Passes
from rollout_spec.drafting.gate.step_cost import ENOUGH, MAX_SLOWNESS, StepCost
from rollout_spec.metrics import EngineCounters

PROBE_EVERY = 32  # steps with drafts, after which one goes without, to measure a plain step
FILLED_PROBE_EVERY = 1024  # the same where drafts are filled up: a plain step has no graph, and may take long
EXPLORE_EVERY = 16  # steps, after which a budget goes up to what was hardly measured, or a closed gate looks
NUM_TRIES = 3  # of a number of tokens that by a guess does not pay
FILLED_NUM_TRIES = 12  # the same where drafts are filled up: the guess is of many more tokens, and far off
GAIN_MEMORY = 128  # steps after which gain and calibration have mostly forgotten what was
PRIOR_TOKENS = 8.0  # the weight of the belief that what is promised comes true


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
    num_passes: int = 0
    """Tokens that a model has drafted in it for every row."""


class Choice(NamedTuple):
    """Draft tokens that a step verifies."""

    num_tokens: int
    promised: float
    """Of these, what their survivals promise; uncorrected."""
    expected_seconds: float


NOTHING = Choice(0, 0.0, 0.0)


class Measured(NamedTuple):
    drafted: bool
    seconds: float
    plain_seconds: float
    """That plain steps would have taken for the same tokens."""


class Costs:
    """Seconds of plain steps and of steps with drafts, apart: engines run them through different code.

    Both hold a model's passes. What one of them takes `passes` learns.

    What a draft promises is corrected by what came true. Ranks that step together take as long as the one
    that verifies most. Each decides by itself, as if the others did as it does. All go without drafts in the
    same steps: what a rank alone would take for a plain step would hold the drafts of the others, so that
    drafts seemed to cost nothing.

    Args:
        fill_to: draft tokens of every row in a step with drafts, where they are filled up; else 0.
    """

    def __init__(self, fill_to: int, passes: Passes) -> None:
        self._fill_to, self._passes = fill_to, passes
        self._plain, self._drafted = StepCost(), StepCost()
        self._num_plain = self._steps_since_plain = self._steps_since_explored = 0
        self._nums_tried = Counter[int]()  # by numbers of tokens
        self._step: Step | None = None
        self.is_probe = False  # the step now running is a plain one, to be measured; of all ranks
        # Most tokens of a rank over this one's rows. At least one of these steps was without drafts, and
        # hardly all held a prefill: the least says how many times as many rows the fullest rank has.
        self._tokens_per_row: deque[float] = deque(maxlen=PROBE_EVERY + 1)
        # Decayed: seconds of steps, of plain ones for the same tokens; draft tokens promised, and accepted
        self._sums = np.zeros(4)

    @property
    def step(self) -> Step:
        """The one that ended last."""
        assert self._step is not None, "learn comes first"
        return self._step

    @property
    def gain(self) -> float:
        """Of late, times the speed without drafts; at least 1."""
        seconds, plain_seconds = self._sums[:2]
        return max(1.0, float(plain_seconds / seconds)) if seconds > 0.0 else 1.0

    @property
    def calibration(self) -> float:
        """Of what survivals promise, how much came true of late."""
        return float((PRIOR_TOKENS + self._sums[3]) / (PRIOR_TOKENS + self._sums[2]))

    @property
    def most_rows(self) -> int:
        return self._most_rows(self.step.num_rows)

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain step."""
        return self._plain_seconds(self.step.num_rows, self.step.num_context)

    def _plain_seconds(self, num_rows: int, num_context: int) -> float:
        return float(self._plain.seconds(self._most_rows(num_rows), num_context))

    def num_verified(self, num_draft_tokens: int) -> int:
        """Draft tokens that a step verifies for so many that are drafted."""
        return self.step.num_rows * self._fill_to or num_draft_tokens

    def drafted_seconds(self, nums_draft_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds of steps with so many draft tokens, never less than a plain one."""
        num_rows, plain = self.most_rows, self.plain_seconds
        if self._fill_to:
            nums_draft_tokens = np.full_like(nums_draft_tokens, self.num_verified(0))
        nums_tokens = np.maximum(num_rows, self.step.num_rows + nums_draft_tokens)
        costs = self._drafted.seconds_from(num_rows, plain, nums_tokens, self.step.num_context)
        return np.maximum(costs, plain)

    def doubt_drafts(self, share: float) -> None:
        """Believe what drafts cost so far less, by this share; 1: forget it."""
        if share == 1.0:
            self._drafted = StepCost()
        self._drafted.forget(share)

    def explored(self, num: int, most: int) -> int:
        """A budget of `num` draft tokens, or now and then one that shows what the next larger would cost.

        Where none pays by a guess, the guess is tried at once: an engine's first drafts seem dear.
        """
        self._steps_since_explored += 1
        knot = self._drafted.unmeasured_above(self.step.num_rows + num)
        if num == most or knot is None:
            return num
        if num == 0:
            if self._nums_tried[knot] == (FILLED_NUM_TRIES if self._fill_to else NUM_TRIES):
                return 0
            self._nums_tried[knot] += 1
        elif self._steps_since_explored < EXPLORE_EVERY:
            return num
        self._steps_since_explored = 0
        return min(most, knot - self.step.num_rows)

    def learn(self, step: Step, choice: Choice, counters: EngineCounters) -> Measured | None:
        """From the step that has ended, which verified this choice; None: it says nothing."""
        measured = self._learn(step, choice, counters) if step.seconds is not None else None
        if step.ranks is not None:
            self._tokens_per_row.append(step.ranks.most_tokens / step.num_rows)
        self._step = step
        self._steps_since_plain += 1
        is_turn = self._steps_since_plain > (FILLED_PROBE_EVERY if self._fill_to else PROBE_EVERY)
        if step.ranks is not None:
            is_turn = step.ranks.num_steps % (PROBE_EVERY + 1) == 0
        self.is_probe = is_turn or self._num_plain < ENOUGH
        return measured

    def _learn(self, step: Step, choice: Choice, counters: EngineCounters) -> Measured | None:
        last = self._step
        if last is None or step.seconds is None:
            return None
        num_tokens = step.num_rows + choice.num_tokens
        is_plain = choice.num_tokens == 0
        if step.ranks is not None:
            num_tokens = step.ranks.most_tokens
            is_plain = self.is_probe
        if is_plain:
            return self._learn_plain(num_tokens, last.num_context, step.seconds)
        if self._drafted.was_cold(num_tokens):
            return None
        if step.num_passes:
            plain = self._plain_seconds(step.num_rows, last.num_context)
            self._passes.learn_share(step.num_passes, (step.seconds - choice.expected_seconds) / plain)
        measured = None
        if choice.num_tokens:
            measured = self._learn_gain(last, num_tokens, step, choice, counters)
        if num_tokens > self._most_rows(step.num_rows):
            self._drafted.learn(num_tokens, last.num_context, step.seconds)
        return measured

    def _learn_plain(self, num_tokens: int, num_context: int, seconds: float) -> Measured:
        expected = float(self._plain.seconds(num_tokens, num_context)) if self._num_plain else seconds
        counted = self._plain.learn(num_tokens, num_context, seconds)
        self._num_plain += 1
        self._steps_since_plain = 0
        self._remember(counted, counted, 0.0, 0)
        return Measured(False, seconds, expected)

    def _learn_gain(
        self, last: Step, num_tokens: int, step: Step, choice: Choice, counters: EngineCounters
    ) -> Measured:
        """From a step with drafts, in which a rank verified num_tokens.

        Of a step in which another one verified more counts what it would have taken otherwise.
        """
        assert step.seconds is not None
        num_rows, seconds = step.num_rows, step.seconds
        if num_tokens > num_rows + choice.num_tokens:
            seconds *= choice.expected_seconds / float(
                self.drafted_seconds(np.array([num_tokens - num_rows]))[0]
            )
        seconds = min(seconds, MAX_SLOWNESS * choice.expected_seconds)
        seconds_per_token = self._plain_seconds(num_rows, last.num_context) / num_rows
        plain_seconds = seconds_per_token * step.num_new_tokens
        counters.gate_seconds += seconds
        counters.gate_plain_seconds += plain_seconds
        counters.gate_expected_seconds += choice.expected_seconds
        expected_tokens = num_rows + choice.promised * self.calibration
        counters.gate_expected_plain_seconds += seconds_per_token * expected_tokens
        self._remember(seconds, plain_seconds, choice.promised, step.num_new_tokens - num_rows)
        return Measured(True, seconds, plain_seconds)

    def _remember(self, seconds: float, plain_seconds: float, promised: float, num_accepted: int) -> None:
        # Without drafts the correction fades, or what once broke its promise would never be tried again.
        new = np.array([seconds, plain_seconds, promised, num_accepted])
        self._sums = (1.0 - 1.0 / GAIN_MEMORY) * self._sums + new

    def _most_rows(self, num_rows: int) -> int:
        """Rows of the fullest rank, while this one has so many: no rank's step is shorter than its."""
        ratios = self._tokens_per_row
        return round(max(1.0, min(ratios)) * num_rows) if len(ratios) == ratios.maxlen else num_rows
