"""What engine steps take and what drafts give, learned while the engine runs."""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.drafting.gate.step_cost import ENOUGH, StepCost
from rollout_spec.metrics import EngineCounters

PROBE_EVERY = 33  # steps, of which one goes without drafts, to measure a plain step
# An engine may start slowly: more plain steps at first.
EARLY_STEPS, EARLY_PROBE_EVERY = 64, 7
FILLED_PROBE_EVERY = 1024  # the same where drafts are filled up: a plain step has no graph, and may take long
MAX_SLOWNESS = 3.0  # times the expected time that a step counts at most: the engine may have paused
GAIN_MEMORY = 128  # steps after which gain and calibration have mostly forgotten what was
PRIOR_TOKENS = 8.0  # the weight of the belief that what survivals promise comes true


class Ranks(NamedTuple):
    """What each data-parallel rank of a mixture of experts knows of all ranks: they step together."""

    num_steps: int
    """So far, with those that a rank runs without requests."""
    most_tokens: int
    """Tokens of the rank that verified most in the step."""


class ModelShares(NamedTuple):
    """What became of the m tokens that a model drafted for each row of a step, by their place in a draft."""

    verified: npt.NDArray[np.float64]
    """[m]: the share of the rows in whose draft the step verified it."""
    accepted: npt.NDArray[np.float64]
    """[m]: the share of the rows in which it was accepted."""


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
    """Passes that a model has taken in it, each for a token of every row, to be verified in the next."""
    model_shares: ModelShares | None = None
    """What it has verified and accepted of a model's drafts; None: there was nothing."""


class Choice(NamedTuple):
    """Draft tokens that a step verifies."""

    num_tokens: int
    promised: float
    """How many of them the survivals say will be accepted; uncorrected."""
    expected_seconds: float


NOTHING = Choice(0, 0.0, 0.0)


class _Sums(NamedTuple):
    """Over the last steps, decayed."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    """Of plain steps for the same tokens."""
    promised: float = 0.0
    """Draft tokens."""
    accepted: float = 0.0


class Costs:
    """Seconds of plain steps, and of steps with drafts, which engines run through different code.

    What a draft promises is corrected by what came true. Ranks that step together take as long as the one
    that verifies most. Each decides by itself, as if the others decided the same. All measure plain steps at
    the same time: beside a rank with drafts a plain step takes as long, so drafts would seem to cost nothing.
    Only a rank whose first request comes late measures its first ones alone.

    Args:
        counters: where the seconds of steps with drafts are counted.
        fill_to: draft tokens of every row in a step with drafts, where they are filled up; else 0.
    """

    def __init__(self, counters: EngineCounters, fill_to: int) -> None:
        self._counters, self._fill_to = counters, fill_to
        self._plain, self._drafted = StepCost(), StepCost()
        self._num_steps = self._num_plain = 0
        self._step: Step | None = None
        self._plain_seconds: float | None = None  # of a step like that one; None: to be computed
        self.is_probe = False
        """Whether the step now running goes without drafts, to be measured."""
        self.probes_soon = False
        """The same of the step after the next one."""
        # The busiest rank's tokens / our rows in the last steps. One of them at least was plain; the smallest
        # ratio is a plain step's: the busiest rank's rows / our rows.
        self._tokens_per_row: deque[float] = deque(maxlen=PROBE_EVERY)
        self._sums = _Sums()

    @property
    def step(self) -> Step:
        """The one that ended last."""
        assert self._step is not None, "learn comes first"
        return self._step

    @property
    def gain(self) -> float:
        """How many times as fast as without drafts the engine was of late; at least 1."""
        sums = self._sums
        return max(1.0, sums.plain_seconds / sums.seconds) if sums.seconds > 0.0 else 1.0

    @property
    def calibration(self) -> float:
        """The share of the tokens promised by survivals that was accepted of late."""
        return (PRIOR_TOKENS + self._sums.accepted) / (PRIOR_TOKENS + self._sums.promised)

    @property
    def most_rows(self) -> int:
        """Rows of the fullest rank: no rank's step is shorter than its."""
        ratios, num_rows = self._tokens_per_row, self.step.num_rows
        return round(max(1.0, min(ratios)) * num_rows) if len(ratios) == ratios.maxlen else num_rows

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain step."""
        if self._plain_seconds is None:
            self._plain_seconds = float(self._plain.seconds(self.most_rows, self.step.num_context))
        return self._plain_seconds

    def num_verified(self, num_draft_tokens: int) -> int:
        """How many draft tokens a step verifies, with what fills drafts up."""
        return self.step.num_rows * self._fill_to if self._fill_to else num_draft_tokens

    def drafted_seconds(self, nums_draft_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds that a step takes with each of these numbers of draft tokens; a plain step's at least."""
        num_rows, plain = self.most_rows, self.plain_seconds
        if self._fill_to:
            nums_draft_tokens = np.full_like(nums_draft_tokens, self.num_verified(0))
        nums_tokens = np.maximum(num_rows, self.step.num_rows + nums_draft_tokens)
        costs = self._drafted.seconds_from(num_rows, plain, nums_tokens, self.step.num_context)
        return np.maximum(costs, plain)

    def forget_drafts(self, share: float) -> None:
        """Believe what drafts cost so far less, by this share."""
        self._drafted.forget(share)

    def learn(self, step: Step, choice: Choice) -> float | None:
        """From the step that has ended, which verified this choice.

        Returns:
            How much longer a step with drafts took than expected, as a share of a plain step's time. None: a
            plain step, or one that says nothing.
        """
        self._step, self._plain_seconds = step, None
        is_plain = choice.num_tokens == 0 if step.ranks is None else self.is_probe
        excess = None
        if step.seconds is not None and is_plain:
            self._learn_plain(step, step.seconds)
        elif step.seconds is not None:
            excess = self._learn_drafted(step, step.seconds, choice)
        number = self._num_steps
        if step.ranks is not None:
            number = step.ranks.num_steps
            self._tokens_per_row.append(step.ranks.most_tokens / step.num_rows)
            self._plain_seconds = None
        self._num_steps += 1
        self.is_probe = self._is_turn(number) or self._num_plain < ENOUGH
        self.probes_soon = self._is_turn(number + 2)
        return excess

    def _is_turn(self, number: int) -> bool:
        """Whether a plain step is measured after the step of that number."""
        if self._fill_to:
            return number % FILLED_PROBE_EVERY == 0
        return number % PROBE_EVERY == 0 or (number < EARLY_STEPS and number % EARLY_PROBE_EVERY == 0)

    def _learn_plain(self, step: Step, seconds: float) -> None:
        """From a step without drafts. Where ranks step together no other rank had some either."""
        num_tokens = step.num_rows if step.ranks is None else step.ranks.most_tokens
        if self._num_plain:
            expected = float(self._plain.seconds(num_tokens, step.num_context))
            seconds = min(seconds, MAX_SLOWNESS * expected)
        if self._num_steps < EARLY_STEPS:
            self._plain.forget(0.0)  # so that later steps soon outweigh the first ones
        self._plain.learn(num_tokens, step.num_context, seconds)
        self._plain_seconds = None
        self._num_plain += 1
        self._remember(_Sums(seconds, seconds))

    def _learn_drafted(self, step: Step, seconds: float, choice: Choice) -> float | None:
        """From a step with drafts, which may all be another rank's; returns what `learn` does."""
        num_tokens = step.num_rows + choice.num_tokens if step.ranks is None else step.ranks.most_tokens
        if self._drafted.was_cold(num_tokens):
            return None
        plain = self.plain_seconds
        expected = float(self.drafted_seconds(np.array([num_tokens - step.num_rows]))[0])
        seconds = min(seconds, MAX_SLOWNESS * expected)
        if choice.num_tokens:
            # Where another rank verified more: what the step would have taken otherwise.
            own_seconds = seconds * choice.expected_seconds / expected if step.ranks is not None else seconds
            own_plain = plain / step.num_rows * step.num_new_tokens
            self._counters.gate_seconds += own_seconds
            self._counters.gate_plain_seconds += own_plain
            num_accepted = step.num_new_tokens - step.num_rows
            self._remember(_Sums(own_seconds, own_plain, choice.promised, num_accepted))
        if num_tokens > self.most_rows:
            self._drafted.learn(num_tokens, step.num_context, seconds)
        return (seconds - expected) / plain

    def _remember(self, step: _Sums) -> None:
        # Without drafts the correction fades, or what once broke its promise would never be tried again.
        kept = 1.0 - 1.0 / GAIN_MEMORY
        self._sums = _Sums(*(kept * old + new for old, new in zip(self._sums, step, strict=True)))
