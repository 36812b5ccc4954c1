"""Rows of arrays that native code reads and writes: of an engine's batch, and of texts that are followed."""

from __future__ import annotations

import dataclasses

import numpy as np

from rollout_spec.native import (
    BoolArray,
    Float64Array,
    Int32Array,
    Int64Array,
    InvalidArgument,
    check_matrix,
    check_vector,
    ffi,
    lib,
    writable,
)


class StepRows:
    """Rows of an engine's token matrix that are to be stepped together. `set_levels` before every step.

    `levels` and `max_draft_tokens`, int32 [n], are what `SuffixIndex.step` takes; the same arrays for good.

    Args, arrays that must not be changed any more:
        numbers: int32 [n], of the rows, not negative.
        sequences: int32 [n], their ids in the index.
        last_levels: int32 [n], the levels at which drafts end at the latest.

    Raises:
        InvalidArgument: an array does not fit.
    """

    def __init__(self, numbers: Int32Array, sequences: Int32Array, last_levels: Int32Array) -> None:
        check_vector("sequences", sequences, None)
        for name, array in (("numbers", numbers), ("last_levels", last_levels)):
            check_vector(name, array, len(sequences))
        if numbers.min(initial=0) < 0:
            raise InvalidArgument(f"numbers: {numbers.min()} is negative")
        self.numbers, self.sequences, self._last_levels = numbers, sequences, last_levels
        self.levels, self.max_draft_tokens = np.zeros((2, len(sequences)), np.int32)
        self._largest = int(numbers.max(initial=-1))
        arrays = (numbers, last_levels, self.levels, self.max_draft_tokens)
        self._buffers = [ffi.from_buffer("int32_t[]", array) for array in arrays]
        # Of the last call, which were checked: engines pass the same array in every step.
        self._row_levels: Int32Array | None = None
        self._row_levels_buffer = ffi.NULL

    def __len__(self) -> int:
        return len(self.sequences)

    def among(self, kept: BoolArray) -> StepRows:
        """Those of the rows that are kept, bool [rows of the matrix]."""
        chosen = kept[self.numbers]
        return StepRows(self.numbers[chosen], self.sequences[chosen], self._last_levels[chosen])

    def set_levels(self, levels: Int32Array, may_draft: bool) -> None:
        """Set `levels` and `max_draft_tokens`, which are 0 unless rows may draft.

        Args:
            levels: int32 [rows of the matrix], how many tokens each has.

        Raises:
            InvalidArgument: it does not fit.
        """
        if levels is not self._row_levels:
            check_vector("levels", levels, None)
            if len(levels) <= self._largest:
                raise InvalidArgument(f"levels: has {len(levels)} entries, too few for row {self._largest}")
            self._row_levels_buffer = ffi.from_buffer("int32_t[]", levels)
            self._row_levels = levels
        rows, last_levels, own_levels, max_draft_tokens = self._buffers
        lib.rs_set_levels(
            len(self), rows, self._row_levels_buffer, last_levels, may_draft, own_levels, max_draft_tokens
        )


@dataclasses.dataclass(eq=False)
class Heard:
    """What n sequences of an index have said, and what drafting for them has taken.

    `hear` brings it up to date. What is in the arrays may be changed, the arrays themselves may not.

    Raises:
        InvalidArgument: an array does not fit.
    """

    sequences: Int32Array
    """[n], ids; -1: none, the row stays as it is."""
    token_ids: Int32Array
    """[n, L]; row i has ends[i] tokens, of which those before the start of its sequence are unspecified."""
    ends: Int32Array
    """[n]; at first where the sequence starts."""
    plain: Int32Array
    """[n]: the last token that was said while no row could draft, or this one never had, is before it."""
    growing: Int32Array
    """[n], 1: the sequence was allowed to draft in its last step."""
    spent: Int64Array
    """[n, 2]: the steps in which a sequence was allowed to draft, and the tokens it has drafted."""

    def __post_init__(self) -> None:
        n = len(self.sequences)
        self.struct = ffi.new("rs_heard *")
        self.struct.num_rows = n
        for name in ("sequences", "ends", "plain", "growing"):
            check_vector(name, getattr(self, name), n)
            setattr(self.struct, name, writable("int32_t[]", name, getattr(self, name)))
        check_matrix("spent", self.spent, np.int64, n, 2)
        self.struct.spent = writable("int64_t[]", "spent", self.spent)
        check_matrix("token_ids", self.token_ids, np.int32, n, self.token_ids.shape[-1])
        self._set_tokens(self.token_ids)

    @property
    def has_drafts(self) -> bool:
        """Whether any of the texts came with drafts when they were heard last."""
        return bool(self.struct.has_drafts)

    @classmethod
    def nothing(cls) -> Heard:
        """No rows."""
        none = np.empty(0, np.int32)
        return cls(none, np.empty((0, 1), np.int32), none, none, none, np.empty((0, 2), np.int64))

    def with_row(self, sequence: int, start: int) -> Heard:
        """And one more, for a sequence that starts there."""
        token_ids = np.zeros((1, self.token_ids.shape[1]), np.int32)
        rows = Heard(
            np.append(self.sequences, np.int32(sequence)),
            np.concatenate([self.token_ids, token_ids]),
            np.append(self.ends, np.int32(start)),
            np.append(self.plain, np.int32(start)),
            np.append(self.growing, np.int32(0)),
            np.concatenate([self.spent, np.zeros((1, 2), np.int64)]),
        )
        rows.struct.has_drafts = self.struct.has_drafts
        return rows

    def kept(self, kept: BoolArray) -> Heard:
        """Some of the rows, bool [n]."""
        rows = Heard(
            self.sequences[kept],
            self.token_ids[kept],
            self.ends[kept],
            self.plain[kept],
            self.growing[kept],
            self.spent[kept],
        )
        rows.struct.has_drafts = self.struct.has_drafts
        return rows

    def widen(self, num_columns: int) -> None:
        """Make room for longer texts."""
        token_ids = np.zeros((len(self.sequences), num_columns), np.int32)
        token_ids[:, : self.token_ids.shape[1]] = self.token_ids
        self._set_tokens(token_ids)

    def _set_tokens(self, token_ids: Int32Array) -> None:
        self.token_ids = token_ids
        self.struct.token_ids = writable("int32_t[]", "token_ids", token_ids)
        self.struct.row_stride = token_ids.shape[1]


@dataclasses.dataclass(eq=False)
class Replayed:
    """The n texts of `heard` as another index decodes them; `replay` moves on. Arrays are used as in `Heard`.

    Raises:
        InvalidArgument: an array does not fit.
    """

    heard: Heard
    sequences: Int32Array
    """[n], ids in the index that decodes, each at most once."""
    levels: Int32Array
    """[n], the tokens that are decoded."""
    settled: Float64Array
    """[n, 2]: what of `heard.spent` went into these."""

    def __post_init__(self) -> None:
        n = len(self.heard.sequences)
        check_vector("sequences", self.sequences, n)
        check_vector("levels", self.levels, n)
        check_matrix("settled", self.settled, np.float64, n, 2)
        self._rows, self._budgets = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
        self.struct = ffi.new("rs_replay_rows *")
        self.struct.heard = self.heard.struct
        self.struct.settled = writable("double[]", "settled", self.settled)
        batch = self.struct.batch
        batch.num_rows = batch.num_matrix_rows = n
        batch.sequences = ffi.from_buffer("int32_t[]", self.sequences)
        batch.rows = ffi.from_buffer("int32_t[]", self._rows)
        batch.levels = self.struct.levels = writable("int32_t[]", "levels", self.levels)
        batch.max_draft_tokens = self.struct.max_draft_tokens = ffi.from_buffer("int32_t[]", self._budgets)

    @classmethod
    def nothing(cls, heard: Heard) -> Replayed:
        """No rows."""
        none = np.empty(0, np.int32)
        return cls(heard, none, none, np.empty((0, 2)))

    def with_row(self, heard: Heard, sequence: int, start: int) -> Replayed:
        """And one more, for a sequence that starts there."""
        return Replayed(
            heard,
            np.append(self.sequences, np.int32(sequence)),
            np.append(self.levels, np.int32(start)),
            np.concatenate([self.settled, np.zeros((1, 2))]),
        )

    def kept(self, heard: Heard, kept: BoolArray) -> Replayed:
        """Some of the rows, bool [n]."""
        return Replayed(heard, self.sequences[kept], self.levels[kept], self.settled[kept])
