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
from rollout_spec.drafting.drafts import TAKES_ANY, Drafts, ModelDrafts, NextStep, StepsToCome, passes_for
from rollout_spec.drafting.gate.gate import AutoGate, Choice, FixedGate, Gate, Opening
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

    def __init__(
        self, request_ids: list[str], rows: Int32Array, sequences: Int32Array, max_draft_levels: Int32Array
    ) -> None:
        self.request_ids = request_ids  # of all rows of the matrix
        self.rows, self.sequences = rows, sequences  # of the matrix, and of the index
        self._max_draft_levels = max_draft_levels  # at which drafts end at the latest
        self.levels, self.max_draft_tokens = np.zeros((2, len(rows)), np.int32)

    def among(self, kept: _Bools) -> _TrackedRows:
        """The rows for which `kept`, bool [rows of the matrix], is true."""
        chosen = kept[self.rows]
        arrays = self.rows[chosen], self.sequences[chosen], self._max_draft_levels[chosen]
        return _TrackedRows(self.request_ids, *arrays)

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


class _Batch(NamedTuple):
    """What `Drafter.draft` is told of its rows, and of the steps before and after it."""

    tracked: _TrackedRows  # of the rows that decode
    nums_new: Int32Array
    decodes: _Bools  # the rows that got tokens
    token_ids: Int32Array
    levels: Int32Array
    model_drafts: ModelDrafts | None
    next_step: NextStep


class _Given(NamedTuple):
    """What the next step is given, and what is wanted of those after it."""

    drafts: Drafts
    to_come: StepsToCome
    promised: float = 0.0  # of their tokens, by the gate
    model_share: ModelShare | None = None  # in them; None: no model has drafted for that step


class _LastStep(NamedTuple):
    """What a call of `Drafter.draft` leaves to the next one, beside the rows while the batch stays."""

    request_ids: Sequence[str] = ()  # of the step's rows
    ended: float | None = None  # by the drafter's clock; None: the time until the next one's is no step's
    given: _Given = _Given(Drafts.none(0), StepsToCome())

    def seconds_until(self, now: float, request_ids: Sequence[str]) -> float | None:
        """What the step of these requests took, which ends now, if one of them was in this step too. Else
        nobody knows: the engine may have waited for a request, slept, or taken new weights."""
        goes_on = self.request_ids is request_ids or not set(self.request_ids).isdisjoint(request_ids)
        return now - self.ended if self.ended is not None and goes_on else None


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
        self._gate: Gate = (
            AutoGate(self.counters, self._pad_to, most_model_tokens)
            if isinstance(config.batch_threshold, str)
            else FixedGate(self.counters, config.batch_threshold, config.min_survival, most_model_tokens)
        )
        self._clock = clock
        self._last = _LastStep()
        self.index = make_index(config)
        self.history = History(config.history, config.max_index_bytes, vocab_size)
        self._groups = Groups(self.index, self.history, self.counters)
        self._num_texts_left_out = 0  # ever, as counted so far
        self._requests: dict[str, _Request] = {}
        self.request_ids: Collection[str] = self._requests.keys()  # of those that run
        self._tracked: _TrackedRows | None = None  # of the last batch; None: some are others now

    @property
    def to_come(self) -> StepsToCome:
        """What the last call of `draft` wants."""
        return self._last.given.to_come

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
        self._groups.end_samples(samples)

    def draft(
        self,
        request_ids: Sequence[str],
        nums_new_tokens: npt.ArrayLike,
        token_ids: Int32Array,
        levels: Int32Array,
        work: Work | None = None,
        model_drafts: ModelDrafts | None = None,
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
            model_drafts: of that step, after the tokens that each row has now; None: no model drafted in it.
            next_step: what the next one can take.
            ended: when the step did, by the drafter's clock; None: just now.

        Raises NativeError: an argument is wrong that is no row's; nothing was indexed then. A full index
        raises nothing: idle groups leave it, then idle text, then the requests that do not fit. So do those
        whose rows have negative tokens.
        """
        started = time.perf_counter()
        last, self._last = self._last, _LastStep()  # a call that fails leaves nothing
        num_rows, nums = len(request_ids), np.asarray(nums_new_tokens)
        if len(nums) != num_rows or len(levels) < num_rows:
            others = f"nums_new_tokens has {len(nums)}, levels has {len(levels)}"
            raise InvalidArgument(f"request_ids: has {num_rows} entries, {others}")
        tracked, decodes = self._tracked_rows(request_ids), nums > 0
        if not decodes.all():
            tracked = tracked.among(decodes)
        batch = _Batch(tracked, nums, decodes, token_ids, levels, model_drafts, next_step)
        now = self._clock() if ended is None else ended
        step = self._ended_step(batch, last, now, work)
        if step.num_rows:
            given = self._draft_decoding(batch, step)
        else:  # the gate is not asked, and wants what it wanted
            self._index_and_propose(batch, Opening(None))
            given = _Given(Drafts.none(num_rows, self._num_speculative_tokens), last.given.to_come)
        if self._has_unindexed:  # also where nobody waits for a device
            end = self._clock() + min(STEP_SHARE * (step.seconds or 0.0), MOST_SECONDS)
            self.catch_up(lambda: self._clock() < end)
        self._last = _LastStep(tracked.request_ids, now, given)
        self.counters.draft_seconds += time.perf_counter() - started
        return given.drafts

    def _ended_step(self, batch: _Batch, last: _LastStep, now: float, work: Work | None) -> EndedStep:
        """The step that ends now, which had what the last call gave it; counts what it took of a model's."""
        request_ids, nums_new, given = batch.tracked.request_ids, batch.nums_new, last.given
        num_decoding, share = int(np.count_nonzero(batch.decodes)), given.model_share
        model_shares = share and share.count_accepted(self.counters, request_ids, nums_new)
        if work is None:
            num_drafts = int(given.drafts.lengths.sum())
            work = Work(num_decoding + num_drafts, has_drafts=num_drafts > 0)
        num_drafted = 0 if batch.model_drafts is None else batch.model_drafts.tokens.shape[1]
        return EndedStep(
            **vars(work),
            num_rows=num_decoding,
            num_context=int(batch.levels[: len(nums_new)].sum(where=batch.decodes)),
            num_new_tokens=int(nums_new.sum()),
            seconds=last.seconds_until(now, request_ids),
            promised=given.promised,
            num_passes=passes_for(num_drafted) if self._has_model else 0,
            model_shares=model_shares,
        )

    def _draft_decoding(self, batch: _Batch, step: EndedStep) -> _Given:
        """Index the rows that decode, and draft what the gate lets through."""
        opening = self._gate.begin(step)
        if opening.is_open and self._pad_to * step.num_rows > self._max_draft_tokens:
            opening = Opening(None)
            self.counters.num_steps_off_threshold += 1
        proposed = self._index_and_propose(batch, opening)
        self._count(step, batch.tracked, proposed)
        none = Drafts.none(len(batch.decodes), self._num_speculative_tokens)
        if not opening.is_open:
            return _Given(none, StepsToCome())
        # No room shortly before the gate measures a plain step, which must not wait for drafts.
        to_come = StepsToCome(not opening.probe_in_two, opening.num_model_tokens)
        if batch.next_step.takes_drafts:
            return self._give(self._choose(step, proposed), proposed, batch, to_come)
        if self._has_model:  # a gate that weighed the text's drafts alone might wrongly close
            self.counters.num_steps_on += 1
        elif not self._choose(step, proposed).lengths.any():  # the step, had it room, would have stayed empty
            to_come = to_come._replace(drafts_wanted=False)
        return _Given(none, to_come)

    def catch_up(self, has_time: Callable[[], bool]) -> None:
        """Index unindexed text, piece by piece, while there is time: for who waits for a device."""
        while self._has_unindexed and has_time():
            if not self.index.catch_up(PIECE_TOKENS):
                self._groups.hand_on_next_text()

    @property
    def _has_unindexed(self) -> bool:
        return self.index.has_unindexed or self._groups.has_waiting

    def _tracked_rows(self, request_ids: Sequence[str]) -> _TrackedRows:
        """Those of these requests' rows that are in the index."""
        # Batches change seldom; comparing two lists of the same string objects is cheap.
        if self._tracked is None or self._tracked.request_ids != request_ids:
            requests = enumerate(self._requests[request_id] for request_id in request_ids)
            # The target adds a token of its own, so a draft that ends one short of the limit is enough.
            found = [(row, r.sequence.handle, r.max_level - 1) for row, r in requests if r.sequence]
            arrays = np.array(found, np.int32).reshape(-1, 3).T.copy()
            self._tracked = _TrackedRows(list(request_ids), *arrays)
        return self._tracked

    def _count(self, step: EndedStep, tracked: _TrackedRows, proposed: StepResult) -> None:
        """Count the step that ended: its decoding rows, and those of them that are in the index."""
        self.counters.num_steps += 1
        self.counters.num_row_steps += step.num_rows
        self.counters.num_accepted_tokens += step.num_new_tokens - step.num_rows
        self.counters.num_untracked_rows += step.num_rows - len(tracked.rows) + len(proposed.dropped)
        self.counters.num_unindexed_rows += proposed.num_unindexed

    def _index_and_propose(self, batch: _Batch, opening: Opening) -> StepResult:
        """Index what the tracked rows got and more; propose what an open gate lets through."""
        tracked = batch.tracked
        tracked.set_levels(batch.levels, opening.is_open, batch.next_step.room)
        self._groups.hand_on_next_text()
        result = self.index.index_and_draft(
            tracked.sequences, batch.token_ids, tracked.rows, tracked.levels, tracked.max_draft_tokens,
            opening.min_survival or 0.0, PIECE_TOKENS, batch.model_drafts,
        )  # fmt: skip
        for i in result.dropped:
            request = self._requests[tracked.request_ids[tracked.rows[i]]]
            assert request.sequence is not None
            self._groups.drop(request.sequence)
            request.sequence = self._tracked = None
        return result

    def _choose(self, step: EndedStep, proposed: StepResult) -> Choice:
        """How much of each row's draft the open gate takes; it counts that."""
        lengths = _likeliest(proposed.survivals, proposed.num_draft_tokens, self._max_draft_tokens)
        return self._gate.choose(step, proposed.survivals, lengths)

    def _give(self, choice: Choice, proposed: StepResult, batch: _Batch, to_come: StepsToCome) -> _Given:
        """What the gate takes of each row's draft, its first tokens, and padding."""
        rows, model_drafts = batch.tracked.rows, batch.model_drafts
        drafts = Drafts.none(len(batch.decodes), self._num_speculative_tokens)
        self.counters.num_drafts += int(np.count_nonzero(choice.lengths))
        self.counters.num_draft_tokens += int(choice.lengths.sum())
        drafts.tokens[rows], drafts.lengths[rows] = proposed.draft_tokens, choice.lengths
        if self._pad_to and choice.pads:  # steps with drafts are of one shape only
            drafts.tokens[np.arange(self._pad_to) >= drafts.lengths[:, None]] = PAD
            drafts.lengths[batch.decodes] = self._pad_to
        share = model_drafts and ModelShare.of_drafts(batch.tracked.request_ids, drafts, model_drafts)
        self.counters.num_model_draft_tokens += sum(share.lengths.values()) if share else 0
        return _Given(drafts, to_come, choice.promised, share)

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
        self._last = self._last._replace(ended=None)


def _likeliest(survivals: npt.NDArray[np.float32], lengths: Int32Array, most: int) -> Int32Array:
    """How much of each draft is among the `most` likeliest tokens; the others are those of `choose`."""
    if lengths.sum() <= most:
        return lengths
    is_draft = np.arange(survivals.shape[1]) < lengths[:, None]
    kept = np.argpartition(-survivals[is_draft], most - 1)[:most]
    return np.bincount(np.nonzero(is_draft)[0][kept], minlength=len(lengths)).astype(np.int32)
