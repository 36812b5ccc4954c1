"""The suffix index: buffers and error translation around the native module, which only this file imports."""

from __future__ import annotations

import dataclasses
from mmap import mmap
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec._native import ffi, lib
from rollout_spec.config import AUTO, MIN_TOKEN_PROB, SpecConfig
from rollout_spec.corpus import CONTENT_OFFSET, Corpus, open_corpus, write_corpus

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# Raised together with RS_ABI_VERSION in native/rollout_spec_native.h.
ABI_VERSION = 9

_INT32 = np.dtype(np.int32)


class NativeError(Exception):
    """A call into the native index failed and, but for `replay`, changed nothing; the message begins with the
    argument."""

    row: int = -1
    """The entry of the batch that is wrong or does not fit; -1 where it is none in particular."""


class InvalidArgument(NativeError, ValueError):  # noqa: N818
    """An argument has the wrong type, shape or range."""


class UnknownId(NativeError, LookupError):  # noqa: N818
    """No open group or sequence has this id."""


class BegunAnew(NativeError):  # noqa: N818
    """A sequence has had fewer tokens than before: it was started again."""


class OutOfMemory(NativeError, MemoryError):  # noqa: N818
    """The allocator refused."""


class BudgetExceeded(NativeError, MemoryError):  # noqa: N818
    """The index would grow beyond `max_bytes`."""


class StepResult(NamedTuple):
    """Views into the index's buffers, valid until its next step or `replay`.

    n rows, K = num_speculative_tokens.
    """

    draft_tokens: Int32Array
    """[n, K]; row i holds num_draft_tokens[i] draft tokens, the rest is unspecified."""
    survivals: Float32Array
    """[n, K]: estimated probability that the draft up to and with this token is accepted; earliest: 1."""
    num_draft_tokens: Int32Array
    """[n]"""
    match_lens: Int32Array
    """[n], tokens; 0 where nothing matched or max_draft_tokens is 0."""


class StepRows:
    """Rows of an engine's token matrix that are to be stepped together. `set_levels` before every step.

    Args:
        numbers: int32 [n], of the rows, not negative. These three arrays must not be changed any more.
        sequences: int32 [n], their ids in the index.
        last_levels: int32 [n], the levels at which drafts end at the latest.

    Raises:
        InvalidArgument: an array does not fit.
    """

    def __init__(self, numbers: Int32Array, sequences: Int32Array, last_levels: Int32Array) -> None:
        _check_vector("sequences", sequences, None)
        for name, array in (("numbers", numbers), ("last_levels", last_levels)):
            _check_vector(name, array, len(sequences))
        if numbers.min(initial=0) < 0:
            raise InvalidArgument(f"numbers: {numbers.min()} is negative")
        self.numbers, self.sequences, self._last_levels = numbers, sequences, last_levels
        self.levels, self.max_draft_tokens = np.zeros((2, len(sequences)), np.int32)
        self._largest = int(numbers.max(initial=-1))
        self._row_levels: Int32Array | None = None  # checked, and with its place known
        arrays = (numbers, last_levels, self.levels, self.max_draft_tokens)
        self._native = [ffi.from_buffer("int32_t[]", array) for array in arrays]

    def __len__(self) -> int:
        return len(self.sequences)

    def among(self, kept: BoolArray) -> StepRows:
        """Of the rows of the matrix those that are kept, bool."""
        chosen = kept[self.numbers]
        return StepRows(self.numbers[chosen], self.sequences[chosen], self._last_levels[chosen])

    def set_levels(self, row_levels: Int32Array, may_draft: bool) -> None:
        """Set `levels` and `max_draft_tokens`, 0 unless rows may draft.

        Args:
            row_levels: int32, how many tokens each row of the matrix has.

        Raises:
            InvalidArgument: it does not fit.
        """
        if row_levels is not self._row_levels:
            _check_vector("row_levels", row_levels, None)
            if len(row_levels) <= self._largest:
                raise InvalidArgument(
                    f"row_levels: has {len(row_levels)} entries, too few for row {self._largest}"
                )
            self._native_row_levels = ffi.from_buffer("int32_t[]", row_levels)
            self._row_levels = row_levels
        rows, last_levels, levels, max_draft_tokens = self._native
        lib.rs_set_levels(
            len(self), rows, self._native_row_levels, last_levels, may_draft, levels, max_draft_tokens
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
        self._native = ffi.new("rs_heard *")
        self._native.num_rows = n
        for name in ("sequences", "ends", "plain", "growing"):
            _check_vector(name, getattr(self, name), n)
            setattr(self._native, name, _writable("int32_t[]", getattr(self, name)))
        _check_matrix("spent", self.spent, np.int64, n, 2)
        self._native.spent = _writable("int64_t[]", self.spent)
        _check_matrix("token_ids", self.token_ids, np.int32, n, self.token_ids.shape[-1])
        self._set_tokens(self.token_ids)

    @property
    def has_drafts(self) -> bool:
        """Whether any of the texts came with drafts when they were heard last."""
        return bool(self._native.has_drafts)

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
        rows._native.has_drafts = self._native.has_drafts
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
        rows._native.has_drafts = self._native.has_drafts
        return rows

    def widen(self, num_columns: int) -> None:
        """Make room for longer texts."""
        token_ids = np.zeros((len(self.sequences), num_columns), np.int32)
        token_ids[:, : self.token_ids.shape[1]] = self.token_ids
        self._set_tokens(token_ids)

    def _set_tokens(self, token_ids: Int32Array) -> None:
        self.token_ids = token_ids
        self._native.token_ids = _writable("int32_t[]", token_ids)
        self._native.row_stride = token_ids.shape[1]


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
        _check_vector("sequences", self.sequences, n)
        _check_vector("levels", self.levels, n)
        _check_matrix("settled", self.settled, np.float64, n, 2)
        self._rows, self._budgets = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
        self._native = ffi.new("rs_replay_rows *")
        self._native.heard = self.heard._native
        self._native.settled = _writable("double[]", self.settled)
        batch = self._native.batch
        batch.num_rows = batch.num_matrix_rows = n
        batch.sequences = ffi.from_buffer("int32_t[]", self.sequences)
        batch.rows = ffi.from_buffer("int32_t[]", self._rows)
        batch.levels = self._native.levels = _writable("int32_t[]", self.levels)
        batch.max_draft_tokens = self._native.max_draft_tokens = ffi.from_buffer("int32_t[]", self._budgets)

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


class ReplayCounts(NamedTuple):
    """Of one call of `replay`."""

    num_row_steps: int
    """A row that was drafted for, in a step, is one."""
    num_draft_tokens: int
    num_tokens: int
    """Decoded."""
    heard_row_steps: float
    """What `heard` has spent on the tokens that were decoded with drafts."""
    heard_draft_tokens: float


class IndexStats(NamedTuple):
    """What the index holds now; the last three count since it was made."""

    num_groups: int
    num_sequences: int
    num_states: int
    num_transitions: int
    num_tokens: int
    num_bytes: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


def native_version() -> int:
    """The version of the native interface that the compiled module was built from."""
    return int(lib.rs_abi_version()) if hasattr(lib, "rs_abi_version") else 0


if native_version() != ABI_VERSION:
    raise ImportError(
        f"rollout_spec._native was built from version {native_version()} of its interface, this package "
        f"needs {ABI_VERSION}: build it again (in a checkout: pip install -e .)"
    )

FULL_WEIGHT = int(lib.RS_FULL_WEIGHT)
"""What a sequence counts at most."""

_EXCEPTIONS: dict[int, type[NativeError]] = {
    lib.RS_EINVAL: InvalidArgument,
    lib.RS_EUNKNOWN: UnknownId,
    lib.RS_ENOMEM: OutOfMemory,
    lib.RS_EBUDGET: BudgetExceeded,
}
_MODES = {
    "sam": lib.RS_MODE_SAM,
    "earliest": lib.RS_MODE_EARLIEST,
    "frequent": lib.RS_MODE_FREQUENT,
    "suffix_policy": lib.RS_MODE_SUFFIX_POLICY,
}


def _int32(name: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise InvalidArgument(f"{name}={value!r}: must be an int")
    if not -(2**31) <= value < 2**31:
        raise InvalidArgument(f"{name}={value!r}: out of range")
    return int(value)


def _check_vector(name: str, array: Any, length: int | None) -> None:
    """Raise InvalidArgument unless the array is a contiguous int32 vector (of that length)."""
    fits = (
        type(array) is np.ndarray and array.dtype == _INT32 and array.ndim == 1 and array.flags.c_contiguous
    )
    if not fits:
        raise InvalidArgument(f"{name}: must be a contiguous one-dimensional int32 array")
    if length is not None and len(array) != length:
        raise InvalidArgument(f"{name}: has {len(array)} entries, sequences has {length}")


def _check_matrix(name: str, array: Any, dtype: type, *shape: int) -> None:
    """Raise InvalidArgument unless the array is a contiguous matrix of that type and shape."""
    fits = type(array) is np.ndarray and array.dtype == dtype and array.shape == shape
    if not fits or not array.flags.c_contiguous:
        raise InvalidArgument(f"{name}: must be a contiguous array of {dtype.__name__} {list(shape)}")


def _writable(kind: str, array: Any) -> Any:
    """What the native module may write to. Raises InvalidArgument."""
    if not array.flags.writeable:
        raise InvalidArgument("an array that is written to: is read-only")
    return ffi.from_buffer(kind, array)


def _check_status(status: int, native_error: Any) -> None:
    if status != lib.RS_OK:
        error = _EXCEPTIONS.get(status, NativeError)(ffi.string(native_error.message).decode())
        error.row = int(native_error.row)
        raise error


def index_options(config: SpecConfig) -> dict[str, Any]:
    """The arguments of SuffixIndex that the options of `rollout.spec` describe.

    Raises:
        ConfigError: the corpus cannot be used.
    """
    return {
        "num_speculative_tokens": config.num_speculative_tokens,
        "mode": config.mode,
        "min_match_len": config.min_match_len,
        "max_spec_factor": config.max_spec_factor,
        # The automatic gate has prices of its own.
        "min_token_prob": 0.0 if config.batch_threshold == AUTO else config.least_survival,
        "share_contexts": config.group_sharing,
        "max_bytes": config.max_index_mb << 20,
        "corpus": open_corpus(config.corpus) if config.corpus else None,
        "corpus_margin": config.corpus_margin,
    }


class SuffixIndex:
    """Text of groups of sequences, and drafts from it. Not thread safe; one per engine.

    Args:
        num_speculative_tokens: most draft tokens per row and step, K.
        mode: "sam", "earliest", "frequent" or "suffix_policy", see native/rollout_spec_native.h for the
            exact meaning.
        min_match_len: shortest match that is drafted from, tokens; not in mode sam.
        max_spec_factor: draft at most floor(max_spec_factor * match length) tokens; not in mode sam.
        min_token_prob: end a draft where its estimated survival falls below; not in mode earliest.
        share_contexts: mode sam: what one sequence says is evidence for all of the index.
        max_bytes: budget of the whole index, 0: none.
        corpus: drafted from too; it is not copied and not part of the budget.
        corpus_margin: heed the corpus where its match is at least this many tokens longer.

    Raises:
        InvalidArgument: an option is out of range; OutOfMemory, BudgetExceeded.
    """

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        mode: str = SpecConfig.mode,
        min_match_len: int = SpecConfig.min_match_len,
        max_spec_factor: float = SpecConfig.max_spec_factor,
        min_token_prob: float = MIN_TOKEN_PROB,
        share_contexts: bool = SpecConfig.group_sharing,
        max_bytes: int = 0,
        corpus: Corpus | None = None,
        corpus_margin: int = SpecConfig.corpus_margin,
    ) -> None:
        self._index = ffi.NULL
        self._error = ffi.new("rs_error *")
        self._batch = ffi.new("rs_batch *")
        self._id = ffi.new("int32_t *")
        # Of the latest step: the batch has their places, and they stay there for being held.
        self._matrix: Int32Array | None = None
        self._vectors: tuple[Int32Array, ...] | None = None
        if mode not in _MODES:
            raise InvalidArgument(f"mode={mode!r}: must be one of {', '.join(_MODES)}")
        if not 0 <= max_bytes < 2**64:
            raise InvalidArgument(f"max_bytes={max_bytes!r}: out of range")
        options = ffi.new("rs_options *")
        options.num_speculative_tokens = _int32("num_speculative_tokens", num_speculative_tokens)
        options.mode = _MODES[mode]
        options.min_match_len = _int32("min_match_len", min_match_len)
        options.max_spec_factor = max_spec_factor
        options.min_token_prob = min_token_prob
        options.share_contexts = bool(share_contexts)
        options.max_bytes = max_bytes
        options.corpus_margin = _int32("corpus_margin", corpus_margin)
        # Held for as long as the index.
        self._corpus = None if corpus is None else ffi.from_buffer("char[]", corpus.mapped)
        if self._corpus is not None:
            options.corpus = self._corpus + CONTENT_OFFSET
            options.corpus_bytes = len(self._corpus) - CONTENT_OFFSET
        made = ffi.new("rs_index **")
        self._check(lib.rs_index_new(options, made, self._error))
        self._index = ffi.gc(made[0], lib.rs_index_free)
        self._num_speculative_tokens = int(num_speculative_tokens)
        self._min_token_prob = 0.0 if mode == "earliest" else float(min_token_prob)
        self.max_bytes = max_bytes  # 0: no budget
        self._make_buffers(64)

    @property
    def num_drafting(self) -> int:
        """In the latest step, the rows that were allowed to draft."""
        return int(self._batch.num_drafting)

    @property
    def min_token_prob(self) -> float:
        """The price of a draft token: what the next step's `min_token_prob` is at least."""
        return self._min_token_prob

    def open_group(self, prompt_token_ids: Int32Array) -> int:
        """Index a prompt (int32 vector, may be empty) and return the new group's id."""
        _check_vector("prompt_token_ids", prompt_token_ids, None)
        tokens = ffi.from_buffer("int32_t[]", prompt_token_ids) if len(prompt_token_ids) else ffi.NULL
        status = lib.rs_group_open(self._open_index(), tokens, len(prompt_token_ids), self._id, self._error)
        self._check(status)
        return int(self._id[0])

    def close_group(self, group: int) -> None:
        """Forget a group's text, in constant time: what is large of it is freed in the steps that follow, or
        where its bytes are needed, and counts in `stats` until then.

        Raises:
            UnknownId: no such group; InvalidArgument: one of its sequences is open.
        """
        self._check(lib.rs_group_close(self._open_index(), _int32("group", group), self._error))

    def open_sequence(
        self, group: int, *, after_prompt: bool = True, weight: int = FULL_WEIGHT, keep_text: bool = False
    ) -> int:
        """Open a sequence and return its id.

        after_prompt: the rows of this sequence begin with the group's prompt, which is not indexed
        again. Otherwise it begins at the root and all its tokens are its own.
        weight: 1 to FULL_WEIGHT, what its text counts; mode earliest does not count.
        keep_text: `text` and `hear` can be asked.
        """
        index = self._open_index()
        group, weight = _int32("group", group), _int32("weight", weight)
        self._check(
            lib.rs_sequence_open(
                index, group, bool(after_prompt), weight, bool(keep_text), self._id, self._error
            )
        )
        return int(self._id[0])

    def text(self, sequence: int) -> Int32Array:
        """The tokens of an open sequence after its start, int32 [n]. Needs keep_text.

        Raises:
            UnknownId; InvalidArgument: it keeps no text.
        """
        number = ffi.new("int64_t *")
        index, sequence = self._open_index(), _int32("sequence", sequence)
        self._check(lib.rs_sequence_text(index, sequence, ffi.NULL, 0, number, self._error))
        tokens = np.empty(int(number[0]), np.int32)
        if len(tokens):
            buffer = ffi.from_buffer("int32_t[]", tokens, require_writable=True)
            self._check(lib.rs_sequence_text(index, sequence, buffer, len(tokens), number, self._error))
        return tokens

    def close_sequence(self, sequence: int) -> None:
        """Close a sequence; its text stays in the group. Raises UnknownId."""
        self._check(lib.rs_sequence_close(self._open_index(), _int32("sequence", sequence), self._error))

    def step(
        self,
        sequences: Int32Array,
        token_ids: Int32Array,
        rows: Int32Array,
        levels: Int32Array,
        max_draft_tokens: Int32Array,
        min_token_prob: float = 0.0,
    ) -> StepResult:
        """Index what is new in n rows, then draft for them, in one native call without the GIL.

        Args:
            sequences: int32 [n], ids, each at most once.
            token_ids: int32 [R, L], rows contiguous (the stride between rows may be larger than L).
            rows: int32 [n], the row of token_ids that holds each sequence.
            levels: int32 [n], the number of tokens in that row, prompt included.
            max_draft_tokens: int32 [n]; 0: index only.
            min_token_prob: of this step, where it is more than the index's; not in mode earliest.

        Raises:
            InvalidArgument, UnknownId, OutOfMemory, BudgetExceeded: naming the argument and entry;
            nothing was indexed.
        """
        index, batch = self._open_index(), self._batch
        # What is the same array as in the step before needs no look: engines' batches change seldom.
        last = self._vectors
        if not (
            last is not None
            and last[0] is sequences
            and last[1] is rows
            and last[2] is levels
            and last[3] is max_draft_tokens
        ):
            self._set_vectors(sequences, rows, levels, max_draft_tokens)
        if token_ids is not self._matrix:
            self._set_matrix(token_ids)
        batch.min_token_prob = min_token_prob
        status = lib.rs_step(index, batch, self._error)
        if status != lib.RS_OK:
            self._check(status)
        return self._result

    def leading_tokens(self, numbers: Int32Array) -> list[int]:
        """Of the drafts of the latest step, the first numbers[i] tokens of every row i, row after row.

        Args:
            numbers: int32 [n], each at most the row's `num_draft_tokens`.

        Raises:
            InvalidArgument
        """
        index = self._open_index()
        if numbers is not self._result.num_draft_tokens:
            _check_vector("numbers", numbers, self._batch.num_rows)
        num = lib.rs_leading_tokens(index, self._batch, ffi.from_buffer("int32_t[]", numbers), self._leading)
        leading: list[int] = ffi.unpack(self._leading, num)
        return leading

    def hear(self, heard: Heard) -> int:
        """Bring the rows up to date with their sequences, which were opened with keep_text.

        Returns:
            By how many steps with drafts, of all rows together, `spent` has grown.

        Raises:
            BegunAnew: a sequence has had fewer tokens than before; InvalidArgument, UnknownId.
        """
        index, native = self._open_index(), heard._native
        self._check(lib.rs_hear(index, native, self._error))
        if native.begun_anew:
            raise BegunAnew("sequences: one has begun anew")
        if native.longest > native.row_stride:
            heard.widen(2 * native.longest)
            self._check(lib.rs_hear(index, native, self._error))
        return int(native.num_row_steps)

    def replay(self, replayed: Replayed, *, max_steps: int, max_plain_tokens: int) -> ReplayCounts:
        """Decode known texts with drafts of this index, as a target would that says them, in lockstep.

        Ends before the first step that would need a token of a growing text that is not known yet, and where
        all texts are at their ends. Where there is text that came without drafts, that is indexed only.

        Args:
            max_steps: the most steps to take.
            max_plain_tokens: the most tokens that are indexed only, or one of each row.

        Raises:
            InvalidArgument, UnknownId, OutOfMemory, BudgetExceeded: the steps before are taken, their counts
            lost; it can be called again.
        """
        index, native = self._open_index(), replayed._native
        if native.batch.num_rows > len(self._match_lens):
            self._make_buffers(native.batch.num_rows)
        native.max_steps, native.max_plain_tokens = max_steps, max_plain_tokens
        batch, heard = native.batch, native.heard
        batch.token_ids = heard.token_ids
        batch.row_stride = batch.num_columns = heard.row_stride
        for name in ("draft_tokens", "survivals", "num_draft_tokens", "match_lens"):
            setattr(batch, name, getattr(self._batch, name))
        self._check(lib.rs_replay(index, native, self._error))
        return ReplayCounts._make(getattr(native, name) for name in ReplayCounts._fields)

    def clear(self) -> None:
        """Close every sequence and group, as `close_group` does; the counters of drafts go on."""
        self._check(lib.rs_index_clear(self._open_index(), self._error))
        self._matrix = self._vectors = None

    def stats(self) -> IndexStats:
        stats = ffi.new("rs_stats *")
        lib.rs_index_stats(self._open_index(), stats)
        return IndexStats._make(getattr(stats, field) for field in IndexStats._fields)

    def validate(self) -> None:
        """Check every invariant of the index (slow, for tests). Raises NativeError naming a broken one."""
        self._check(lib.rs_index_validate(self._open_index(), self._error))

    def close(self) -> None:
        """Free the index; every later call but close raises InvalidArgument."""
        if self._index != ffi.NULL:
            ffi.release(self._index)
            self._index = ffi.NULL
            self._corpus = self._matrix = self._vectors = None

    def __enter__(self) -> SuffixIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_index(self) -> Any:
        if not self._index:
            raise InvalidArgument("index: is closed")
        return self._index

    def _check(self, status: int) -> None:
        _check_status(status, self._error)

    def _set_vectors(
        self, sequences: Int32Array, rows: Int32Array, levels: Int32Array, max_draft_tokens: Int32Array
    ) -> None:
        """Raises InvalidArgument."""
        self._vectors = None
        _check_vector("sequences", sequences, None)
        n = len(sequences)
        if n == 0:
            raise InvalidArgument("sequences: must not be empty")
        vectors = {"rows": rows, "levels": levels, "max_draft_tokens": max_draft_tokens}
        for name, vector in vectors.items():
            _check_vector(name, vector, n)
        if n > len(self._match_lens):
            self._make_buffers(n + n // 2)
        batch = self._batch
        batch.num_rows = n
        batch.sequences = ffi.from_buffer("int32_t[]", sequences)
        for name, vector in vectors.items():
            setattr(batch, name, ffi.from_buffer("int32_t[]", vector))
        self._set_result(n)
        self._vectors = (sequences, rows, levels, max_draft_tokens)

    def _set_result(self, num_rows: int) -> None:
        buffers = (self._draft_tokens, self._survivals, self._num_draft_tokens, self._match_lens)
        self._result = StepResult._make(buffer[:num_rows] for buffer in buffers)

    def _make_buffers(self, num_rows: int) -> None:
        self._draft_tokens = np.zeros((num_rows, self._num_speculative_tokens), np.int32)
        self._survivals = np.zeros((num_rows, self._num_speculative_tokens), np.float32)
        self._num_draft_tokens = np.zeros(num_rows, np.int32)
        self._match_lens = np.zeros(num_rows, np.int32)
        self._batch.draft_tokens = ffi.from_buffer("int32_t[]", self._draft_tokens)
        self._batch.survivals = ffi.from_buffer("float[]", self._survivals)
        self._batch.num_draft_tokens = ffi.from_buffer("int32_t[]", self._num_draft_tokens)
        self._batch.match_lens = ffi.from_buffer("int32_t[]", self._match_lens)
        self._leading = ffi.new("int32_t[]", num_rows * self._num_speculative_tokens)
        self._batch.num_rows = 0
        self._set_result(0)
        self._vectors = None

    def _set_matrix(self, token_ids: Int32Array) -> None:
        if type(token_ids) is not np.ndarray or token_ids.dtype != _INT32 or token_ids.ndim != 2:
            raise InvalidArgument("token_ids: must be a two-dimensional int32 array")
        num_rows, num_columns = token_ids.shape
        row_bytes, token_bytes = token_ids.strides
        if num_rows == 1:
            row_bytes = 4 * num_columns
        if (num_columns > 1 and token_bytes != 4) or row_bytes % 4 or row_bytes < 4 * num_columns:
            raise InvalidArgument("token_ids: the tokens of a row must be contiguous")
        batch = self._batch
        batch.num_matrix_rows = num_rows
        batch.num_columns = num_columns
        batch.row_stride = row_bytes // 4
        batch.token_ids = ffi.cast("int32_t *", token_ids.__array_interface__["data"][0])
        self._matrix = token_ids


class CorpusBuilder:
    """Makes the file of a static corpus; in memory it takes about as much as an index of the same text.

    Raises:
        OutOfMemory
    """

    def __init__(self) -> None:
        self._error = ffi.new("rs_error *")
        made = ffi.new("rs_corpus_builder **")
        _check_status(lib.rs_corpus_new(made, self._error), self._error)
        self._builder = ffi.gc(made[0], lib.rs_corpus_free)

    def add(self, token_ids: Int32Array) -> None:
        """Index a text, int32 [n]. Raises InvalidArgument; OutOfMemory, after which nothing can be saved."""
        _check_vector("token_ids", token_ids, None)
        tokens = ffi.from_buffer("int32_t[]", token_ids)
        _check_status(lib.rs_corpus_add(self._builder, tokens, len(token_ids), self._error), self._error)

    def save(self, path: str | Path) -> None:
        """Write the file. Raises OSError."""
        write_corpus(path, int(lib.rs_corpus_num_bytes(self._builder)), self._freeze)

    def _freeze(self, mapped: mmap) -> None:
        with ffi.from_buffer("char[]", mapped, require_writable=True) as buffer:
            content, num_bytes = buffer + CONTENT_OFFSET, len(buffer) - CONTENT_OFFSET
            status = lib.rs_corpus_write(self._builder, content, num_bytes, self._error)
            _check_status(status, self._error)
