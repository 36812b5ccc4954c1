"""When to draft, and how much: speculation pays in the long tail, when few requests are left running.

In every engine step in which rows decode a gate is asked twice: `begin` before anything is drafted, then
`choose`; `FixedGate` says what goes in and comes out. A token's survival is the probability that a draft is
accepted up to and with it. A gate that drafts nothing is called closed. `num_model_tokens` says how
many tokens a model drafts for each row in the next step that waits for drafts.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.drafting.gate.gains import DraftGains
from rollout_spec.drafting.gate.step import Floats, Step
from rollout_spec.drafting.gate.step_seconds import StepSeconds
from rollout_spec.metrics import EngineCounters

# The automatic gate. Steps are engine steps.
MIN_SURVIVAL = 0.02  # a draft token less likely than this is never proposed
MARGIN = 0.01  # the share by which drafts must give more tokens per second than a plain step
PROBE_EVERY = 256  # steps, of which one goes without drafts, to measure a plain step, and two with some
PATIENCE = 4  # steps at most until a gate that has closed weighs drafts again

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]


class Opening(NamedTuple):
    """What a gate says before anything is drafted."""

    min_survival: float | None  # the least at which a token is proposed now; None: draft nothing
    probe_in_two: bool = False  # whether the step after the next one goes without drafts, to be measured


class Choice(NamedTuple):
    """What a gate takes of the drafts."""

    lengths: _Int32  # [n], of each row's draft the first tokens
    promised: float = 0.0  # tokens, by their survivals
    pads: bool = True  # whether, where drafts are padded, the step has some in all rows
    is_on: bool = True  # False: there are drafts, and none pays


class FixedGate:
    """A fixed threshold on the number of decoding requests (the CANN recipe's rule).

    batch_threshold: draft while at most this many requests decode; 0 never drafts.
    min_survival: what `begin` gives, always. The model takes all its passes.
    """

    def __init__(
        self, counters: EngineCounters, batch_threshold: int, min_survival: float, most_model_tokens: int = 0
    ) -> None:
        self.counters, self.num_model_tokens = counters, most_model_tokens
        self._batch_threshold, self._min_survival = batch_threshold, min_survival

    def begin(self, step: Step) -> Opening:
        """A step has ended."""
        if step.num_rows <= self._batch_threshold:
            return Opening(self._min_survival)
        self.counters.num_steps_off_threshold += 1
        return Opening(None)

    def choose(self, survivals: _Float32, lengths: _Int32) -> Choice:
        """How much of each draft to verify, where `begin` has named a survival.

        survivals: float32 [n, K], falling along a row.
        lengths: int32 [n], draft tokens of each row: the most.
        """
        return Choice(lengths)


def _measures_plain(number: int) -> bool:
    """Whether the step after it is measured without drafts; more often at first: engines start slowly."""
    return number % PROBE_EVERY == 0 or number & (number - 1) == 0


class AutoGate:
    """Drafts where that gives more tokens per second than a plain step.

    Over all rows a step verifies the likeliest tokens, as many as give most tokens per second. `StepSeconds`
    learns what steps take, `DraftGains` what drafts give.

    Data-parallel ranks that step together take as long as the busiest. Each decides by itself, as if the
    others decided the same. All measure plain steps at the same time: beside a rank with drafts a plain step
    takes as long, so drafts would seem to cost nothing.

    pad_to: draft tokens of every row in a step with drafts, where they are padded; else 0. Then all steps
        with drafts take equally long: a step verifies every draft that is proposed, or is plain.
    """

    def __init__(self, counters: EngineCounters, pad_to: int = 0, most_model_tokens: int = 0) -> None:
        self.counters, self.num_model_tokens = counters, most_model_tokens
        self._pad_to = pad_to
        self._seconds, self._gains = StepSeconds(pads_drafts=pad_to > 0), DraftGains(most_model_tokens)
        self._num_steps = 0
        self._step: Step  # that ended last
        self._is_probe = self._is_trial = False  # whether the gate measures what it would not do
        self._price = 0.0  # the least survival that the last step with drafts took
        self._num_refused = self._steps_until_look = 0
        self._rows_per_row = 1.0  # that the busiest rank has for each row of ours, where ranks step together

    def begin(self, step: Step) -> Opening:
        self._learn(self._seen(step))
        number = self._num_steps if step.number is None else step.number
        self._num_steps += 1
        self._is_probe = not self._seconds.is_known or _measures_plain(number)
        # Shortly before, two steps have drafts though they seem not to pay. Of two, the second can have some
        # also where a step gets room for drafts because the one before it asked for it.
        self._is_trial = _measures_plain(number + 3) or _measures_plain(number + 4)
        return Opening(self._min_survival(), probe_in_two=_measures_plain(number + 2))

    def _min_survival(self) -> float | None:
        if self._is_probe:
            self.counters.num_steps_off_probe += 1
            return None
        if self._steps_until_look and not self._is_trial:
            self._steps_until_look -= 1
            self.counters.num_steps_off_cost += 1
            return None
        # The next step may want less likely ones than the last. That is found step by step.
        return max(MIN_SURVIVAL, self._price / 2)

    def _seen(self, step: Step) -> Step:
        """Where ranks step together, it is no plain step if another rank may have verified drafts."""
        self._step = step
        if step.number is None:
            return step
        tokens_per_row = step.num_tokens / step.num_rows  # of a plain step its rows, else more
        self._rows_per_row = tokens_per_row if self._is_probe else min(tokens_per_row, self._rows_per_row)
        others = not self._is_probe and step.num_tokens > self._num_busiest_rows
        return step._replace(has_drafts=step.has_drafts or others)

    def _learn(self, step: Step) -> None:
        if step.seconds is not None:
            self._count(step, step.seconds, self._seconds.learn(step, step.seconds))
        self._gains.learn(step.promised, step.num_new_tokens - step.num_rows if step.promised else 0)
        if step.model_shares is not None:
            verified, accepted = step.model_shares
            # Each took the place of a token that is accepted about as often as the last that was verified.
            self._gains.learn_passes(accepted - verified * self._price)

    def _count(self, step: Step, seconds: float, expected: float) -> None:
        """Count what was believed of a step, so that a user can see it; not of prompts, which differ."""
        if not expected or step.num_prompt_tokens:
            return
        plain, counters = self._plain_seconds(), self.counters
        counters.num_timed_steps += 1
        counters.timed_seconds += seconds
        counters.error_seconds += abs(seconds - expected)
        counters.believed_plain_seconds += plain
        if step.has_drafts:
            counters.num_drafted_steps += 1
            counters.drafted_seconds += seconds
            counters.drafted_as_plain_seconds += plain / step.num_rows * step.num_new_tokens
        else:
            counters.plain_seconds += seconds
            counters.believed_of_plain_seconds += expected

    @property
    def _num_busiest_rows(self) -> int:
        """Rows of the busiest rank: no rank's step is shorter than its."""
        return round(max(1.0, self._rows_per_row) * self._step.num_rows)

    def _plain_seconds(self) -> float:
        """Of a step like the last one without prompts and drafts; a model's first pass always runs."""
        num_passes = min(1, self._step.num_passes)
        step = self._step._replace(num_prompt_tokens=0, has_drafts=False, num_passes=num_passes)
        return float(self._seconds.expected(step, self._num_busiest_rows))

    def _drafted_seconds(self, most: int) -> Floats:
        """Of a step like the last one, without prompts, with 1, 2, ... `most` draft tokens, [most]."""
        step = self._step._replace(num_prompt_tokens=0, has_drafts=True)
        nums = np.full(most, step.num_rows * self._pad_to) if self._pad_to else 1 + np.arange(most)
        return self._seconds.expected(step, np.maximum(self._num_busiest_rows, step.num_rows + nums))

    def choose(self, survivals: _Float32, lengths: _Int32) -> Choice:
        is_draft = np.arange(survivals.shape[1]) < lengths[:, None]
        sorted_survivals = np.sort(survivals[is_draft])[::-1].astype(float)  # the largest first
        num, plain = len(sorted_survivals), self._plain_seconds()
        seconds = self._drafted_seconds(max(1, num))
        if not num:  # where drafts are padded, the step has them if that takes no longer
            return Choice(lengths, pads=len(lengths) > 0 and bool(seconds[0] <= plain))
        num_rows = self._num_busiest_rows
        tokens = num_rows + np.cumsum(sorted_survivals) * self._gains.share_kept
        best = int(np.argmax(tokens / seconds))
        rate = float(tokens[best] / seconds[best])
        if self._step.num_passes:
            cost = rate * self._seconds.expected_pass(num_rows) / num_rows
            self.num_model_tokens = self._gains.num_model_tokens(cost)
        pays = rate * plain > (1.0 + MARGIN) * num_rows
        if not (pays or self._is_trial):
            return self._refuse(lengths)
        self._num_refused = 0 if pays else self._num_refused
        self._price = float(sorted_survivals[best])
        is_chosen = (survivals >= np.float32(self._price)) & is_draft
        chosen = is_chosen.sum(axis=1).astype(np.int32)
        # There may be more of the last survival than the best number has.
        return Choice(chosen, promised=float(sorted_survivals[: chosen.sum()].sum()))

    def _refuse(self, lengths: _Int32) -> Choice:
        """No draft pays; one that pays is looked for at once, then in the second, third, ... step."""
        self._steps_until_look = min(self._num_refused, PATIENCE - 1)
        self._num_refused += 1
        self._price /= 2
        self.counters.num_steps_off_cost += 1
        return Choice(np.zeros_like(lengths), pads=False, is_on=False)
