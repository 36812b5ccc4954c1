"""When to draft, and how much: speculation pays in the long tail, when few requests are left running.

A token's survival is the probability that a draft is accepted up to and with it. A gate is open for a step
that it lets have drafts, else closed. It counts both; `Drafter` counts the steps for which it does not ask.
"""

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rollout_spec.drafting.gate.gains import DraftGains
from rollout_spec.drafting.gate.probes import Probes, probes_after
from rollout_spec.drafting.gate.step import EndedStep, Floats
from rollout_spec.drafting.gate.step_seconds import StepSeconds
from rollout_spec.metrics import EngineCounters

# The automatic gate. Steps are engine steps.
MIN_SURVIVAL = 0.02  # a draft token less likely than this is never proposed
MARGIN = 0.01  # the share by which drafts must give more tokens per second than a plain step
PATIENCE = 4  # steps at most until a gate that has closed weighs drafts again

_Int32 = npt.NDArray[np.int32]
_Float32 = npt.NDArray[np.float32]


class Opening(NamedTuple):
    """What a gate says before anything is drafted."""

    min_survival: float | None  # the least at which a token is proposed now; None: draft nothing
    probe_in_two: bool = False  # whether the step after the next one goes without drafts, to be measured
    num_model_tokens: int = 0  # that a model drafts for each row in the next step that waits for drafts

    @property
    def is_open(self) -> bool:
        return self.min_survival is not None


class Choice(NamedTuple):
    """What a gate takes of the drafts."""

    lengths: _Int32  # [n], of each row's draft the first tokens
    promised: float = 0.0  # tokens, by their survivals
    pads: bool = True  # whether, where drafts are padded, the step has some in all rows


class Gate(Protocol):
    """It is asked twice in every engine step in which rows decode."""

    def begin(self, step: EndedStep) -> Opening:
        """This step has ended, and nothing is drafted yet for the next one: may it have drafts?"""

    def choose(self, step: EndedStep, survivals: _Float32, lengths: _Int32) -> Choice:
        """How much of each draft to verify after this step, where `begin` has named a survival.

        survivals: float32 [n, K], falling along a row.
        lengths: int32 [n], draft tokens of each row: the most.
        """


class FixedGate:
    """A fixed threshold on the number of decoding requests (the CANN recipe's rule).

    batch_threshold: draft while at most this many requests decode; 0 never drafts.
    min_survival: what `begin` gives, always. The model takes all its passes.
    """

    def __init__(
        self, counters: EngineCounters, batch_threshold: int, min_survival: float, most_model_tokens: int = 0
    ) -> None:
        self.counters, self._batch_threshold = counters, batch_threshold
        self._open = Opening(min_survival, num_model_tokens=most_model_tokens)

    def begin(self, step: EndedStep) -> Opening:
        if step.num_rows <= self._batch_threshold:
            return self._open
        self.counters.num_steps_off_threshold += 1
        return Opening(None)

    def choose(self, step: EndedStep, survivals: _Float32, lengths: _Int32) -> Choice:
        self.counters.num_steps_on += 1
        return Choice(lengths)


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
        self.counters, self._pad_to = counters, pad_to
        self._seconds, self._gains = StepSeconds(pads_drafts=pad_to > 0), DraftGains(most_model_tokens)
        self._num_steps = 0
        self._probes = Probes()  # as `begin` has set them, for the step that `choose` decides on
        self._price = 0.0  # the least survival that the last step with drafts took
        self._least_tried = 0.0  # survival: half the price, and half of that after each refusal
        self._pass_cost = 0.0  # tokens a row that the time of a model's pass gives otherwise
        self._num_refused = self._steps_until_look = 0
        self._busiest_ratio = 1.0  # of the busiest rank's rows to ours, where ranks step together

    def begin(self, step: EndedStep) -> Opening:
        others_draft = step.number is not None and self._see_ranks(step, was_probe=self._probes.is_probe)
        self._learn(dataclasses.replace(step, has_drafts=step.has_drafts or others_draft))
        probes = probes_after(self._num_steps if step.number is None else step.number)
        self._probes = probes._replace(is_probe=probes.is_probe or not self._seconds.is_known)
        self._num_steps += 1
        return Opening(self._opens_at(), probes.probe_in_two, self._gains.num_model_tokens(self._pass_cost))

    def _opens_at(self) -> float | None:
        """The least survival that is proposed for this step; None: the gate is closed for it."""
        if self._probes.is_probe:
            self.counters.num_steps_off_probe += 1
            return None
        if self._steps_until_look and not self._probes.is_trial:
            self._steps_until_look -= 1
            self.counters.num_steps_off_cost += 1
            return None
        # The next step may want less likely ones than the last. That is found step by step.
        return max(MIN_SURVIVAL, self._least_tried)

    def _see_ranks(self, step: EndedStep, *, was_probe: bool) -> bool:
        """Learn of a step of ranks that step together how many rows the busiest has; returns whether another
        rank than ours may have verified drafts in it."""
        ratio = step.num_tokens / step.num_rows  # of a plain step that of the rows, else more
        self._busiest_ratio = ratio if was_probe else min(ratio, self._busiest_ratio)
        return not was_probe and step.num_tokens > self._num_busiest_rows(step)

    def _learn(self, step: EndedStep) -> None:
        if step.seconds is not None:
            expected = self._seconds.learn(step, step.seconds)
            self._count(step, step.seconds, expected)
        self._gains.learn(step.promised, step.num_new_tokens - step.num_rows if step.promised else 0)
        if step.model_shares is not None:
            verified, accepted = step.model_shares
            # Each took the place of a token that is accepted about as often as the last that was verified.
            self._gains.learn_passes(accepted - verified * self._price)

    def _count(self, step: EndedStep, seconds: float, expected: float) -> None:
        """Count what was believed of a step, so that a user can see it; not of prompts, which differ."""
        if not expected or step.num_prompt_tokens:
            return
        plain, counters = self._plain_seconds(step), self.counters
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

    def _num_busiest_rows(self, step: EndedStep) -> int:
        """Rows of the busiest rank: no rank's step is shorter than its."""
        return round(max(1.0, self._busiest_ratio) * step.num_rows)

    def _plain_seconds(self, step: EndedStep) -> float:
        """Of a step like this one without prompts and drafts, with the pass that a model always runs."""
        num_passes = min(1, step.num_passes)  # 0: there is no model
        step = dataclasses.replace(step, num_prompt_tokens=0, has_drafts=False, num_passes=num_passes)
        return float(self._seconds.expected(step, self._num_busiest_rows(step)))

    def _drafted_seconds(self, step: EndedStep, most: int) -> Floats:
        """Of a step like this one, without prompts, with 1, 2, ... `most` draft tokens, [most]."""
        step = dataclasses.replace(step, num_prompt_tokens=0, has_drafts=True)
        nums = np.full(most, step.num_rows * self._pad_to) if self._pad_to else 1 + np.arange(most)
        return self._seconds.expected(step, np.maximum(self._num_busiest_rows(step), step.num_rows + nums))

    def choose(self, step: EndedStep, survivals: _Float32, lengths: _Int32) -> Choice:
        is_draft = np.arange(survivals.shape[1]) < lengths[:, None]
        sorted_survivals = np.sort(survivals[is_draft])[::-1].astype(float)  # the largest first
        num, plain = len(sorted_survivals), self._plain_seconds(step)
        seconds = self._drafted_seconds(step, max(1, num))
        if not num:  # where drafts are padded, the step has them if that takes no longer
            self.counters.num_steps_on += 1
            return Choice(lengths, pads=len(lengths) > 0 and bool(seconds[0] <= plain))
        num_rows = self._num_busiest_rows(step)
        tokens = num_rows + np.cumsum(sorted_survivals) * self._gains.share_kept
        best = int(np.argmax(tokens / seconds))
        rate = float(tokens[best] / seconds[best])
        self._pass_cost = rate * self._seconds.expected_pass(num_rows) / num_rows
        pays = rate * plain > (1.0 + MARGIN) * num_rows
        if not (pays or self._probes.is_trial):
            return self._refuse(lengths)
        self.counters.num_steps_on += 1
        self._num_refused = 0 if pays else self._num_refused
        self._price = float(sorted_survivals[best])
        self._least_tried = self._price / 2
        is_chosen = (survivals >= np.float32(self._price)) & is_draft
        chosen = is_chosen.sum(axis=1).astype(np.int32)
        # There may be more of the last survival than the best number has.
        return Choice(chosen, promised=float(sorted_survivals[: chosen.sum()].sum()))

    def _refuse(self, lengths: _Int32) -> Choice:
        """No draft pays; one that pays is looked for at once, then in the second, third, ... step."""
        self._steps_until_look = min(self._num_refused, PATIENCE - 1)
        self._num_refused += 1
        self._least_tried /= 2
        self.counters.num_steps_off_cost += 1
        return Choice(np.zeros_like(lengths), pads=False)
