"""One engine's drafter: its requests, and what each step asks of the gate and of the index.

It knows neither torch nor vLLM: a step is arrays of row numbers and token levels in, draft tokens out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafts import TAKES_ANY, Drafts, NextStep, passes_for
from rollout_spec.drafting.gate.gate import AutoGate, Choice, FixedGate, Opening
from rollout_spec.drafting.gate.step import EndedStep, Work
from rollout_spec.drafting.groups import Groups, GroupSequence
from rollout_spec.drafting.history import History
from rollout_spec.drafting.index import StepResult, make_index
from rollout_spec.drafting.model_share import ModelShare
from rollout_spec.drafting.native import Int32Array, InvalidArgument
from rollout_spec.metrics import EngineCounters

_Bools = npt.NDArray[np.bool_]

PAD = 0  # a token id of any vocabulary, where there is no better one
STEP_SHARE = 0.02  # of a step's time that the next one spends on unindexed text
MOST_SECONDS = 0.01  # and the most: an engine without work may have waited long for this step
PIECE_TOKENS = 1024  # of unindexed text, that are indexed at a time: in 0.1 ms or less


class _TrackedRows:
    """The rows of the engine's token matrix whose sequences are in the index.

    As long as the batch stays these are the same arrays, which the index then does not check again.
    """

    def __init__(self, rows: Int32Array, sequences: Int32Array, max_draft_levels: Int32Array) -> None:
        self.rows, self.sequences = rows, sequences  # of the matrix, and of the index
        self._max_draft_levels = max_draft_levels  # at which drafts end at the latest
        self.levels, self.max_draft_tokens = np.zeros((2, len(rows)), np.int32)

    def among(self, kept: _Bools) -> _TrackedRows:
        """The rows for which `kept`, bool [rows of the matrix], is true."""
        chosen = kept[self.rows]
        return _TrackedRows(self.rows[chosen], self.sequences[chosen], self._max_draft_levels[chosen])

    def set_levels(self, levels: Int32Array, may_draft: bool, room: Int32Array | None) -> None:
        """Take over the levels of this step, int32 [>= rows of the matrix]; may_draft: whether any may."""
        np.take(levels, self.rows, out=self.levels)
        self.max_draft_tokens[:] = np.maximum(self._max_draft_levels - self.levels, 0) if may_draft else 0
        if room is not None:
            np.minimum(self.max_draft_tokens, room[self.rows], out=self.max_draft_tokens)


@dataclasses.dataclass
class _Request:
    sequence: GroupSequence | None  # None: it is not in the index
    max_level: int  # no token is generated beyond this level


class _Given(NamedTuple):
    """The drafts of the step that runs."""

    num_tokens: int = 0
    promised: float = 0.0  # of these tokens, by the gate


class Drafter:
    """Drafts for the rows of an engine's batch.

    Usage: `add` every new request, `remove` every ended one, then `draft` once per engine step.
    Not thread-safe; one per engine.

    Args:
        config: the options; `config.num_speculative_tokens` bounds every draft.
        clock: seconds, of which the gate learns what a step takes.
        pads_drafts: pad the drafts of a step to `config.num_speculative_tokens` in every decoding row, for
            engines whose other steps have no graph. Padding is verified, and seldom right.
        most_model_tokens: the most that a model drafts for a row; 0: there is no model.
        vocab_size: of the target; texts of other engines with other tokens are refused.
    """

    def __init__(
        self,
        config: SpecConfig,
        clock: Callable[[], float] = time.perf_counter,
        pads_drafts: bool = False,
        most_model_tokens: int = 0,
        vocab_size: int = 1 << 31,
    ) -> None:
        self._num_speculative_tokens = config.num_speculative_tokens
        self._pad_to = config.num_speculative_tokens if pads_drafts else 0
        self._max_draft_tokens = config.max_draft_tokens
        self._has_model = most_model_tokens > 0
        self.counters = EngineCounters()
        self._gate: AutoGate | FixedGate = (
            AutoGate(self.counters, self._pad_to, most_model_tokens)
            if isinstance(config.batch_threshold, str)
            else FixedGate(self.counters, config.batch_threshold, config.min_survival, most_model_tokens)
        )
        self._clock = clock
        self._last_end: float | None = None  # of a step; None: the time until the next one's is no step's
        self._last_seconds = 0.0  # what the last step took; 0.0: nobody knows
        self._given = _Given()
        self._latest = Drafts.none(0)
        self.index = make_index(config)
        self.history = History(config.history, config.max_index_bytes, vocab_size)
        self._groups = Groups(self.index, self.history, self.counters)
        self._num_texts_left_out = 0  # ever, as counted so far
        self._requests: dict[str, _Request] = {}
        self._model_share = ModelShare(self.counters)
        self._row_ids: list[str] = []  # the requests of the last step's rows
        self._tracked: _TrackedRows | None = None  # those of them in the index; None: to be mapped anew

    @property
    def request_ids(self) -> Collection[str]:
        return self._requests.keys()

    def add(
        self,
        request_id: str,
        prompt_token_ids: Int32Array,
        max_level: int,
        group: Hashable | None = None,
        num_group_tokens: int | None = None,
        sample: Hashable | None = None,
    ) -> None:
        """Start a request.

        Args:
            request_id: unique among those that run.
            prompt_token_ids: int32, shape [num_prompt_tokens].
            max_level: the most tokens, prompt included, that the request can reach.
            group: requests with the same value are siblings. By default the exact prompt decides.
            num_group_tokens: how many of the prompt's tokens are the group's prompt, by default all. The rest
                is text of this request: what it said before it was interrupted, or earlier turns.
            sample: names what the request belongs to, in its group: a later turn, or what goes on after an
                abort, has the same name, and begins after the longest of its texts that it goes on after.
                Without a name it begins after a text that its prompt begins with as a whole, if there is one.

        A request with another prompt than its group's gives the group that one; what runs keeps its own.
        """
        sequence = self._groups.add(prompt_token_ids, group, num_group_tokens, sample)
        self._requests[request_id] = _Request(sequence, max_level)
        self._tracked = None

    def remove(self, request_id: str, *, is_aborted: bool = False) -> None:
        """End a request that was added; its text stays, and the sample's next one goes on after it.

        is_aborted: that one's prompt may lack the last tokens.
        """
        self._tracked = None
        sequence = self._requests.pop(request_id).sequence
        if sequence is not None:
            self._groups.park(sequence, is_aborted=is_aborted)

    def end_samples(self, samples: Collection[Hashable]) -> None:
        """These have said all: what they have parked is closed, at once or when their request is removed."""
        samples = set(samples)
        for request in self._requests.values():
            if request.sequence is not None and request.sequence.sample in samples:
                request.sequence.has_ended = True
        self._groups.end_samples(samples)

    def draft(
        self,
        request_ids: Sequence[str],
        nums_new_tokens: npt.ArrayLike,
        token_ids: Int32Array,
        levels: Int32Array,
        work: Work | None = None,
        next_step: NextStep = TAKES_ANY,
        ended: float | None = None,
    ) -> Drafts:
        """Index every decoding row's new tokens and draft for it what the gate lets through.

        Args:
            request_ids: the request of each row; all were added.
            nums_new_tokens: [num_rows], the tokens each row got in the step that has ended; 0 for a row
                that does not decode (a partial prefill).
            token_ids: shape [>= num_rows, max_model_len], row i holds the tokens of `request_ids[i]`.
            levels: int32, shape [>= num_rows], how many tokens each row has.
            work: what the step that has ended processed; by default a token of each decoding row and the
                drafts that it was given.
            next_step: what the next one can take.
            ended: when the step did, by the drafter's clock; None: just now.

        Raises NativeError: an argument is wrong that is no row's; nothing was indexed then. A full index
        raises nothing: idle groups leave it, then idle text, then the requests that do not fit. So do those
        whose rows have negative tokens.
        """
        started = time.perf_counter()
        given, self._given = self._given, _Given()
        num_rows, nums = len(request_ids), np.asarray(nums_new_tokens)
        if len(nums) != num_rows or len(levels) < num_rows:
            others = f"nums_new_tokens has {len(nums)}, levels has {len(levels)}"
            raise InvalidArgument(f"request_ids: has {num_rows} entries, {others}")
        tracked, goes_on = self._mapped(request_ids)
        seconds = self._seconds_until(self._clock() if ended is None else ended, goes_on)
        step = self._ended_step(work, given, nums, levels, seconds, next_step)
        if step.num_rows < num_rows:
            tracked = tracked.among(nums > 0)
        if step.num_rows:
            drafts = self._draft_decoding(step, tracked, nums > 0, token_ids, levels, next_step)
        else:  # the gate is not asked, and wants what it wanted
            self._propose_after(tracked, token_ids, levels, None)
            none = Drafts.none(num_rows, self._num_speculative_tokens)
            drafts = self._latest._replace(tokens=none.tokens, lengths=none.lengths)
        self._latest = drafts
        self.counters.draft_seconds += time.perf_counter() - started
        return drafts

    def _ended_step(
        self,
        work: Work | None,
        given: _Given,
        nums: Int32Array,
        levels: Int32Array,
        seconds: float | None,
        next_step: NextStep,
    ) -> EndedStep:
        decodes, model_drafts = nums > 0, next_step.model_drafts
        num_decoding = int(np.count_nonzero(decodes))
        work = work or Work(num_decoding + given.num_tokens, has_drafts=given.num_tokens > 0)
        num_drafted = 0 if model_drafts is None else model_drafts.tokens.shape[1]
        return EndedStep(
            **vars(work),
            num_rows=num_decoding,
            num_context=int(levels[: len(decodes)].sum(where=decodes)),
            num_new_tokens=int(nums.sum()),
            seconds=seconds,
            promised=given.promised,
            num_passes=passes_for(num_drafted) if self._has_model else 0,
            model_shares=self._model_share.count_accepted(self._row_ids, nums),
        )

    def _seconds_until(self, now: float, goes_on: bool) -> float | None:
        """What the step that ends now took, if it has a row of the last one (`goes_on`). Else nobody knows:
        the engine may have waited for a request, slept, or taken new weights."""
        seconds = None if self._last_end is None or not goes_on else now - self._last_end
        self._last_end, self._last_seconds = now, seconds or 0.0
        return seconds

    def _draft_decoding(
        self,
        step: EndedStep,
        tracked: _TrackedRows,
        decodes: _Bools,
        token_ids: Int32Array,
        levels: Int32Array,
        next_step: NextStep,
    ) -> Drafts:
        """Index, and draft what the gate lets through; tracked: those that decode, as `decodes`."""
        drafts = Drafts.none(len(decodes), self._num_speculative_tokens)
        opening = self._gate.begin(step)
        if opening.min_survival is not None and self._pad_to * step.num_rows > self._max_draft_tokens:
            opening = Opening(None)
            self.counters.num_steps_off_threshold += 1
        proposed = self._propose_after(tracked, token_ids, levels, opening.min_survival, next_step)
        self._count(step, tracked, proposed)
        if opening.min_survival is None:
            return drafts
        if next_step.takes_drafts:
            drafts = self._chosen_drafts(tracked, decodes, proposed)
            self._model_share.count_drafted(self._row_ids, drafts, next_step.model_drafts)
        elif self._has_model:
            # Too late for that step, but the model has something for every other one. The text's drafts alone
            # would wrongly tell the gate that drafting does not pay.
            self.counters.num_steps_on += 1
        elif not self._chosen(proposed).lengths.any():  # too late too: what the gate says is for other steps
            return drafts
        # No room shortly before the gate measures a plain step, which must not wait for drafts.
        return drafts._replace(
            drafts_wanted=not opening.probe_in_two, num_model_tokens=opening.num_model_tokens
        )

    def catch_up(self, has_time: Callable[[], bool]) -> None:
        """Index unindexed text, piece by piece, while there is time: for who waits for a device."""
        while self._has_unindexed and has_time():
            if not self.index.catch_up(PIECE_TOKENS):
                self._groups.hand_on_next_text()

    @property
    def _has_unindexed(self) -> bool:
        return self.index.has_unindexed or self._groups.has_waiting

    def _mapped(self, request_ids: Sequence[str]) -> tuple[_TrackedRows, bool]:
        """The rows that are in the index, and whether one of all was a row of the step before."""
        # Batches change seldom; comparing two lists of the same string objects is cheap.
        if self._tracked is not None and self._row_ids == request_ids:
            return self._tracked, True
        requests = enumerate(self._requests[request_id] for request_id in request_ids)
        # The target adds a token of its own, so a draft that ends one short of the limit is enough.
        found = [(row, r.sequence.handle, r.max_level - 1) for row, r in requests if r.sequence is not None]
        self._tracked = _TrackedRows(*np.array(found, np.int32).reshape(-1, 3).T.copy())
        last, self._row_ids = self._row_ids, list(request_ids)
        return self._tracked, not set(last).isdisjoint(request_ids)

    def _count(self, step: EndedStep, tracked: _TrackedRows, proposed: StepResult) -> None:
        """Count the step that ended: its decoding rows, and those of them that are in the index."""
        self.counters.num_steps += 1
        self.counters.num_row_steps += step.num_rows
        self.counters.num_accepted_tokens += step.num_new_tokens - step.num_rows
        self.counters.num_untracked_rows += step.num_rows - len(tracked.rows) + proposed.num_dropped
        self.counters.num_unindexed_rows += proposed.num_unindexed

    def _propose_after(
        self,
        tracked: _TrackedRows,
        token_ids: Int32Array,
        levels: Int32Array,
        min_survival: float | None,
        next_step: NextStep = TAKES_ANY,
    ) -> StepResult:
        """Index what these rows got and more; propose tokens of this survival or more, None: none."""
        tracked.set_levels(levels, min_survival is not None, next_step.room)
        self._groups.hand_on_next_text()
        result = self.index.index_and_draft(
            tracked.sequences, token_ids, tracked.rows, tracked.levels, tracked.max_draft_tokens,
            min_survival or 0.0, PIECE_TOKENS, next_step.model_drafts,
        )  # fmt: skip
        if self._has_unindexed:  # also where nobody waits for a device
            end = self._clock() + min(STEP_SHARE * self._last_seconds, MOST_SECONDS)
            self.catch_up(lambda: self._clock() < end)
        if result.num_dropped:
            self._forget_dropped(tracked, result.num_draft_tokens)
        return result

    def _forget_dropped(self, tracked: _TrackedRows, nums_draft_tokens: Int32Array) -> None:
        """Rows that a step has dropped (-1, here 0 then) are not in the index any more."""
        for row in tracked.rows[nums_draft_tokens < 0].tolist():
            request = self._requests[self._row_ids[row]]
            assert request.sequence is not None
            self._groups.drop(request.sequence)
            request.sequence = None
        self._tracked = None
        np.maximum(nums_draft_tokens, 0, out=nums_draft_tokens)

    def _chosen_drafts(self, tracked: _TrackedRows, decodes: _Bools, proposed: StepResult) -> Drafts:
        """What the open gate takes of each row's draft: its first tokens. The next step verifies them."""
        choice = self._chosen(proposed)
        self.counters.num_drafts += int(np.count_nonzero(choice.lengths))
        self.counters.num_draft_tokens += int(choice.lengths.sum())
        drafts = Drafts.none(len(decodes), self._num_speculative_tokens)
        drafts.tokens[tracked.rows], drafts.lengths[tracked.rows] = proposed.draft_tokens, choice.lengths
        if self._pad_to and choice.pads:  # steps with drafts are of one shape only
            drafts.tokens[np.arange(self._pad_to) >= drafts.lengths[:, None]] = PAD
            drafts.lengths[decodes] = self._pad_to
        self._given = _Given(int(drafts.lengths.sum()), choice.promised)
        return drafts

    def _chosen(self, proposed: StepResult) -> Choice:
        """How much of each row's draft the open gate takes."""
        lengths = _likeliest(proposed.survivals, proposed.num_draft_tokens, self._max_draft_tokens)
        return self._gate.choose(proposed.survivals, lengths)

    def take_counters(self) -> EngineCounters:
        """The counts since the last call."""
        num_left_out = self.index.stats().num_texts_left_out
        self.counters.num_texts_left_out = num_left_out - self._num_texts_left_out
        self._num_texts_left_out = num_left_out
        self.counters.num_samples_dropped = self.history.take_num_dropped()
        return self.counters.take()

    def note_new_weights(self, training_step: int | None = None) -> None:
        """The target's weights have changed: the time until the next step is no step's. `training_step`: the
        one that begins, by default the one after the last."""
        last = self.history.training_step
        self.history.training_step = last + 1 if training_step is None else training_step
        self._last_end = None


def _likeliest(survivals: npt.NDArray[np.float32], lengths: Int32Array, most: int) -> Int32Array:
    """How much of each draft is among the `most` likeliest tokens; the others are those of `choose`."""
    if lengths.sum() <= most:
        return lengths
    is_draft = np.arange(survivals.shape[1]) < lengths[:, None]
    kept = np.argpartition(-survivals[is_draft], most - 1)[:most]
    return np.bincount(np.nonzero(is_draft)[0][kept], minlength=len(lengths)).astype(np.int32)
