"""The price of a draft token where the options name none: mode sam spends no more than SuffixDecoding would.

One price is not one number of draft tokens: text that is easy to foresee gets long drafts at any price. So a
few groups are followed: what the target says for them is decoded a second time, with SuffixDecoding's own
drafts (mode suffix_policy) and at the pace that these give each row. The draft tokens that this takes per
step are the budget; the price follows what the followed groups themselves have spent over it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.config import SpecConfig
from rollout_spec.index import (
    FULL_WEIGHT,
    BudgetExceeded,
    Int32Array,
    OutOfMemory,
    StepResult,
    SuffixIndex,
    index_options,
)


class Setting(NamedTuple):
    """Of SuffixDecoding (arXiv 2411.04975), and the share of its draft tokens that may be spent."""

    max_spec_factor: float
    share: float


# As vLLM has it by default, and one that drafts nearly all it can. With history that may be spent whole.
SETTINGS = (Setting(1.0, 1.0), Setting(4.0, 2 / 3))
SETTINGS_WITH_HISTORY = (Setting(4.0, 1.0),)
REFERENCE_MIN_TOKEN_PROB = 0.1

AIM = 0.995  # of the budget, since what is spent is known a little late
LEAST_PRICE = 0.055
STEEPNESS = 1e-3  # of the logarithm of the price, for every token spent too much
MEMORY = 1_000_000  # row-steps after which what was spent is mostly forgotten

# Who is followed: one row in ROWS_PER_FOLLOWED; after the first row-steps, one step in STEPS_PER_FOLLOWED.
ROWS_PER_FOLLOWED = 8
STEPS_PER_FOLLOWED = 16
NUM_FIRST_ROW_STEPS = 1 << 18
DECODE_EVERY = 4  # steps of an engine: what these bring is decoded at once
MAX_STEPS = 10  # of a reference, at once: more than are due
MAX_GIVEN = 256  # tokens that are only indexed, at once
BYTES_SHARE = 16  # of the byte budget, for each reference's index

_CLOSED = -1


class _Spending:
    """Draft tokens, and for how many rows and steps; what was long ago counts less and less."""

    def __init__(self) -> None:
        self.num_row_steps = self.num_draft_tokens = 0.0

    def add(self, num_row_steps: int, num_draft_tokens: int) -> None:
        kept = 1.0 - num_row_steps / MEMORY
        self.num_row_steps = kept * self.num_row_steps + num_row_steps
        self.num_draft_tokens = kept * self.num_draft_tokens + num_draft_tokens


class _Reference:
    """SuffixDecoding with one setting, for all groups that are followed, and what it has spent."""

    def __init__(self, setting: Setting, config: SpecConfig) -> None:
        self.share = setting.share
        self.spent = _Spending()
        self.index = SuffixIndex(
            num_speculative_tokens=config.num_speculative_tokens,
            mode="suffix_policy",
            max_spec_factor=setting.max_spec_factor,
            min_token_prob=REFERENCE_MIN_TOKEN_PROB,
            max_bytes=(config.max_index_mb << 20) // BYTES_SHARE,
        )

    @property
    def budget(self) -> float:
        """Draft tokens per row and step that may be spent."""
        spent = self.spent
        return self.share * spent.num_draft_tokens / spent.num_row_steps if spent.num_row_steps else math.inf


class _Decoding:
    """A followed group in one reference's index: arrays of a row for each of its sequences."""

    def __init__(self, reference: _Reference, prompt: Int32Array) -> None:
        self.reference = reference
        self.group = reference.index.open_group(prompt)
        self.sequences = np.empty(0, np.int32)
        self.levels = np.empty(0, np.int32)  # tokens that are decoded
        self.given = np.empty(0, np.int32)  # tokens that were said without drafts: they are indexed only

    def decode(self, tokens: Int32Array, ends: Int32Array, growing: Int32Array) -> None:
        if (self.levels < self.given).any():
            self.index_given(tokens)
            return
        spent = self.reference.index.replay(
            self.sequences, tokens, self.levels, ends, growing, max_steps=MAX_STEPS
        )
        self.reference.spent.add(*spent)

    def index_given(self, tokens: Int32Array) -> None:
        """What was said without drafts, a part of it."""
        num_left = np.maximum(self.given - self.levels, 0)
        self.levels += np.minimum(num_left, max(1, MAX_GIVEN // int(np.count_nonzero(num_left))))
        self.index_all(tokens)

    def index_all(self, tokens: Int32Array) -> None:
        rows = np.arange(len(self.sequences), dtype=np.int32)
        self.reference.index.step(self.sequences, tokens, rows, self.levels, np.zeros_like(rows))

    def keep(self, is_kept: npt.NDArray[np.bool_]) -> None:
        for sequence in self.sequences[~is_kept].tolist():
            self.reference.index.close_sequence(sequence)
        self.sequences, self.levels, self.given = (
            array[is_kept] for array in (self.sequences, self.levels, self.given)
        )

    def close(self) -> None:
        self.keep(np.zeros(len(self.sequences), np.bool_))
        self.reference.index.close_group(self.group)


class _Followed:
    """A group that is decoded a second time: a row for each sequence, with what the target has said."""

    def __init__(self, references: list[_Reference], prompt: Int32Array) -> None:
        self._num_prompt_tokens = len(prompt)
        self._decodings = [_Decoding(reference, prompt) for reference in references]
        self._ids: list[int] = []  # the engine's sequences; _CLOSED
        self._tokens = np.empty((0, 1), np.int32)
        self._starts = np.empty(0, np.int32)
        self._ends = np.empty(0, np.int32)  # of what was said
        self._growing = np.empty(0, np.int32)  # 1: with drafts

    def open(self, sequence: int, after_prompt: bool, weight: int) -> None:
        self._drop_closed()
        start = np.int32(self._num_prompt_tokens if after_prompt else 0)
        for decoding in self._decodings:
            opened = decoding.reference.index.open_sequence(
                decoding.group, after_prompt=after_prompt, weight=weight
            )
            decoding.sequences = np.append(decoding.sequences, np.int32(opened))
            decoding.levels = np.append(decoding.levels, start)
            decoding.given = np.append(decoding.given, start)
        self._ids.append(sequence)
        self._starts = np.append(self._starts, start)
        self._ends = np.append(self._ends, start)
        self._growing = np.append(self._growing, np.int32(0))
        self._resize(self._tokens.shape[1])

    def hear(self, sequence: int, said: Int32Array, *, after_start: bool = False, drafts: bool) -> bool:
        """What a sequence has said so far, drafted from now on or not; False: it has begun anew.

        said: all its tokens, or those after the prompt of the group if it is `after_start`.
        """
        row = self._ids.index(sequence)
        first = int(self._starts[row]) if after_start else 0
        end, level = int(self._ends[row]), first + len(said)
        if level < end:
            return False
        if level > self._tokens.shape[1]:
            self._resize(2 * level)
        self._tokens[row, end:level] = said[end - first :]
        self._ends[row] = level
        if level > end and not self._growing[row]:
            for decoding in self._decodings:
                decoding.given[row] = level
        self._growing[row] = drafts
        return True

    def close_sequence(self, sequence: int) -> None:
        row = self._ids.index(sequence)
        self._ids[row] = _CLOSED
        self._growing[row] = 0

    def decode(self, reference: int) -> None:
        """A bounded part of what can be. Text without drafts is not even indexed until there are some."""
        if _CLOSED in self._ids:
            self._drop_closed()
        decoding = self._decodings[reference]
        if (decoding.levels < self._ends).any() and (self._ends > decoding.given).any():
            decoding.decode(self._tokens, self._ends, self._growing)

    def close(self) -> None:
        for decoding in self._decodings:
            decoding.close()

    def _drop_closed(self) -> None:
        """Of the closed sequences those that are decoded; their text stays in the group."""
        is_kept = np.array(self._ids, np.int32) != _CLOSED
        for decoding in self._decodings:
            is_kept |= decoding.levels < self._ends
        if is_kept.all():
            return
        for decoding in self._decodings:
            decoding.index_all(self._tokens)
            decoding.keep(is_kept)
        self._ids = list(compress(self._ids, is_kept))
        self._tokens, self._starts, self._ends, self._growing = (
            array[is_kept] for array in (self._tokens, self._starts, self._ends, self._growing)
        )

    def _resize(self, num_columns: int) -> None:
        tokens = np.zeros((len(self._ids), num_columns), np.int32)
        rows, columns = self._tokens.shape
        tokens[:rows, :columns] = self._tokens
        self._tokens = tokens


class SuffixPrice:
    """Follows some groups of an index. One per index; not thread-safe.

    Args:
        config: the options of the index.
    """

    def __init__(self, config: SpecConfig) -> None:
        self.value = self._first = config.least_survival
        """The price, as min_token_prob takes it."""
        settings = SETTINGS_WITH_HISTORY if config.history else SETTINGS
        self._references = [_Reference(setting, config) for setting in settings]
        self._followed: dict[int, _Followed] = {}  # by the group
        self._group_of: dict[int, int] = {}  # of the open sequences that are followed
        self._is_followed = np.zeros(64, np.bool_)  # by the sequence; the last stands for those beyond
        self._batch: Int32Array | None = None  # the sequences of the last step
        self._entries = np.empty(0, np.intp)  # those of them that are followed
        # What these were allowed to draft and what they did, in each step that is not taken in yet.
        self._drafted: list[tuple[Int32Array, Int32Array]] = []
        self._are_drafting = False
        self._num_open = 0
        self._num_calls = 0
        self._allowance = float(NUM_FIRST_ROW_STEPS)  # of row-steps of followed groups
        self._spent = _Spending()  # by the followed groups, as by each reference for them

    def open_group(self, group: int, prompt: Int32Array) -> None:
        num_followed = len(self._group_of)
        if self._allowance > 0 and ROWS_PER_FOLLOWED * num_followed <= self._num_open:
            with self._unless_full():
                self._followed[group] = _Followed(self._references, prompt)

    def close_group(self, group: int) -> None:
        followed = self._followed.pop(group, None)
        if followed is not None:
            followed.close()

    def open_sequence(self, sequence: int, group: int, after_prompt: bool, weight: int) -> None:
        self._num_open += 1
        if group not in self._followed:
            return
        with self._unless_full():
            self._followed[group].open(sequence, after_prompt, weight)
            self._group_of[sequence] = group
            if sequence >= len(self._is_followed) - 1:
                self._is_followed = np.append(self._is_followed, np.zeros(sequence + 1, np.bool_))
            self._is_followed[sequence] = True
            self._batch = None

    def follows(self, sequence: int) -> bool:
        return sequence in self._group_of

    def close_sequence(self, sequence: int, said: Int32Array | None) -> None:
        """said: all that it has said after its start, if it is followed."""
        self._num_open -= 1
        if said is None:
            return
        self._hear(sequence, said, after_start=True, drafts=False)
        group = self._group_of.pop(sequence, None)
        if group is not None:
            self._is_followed[sequence] = False
            self._batch = None
            self._followed[group].close_sequence(sequence)
            with self._unless_full():
                for reference in range(len(self._references)):
                    self._followed[group].decode(reference)

    def step(
        self,
        sequences: Int32Array,
        token_ids: Int32Array,
        rows: Int32Array,
        levels: Int32Array,
        max_draft_tokens: Int32Array,
        num_draft_tokens: Int32Array,
    ) -> None:
        """What a step of the index was given, and what it has drafted."""
        self._allowance += len(sequences) / STEPS_PER_FOLLOWED
        if not self._group_of:
            return
        is_new = sequences is not self._batch  # while it is the same array it is the same batch
        if is_new:
            self._batch = sequences
            self._entries = np.flatnonzero(self._is_followed.take(sequences, mode="clip"))
        self._drafted.append((max_draft_tokens.take(self._entries), num_draft_tokens.take(self._entries)))
        self._num_calls += 1
        decodes = self._num_calls % DECODE_EVERY == 0
        if decodes or is_new:
            self._take_in(sequences, token_ids, rows, levels)
        if decodes and self._are_drafting:
            self._decode(self._num_calls // DECODE_EVERY % len(self._references))

    def _take_in(
        self, sequences: Int32Array, token_ids: Int32Array, rows: Int32Array, levels: Int32Array
    ) -> None:
        """What the followed groups have drafted, and what they have said if that was with drafts."""
        num_row_steps = sum(int(np.count_nonzero(room)) for room, _ in self._drafted)
        self._spent.add(num_row_steps, sum(int(numbers.sum()) for _, numbers in self._drafted))
        self._allowance -= num_row_steps
        drafts = self._drafted[-1][0] > 0
        self._drafted.clear()
        if self._are_drafting or drafts.any():
            for entry, draft in zip(self._entries.tolist(), drafts.tolist(), strict=True):
                self._hear(int(sequences[entry]), token_ids[rows[entry], : levels[entry]], drafts=draft)
        self._are_drafting = bool(drafts.any())

    def _decode(self, reference: int) -> None:
        """The references take turns, so that no step waits for all."""
        with self._unless_full():
            for followed in self._followed.values():
                followed.decode(reference)
        budget = min(each.budget for each in self._references)
        if math.isfinite(budget):
            excess = self._spent.num_draft_tokens - AIM * budget * self._spent.num_row_steps
            log_price = math.log(self._first) + STEEPNESS * excess
            self.value = math.exp(min(0.0, max(math.log(LEAST_PRICE), log_price)))

    def clear(self) -> None:
        """Follow none of the groups any more; what was spent stays."""
        for reference in self._references:
            reference.index.clear()
        self._followed.clear()
        self._group_of.clear()
        self._is_followed[:] = False
        self._batch = None

    def close(self) -> None:
        for reference in self._references:
            reference.index.close()

    def _hear(self, sequence: int, said: Int32Array, *, after_start: bool = False, drafts: bool) -> None:
        if sequence in self._group_of:  # else forgotten in this very step
            followed = self._followed[self._group_of[sequence]]
            if not followed.hear(sequence, said, after_start=after_start, drafts=drafts):
                self.clear()

    @contextlib.contextmanager
    def _unless_full(self) -> Iterator[None]:
        try:
            yield
        except (BudgetExceeded, OutOfMemory):
            self.clear()


class PricedIndex(SuffixIndex):
    """A suffix index whose drafts end where their survival falls below a SuffixPrice.

    Args:
        config: the options of `rollout.spec`.

    Raises:
        ConfigError: the corpus cannot be used; OutOfMemory, BudgetExceeded.
    """

    def __init__(self, config: SpecConfig) -> None:
        super().__init__(**index_options(config) | {"min_token_prob": 0.0, "keep_texts": True})
        self.price = SuffixPrice(config)

    @property
    def min_token_prob(self) -> float:
        return self.price.value

    def open_group(self, prompt_token_ids: Int32Array) -> int:
        group = super().open_group(prompt_token_ids)
        self.price.open_group(group, prompt_token_ids)
        return group

    def close_group(self, group: int) -> None:
        super().close_group(group)
        self.price.close_group(group)

    def open_sequence(self, group: int, *, after_prompt: bool = True, weight: int = FULL_WEIGHT) -> int:
        sequence = super().open_sequence(group, after_prompt=after_prompt, weight=weight)
        self.price.open_sequence(sequence, group, after_prompt, weight)
        return sequence

    def close_sequence(self, sequence: int) -> None:
        said = self.text(sequence) if self.price.follows(sequence) else None
        super().close_sequence(sequence)
        self.price.close_sequence(sequence, said)

    def step(
        self,
        sequences: Int32Array,
        token_ids: Int32Array,
        rows: Int32Array,
        levels: Int32Array,
        max_draft_tokens: Int32Array,
        min_token_prob: float = 0.0,
    ) -> StepResult:
        price = max(min_token_prob, self.min_token_prob)
        result = super().step(sequences, token_ids, rows, levels, max_draft_tokens, price)
        self.price.step(sequences, token_ids, rows, levels, max_draft_tokens, result.num_draft_tokens)
        return result

    def clear(self) -> None:
        super().clear()
        self.price.clear()

    def close(self) -> None:
        super().close()
        self.price.close()


def make_index(config: SpecConfig) -> SuffixIndex:
    """The index that the options of `rollout.spec` describe.

    Raises:
        ConfigError: the corpus cannot be used; OutOfMemory, BudgetExceeded.
    """
    return PricedIndex(config) if config.has_own_price else SuffixIndex(**index_options(config))
