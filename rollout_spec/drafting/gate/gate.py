"""When to draft, and how much: speculation pays in the long tail, when few requests are left running.

A gate is asked twice in an engine step. `begin`, before anything is drafted, gives the least survival (the
probability that a draft is accepted up to and with a token) at which a token is proposed, or None: no drafts
in this step. `choose` then keeps the tokens that pay. A gate that drafts nothing is called closed.
"""

import numpy as np
import numpy.typing as npt

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.gate.costs import NOTHING, Choice, Costs, Step
from rollout_spec.drafting.gate.passes import Passes
from rollout_spec.metrics import EngineCounters

# Steps in a row that must agree before a gate opens or closes: a single arrival must not flip it.
HYSTERESIS_STEPS = 4

# The automatic gate. Steps are engine steps.
MIN_SURVIVAL = 0.02  # a draft token less likely than this is never proposed
NUM_TRIES = 8  # steps whose drafts are filled up though by a guess they do not pay: the guess is far off
MARGIN = 0.02  # the share of a plain step's tokens that drafts must gain
LOOK_EVERY = 16  # steps, in one of which a closed gate weighs drafts all the same
FORGET_STEPS = 256  # without drafts, in which two thirds of the belief in what they cost are lost

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]


class Gate:
    """What a gate is asked; of itself it measures nothing and drafts nothing.

    Args:
        most_model_tokens: the most tokens that a model drafts for a row; 0: there is no model.

    Attributes:
        counters: the steps that it left without drafts, and what `Costs` counts.
        fills: whether the step is one with drafts also for rows that have none, where drafts are filled up.
        probes_soon: whether the step after the next one goes without drafts, to be measured.
        num_passes: how many passes a model takes in the next step that waits for drafts, each for one token.
    """

    fills = probes_soon = False

    def __init__(self, most_model_tokens: int) -> None:
        self.counters, self.num_passes = EngineCounters(), most_model_tokens

    def begin(self, step: Step) -> float | None:
        """The least survival at which a token is drafted now; None: draft nothing."""
        return None

    def choose(self, survivals: _Float32, numbers: _Int32) -> _Int32:
        """How much of each draft to verify.

        Args:
            survivals: float32 [n, K], of the draft up to and with this token; falling along a row.
            numbers: int32 [n], draft tokens of each row.

        Returns:
            int32 [n], at most `numbers`.
        """
        return numbers

    def discard(self) -> None:
        """What was chosen is not verified: the step that runs is a plain one."""


def make_gate(config: SpecConfig, fill_to: int = 0, most_model_tokens: int = 0) -> Gate:
    """The gate that the options describe; `fill_to` as of `Costs`, `most_model_tokens` as of `Gate`."""
    if isinstance(config.batch_threshold, str):
        return AutoGate(fill_to, most_model_tokens)
    return FixedGate(config.batch_threshold, config.min_survival, most_model_tokens)


class FixedGate(Gate):
    """A fixed threshold on the number of decoding requests (the CANN recipe's rule), with hysteresis.

    Args:
        batch_threshold: draft while at most this many requests decode; 0 never drafts.
        min_survival: what `begin` gives, always.
        most_model_tokens: as of `Gate`; as many passes the model takes, always.
    """

    def __init__(self, batch_threshold: int, min_survival: float, most_model_tokens: int = 0) -> None:
        super().__init__(most_model_tokens)
        self._batch_threshold, self._min_survival = batch_threshold, min_survival
        self._is_open: bool | None = None
        self._num_against = 0

    def begin(self, step: Step) -> float | None:
        says_open = step.num_rows <= self._batch_threshold
        self._num_against = 0 if says_open == self._is_open else self._num_against + 1
        if self._is_open is None or self._num_against >= HYSTERESIS_STEPS:
            self._is_open, self._num_against = says_open, 0
        self.fills = bool(self._is_open)
        if self._is_open:
            return self._min_survival
        self.counters.num_steps_off_threshold += 1
        return None


class AutoGate(Gate):
    """Drafts where the expected gain is more than the measured cost.

    A draft token pays while its survival is more than what its time would give elsewhere: seconds of the
    token x tokens per second. So a step verifies, over all rows, the tokens most likely to be accepted, as
    many as pay. What steps take and drafts give `Costs` learns.

    Args:
        fill_to: as in `Costs`. Then all steps with drafts take equally long: a step verifies every draft that
            is proposed, or is a plain step.
        most_model_tokens: as of `Gate`; the gate chooses how many passes pay.
    """

    def __init__(self, fill_to: int = 0, most_model_tokens: int = 0) -> None:
        super().__init__(most_model_tokens)
        self._costs, self._passes = Costs(self.counters, fill_to), Passes(most_model_tokens)
        self._is_filled = fill_to > 0
        self._choice = NOTHING  # of the step now running
        self._least_verified = MIN_SURVIVAL  # the least survival in the latest budget
        self._num_tries = NUM_TRIES if fill_to else 0
        self._num_refused = 0  # steps in a row in which no draft paid
        self._steps_until_look = 0

    def begin(self, step: Step) -> float | None:
        excess = self._costs.learn(step, self._choice)
        self.probes_soon = self._costs.probes_soon
        if excess is not None and step.num_passes:
            self._passes.learn_share(step.num_passes, excess)
        if step.model_shares is not None:
            verified, accepted = step.model_shares
            # Each took the place of a token that is accepted about as often as the last that was verified.
            self._passes.learn_gains(accepted - verified * self._least_verified)
        self._choice, self.fills = NOTHING, False
        if self._costs.is_probe:
            self.counters.num_steps_off_probe += 1
            return None
        if self._num_refused >= HYSTERESIS_STEPS:
            # What made drafts dear may be over: believe it less and less, and weigh drafts now and then.
            self._costs.forget_drafts(1.0 / FORGET_STEPS)
            self._steps_until_look -= 1
            if self._steps_until_look > 0:
                self.counters.num_steps_off_cost += 1
                return None
        return max(MIN_SURVIVAL, self._least_verified / 2)

    def choose(self, survivals: _Float32, numbers: _Int32) -> _Int32:
        self._steps_until_look = LOOK_EVERY
        is_draft = np.arange(survivals.shape[1]) < numbers[:, None]
        sorted_survivals = np.sort(survivals[is_draft])[::-1].astype(float)  # the largest first
        num, gain = self._best_budget(sorted_survivals)
        if self._costs.step.num_passes:
            self._passes.choose(self._costs.gain)
            self.num_passes = self._passes.num
        if not num:
            self._fill_empty()
            return numbers
        if not self._drafts_for(gain):
            self._num_refused += 1
            self.counters.num_steps_off_cost += 1
            self._least_verified = max(MIN_SURVIVAL, self._least_verified / 2)
            return np.zeros_like(numbers)
        self._num_refused = 0
        self._least_verified = float(sorted_survivals[num - 1])
        is_chosen = (survivals >= np.float32(self._least_verified)) & is_draft
        chosen = is_chosen.sum(axis=1).astype(np.int32)
        # There may be more of the last survival than the budget has.
        self._choice, self.fills = self._choice_of(sorted_survivals[: chosen.sum()]), True
        return chosen

    def _drafts_for(self, gain: float) -> bool:
        """Whether the step has drafts that gain `gain` tokens; the first few tries have them in any case."""
        if gain > MARGIN * self._costs.most_rows:
            return True
        if self._num_tries:
            self._num_tries -= 1
            return True
        return False

    def _fill_empty(self) -> None:
        """Nothing is proposed: where drafts are filled up, the step has them if that takes no longer."""
        if not self._is_filled:
            return
        choice = self._choice_of(np.zeros(0))
        if choice.expected_seconds <= self._costs.plain_seconds:
            self._choice, self.fills = choice, True

    def _choice_of(self, survivals: npt.NDArray[np.float64]) -> Choice:
        """The step that verifies draft tokens of these survivals."""
        num = len(survivals)
        seconds = float(self._costs.drafted_seconds(np.array([num]))[0])
        return Choice(self._costs.num_verified(num), float(survivals.sum()), seconds)

    def discard(self) -> None:
        self._choice, self.fills = NOTHING, False

    def _best_budget(self, survivals: npt.NDArray[np.float64]) -> tuple[int, float]:
        """How many draft tokens to verify, and the tokens that they gain above what their time would give.

        survivals: of all rows' draft tokens, the largest first.
        """
        if not len(survivals):
            return 0, 0.0
        costs, plain = self._costs.drafted_seconds(1 + np.arange(len(survivals))), self._costs.plain_seconds
        tokens = self._costs.gain * self._costs.most_rows  # that the time of a plain step gives
        net_gains = np.cumsum(survivals * self._costs.calibration) - tokens / plain * (costs - plain)
        best = int(np.argmax(net_gains))
        return best + 1, float(net_gains[best])
