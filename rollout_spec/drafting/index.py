"""The suffix index: texts of groups of sequences, drafts from them, and the buffers that a step fills."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.drafting.corpus import read_corpus
from rollout_spec.drafting.drafts import ModelDrafts
from rollout_spec.drafting.native import (
    BudgetExceeded,
    Float32Array,
    Int32Array,
    InvalidArgument,
    OutOfMemory,
    check_status,
    check_vector,
    ffi,
    lib,
)

ALL_TOKENS = 2**63 - 1


class StepResult(NamedTuple):
    """Views into the index's buffers, valid until its next step: n rows, K = num_speculative_tokens."""

    draft_tokens: Int32Array  # [n, K]; row i holds num_draft_tokens[i] draft tokens, the rest is unspecified
    survivals: Float32Array  # [n, K]: estimated probability that the draft up to this token is accepted
    num_draft_tokens: Int32Array  # [n]
    dropped: Sequence[int] = ()  # which of the n rows are dropped, their sequences closed; they have no draft
    num_unindexed: int = 0  # rows without drafts, as something of their text or prompt is not indexed yet


class IndexStats(NamedTuple):
    """What the index holds now; of the corpus only the bytes."""

    num_groups: int
    num_sequences: int
    num_states: int
    num_tokens: int
    num_tokens_unindexed: int
    num_texts_left_out: int  # ever: prompts, sequences and others for which there was no memory
    num_bytes: int


def make_index(config: SpecConfig, corpus: Iterable[Int32Array] | None = None) -> SuffixIndex:
    """The index that the options of `rollout.spec` describe; `corpus` are its texts, if they have been read.

    Raises:
        ConfigError: the corpus cannot be read, or has no room.
        BudgetExceeded, OutOfMemory: there is no room even for an empty index.
    """
    index = SuffixIndex(
        num_speculative_tokens=config.num_speculative_tokens, max_bytes=config.max_index_bytes
    )
    if corpus is None:
        corpus = read_corpus(config.corpus) if config.corpus else ()
    try:
        for text in corpus:
            index.add_to_corpus(text)
    except (BudgetExceeded, OutOfMemory) as error:
        where = f"rollout.spec.corpus={config.corpus!r}: takes more than max_index_mb={config.max_index_mb}"
        raise ConfigError(f"{where}; raise it, or take fewer texts ({error})") from error
    except InvalidArgument as error:
        raise ConfigError(f"rollout.spec.corpus={config.corpus!r}: {error}") from error
    return index


class SuffixIndex:
    """Text of groups of sequences, and drafts from it (native/draft.h). Not thread safe; one per engine.

    Args:
        num_speculative_tokens: most draft tokens per row and step, K.
        max_bytes: budget of the whole index, 0: none.

    Its methods raise InvalidArgument, BudgetExceeded or OutOfMemory. Then they change no text, but
    `add_to_corpus` the corpus.
    """

    def __init__(self, *, num_speculative_tokens: int, max_bytes: int = 0) -> None:
        self._error = ffi.new("rs_error *")
        self._batch = ffi.new("rs_batch *")
        self._id = ffi.new("int32_t *")
        # The arrays of the latest step, held here because the batch only has their addresses.
        self._matrix: Int32Array | None = None
        self._vectors: tuple[Int32Array, ...] | None = None
        self._model: tuple[Int32Array, Int32Array] | None = None
        options = ffi.new("rs_options *", (num_speculative_tokens, max_bytes))
        made = ffi.new("rs_index **")
        check_status(lib.rs_index_new(options, made, self._error), self._error)
        self._index = ffi.gc(made[0], lib.rs_index_free)
        self._num_speculative_tokens = num_speculative_tokens
        self._make_buffers(64)

    def add_to_corpus(self, token_ids: Int32Array) -> None:
        """Draft from this text too (int32 vector). Before the first group is opened."""
        self._call(lib.rs_corpus_add, *_tokens("token_ids", token_ids))

    def open_group(self, prompt_token_ids: Int32Array) -> int:
        """A new group with this prompt (int32 vector, may be empty), unindexed; returns its id."""
        self._call(lib.rs_group_open, *_tokens("prompt_token_ids", prompt_token_ids), self._id)
        return int(self._id[0])

    def set_prompt(self, group: int, prompt_token_ids: Int32Array) -> None:
        """What is opened in the group from now on, or added to it, begins after this prompt, unindexed."""
        self._call(lib.rs_group_set_prompt, group, *_tokens("prompt_token_ids", prompt_token_ids))

    def add_text(self, group: int, token_ids: Int32Array) -> None:
        """A text (int32 vector) that follows the group's prompt; unindexed."""
        self._call(lib.rs_group_add, group, *_tokens("token_ids", token_ids))

    def catch_up(self, max_tokens_to_index: int = ALL_TOKENS) -> bool:
        """Index up to so many tokens; whether there is more to index."""
        return bool(lib.rs_catch_up(self._index, max_tokens_to_index))

    @property
    def has_unindexed(self) -> bool:
        """Whether there is more to index."""
        return self.catch_up(0)

    def take_given_up(self) -> list[int]:
        """The groups that other calls have given up since the last call of this. Until it names one, no new
        group gets its id; ids of the sequences that were parked in it may be another's already."""
        return list(iter(lambda: int(lib.rs_group_given_up(self._index)), -1))

    def close_group(self, group: int) -> None:
        """Forget the text of a group in which nothing runs, and close what is parked there."""
        self._call(lib.rs_group_close, group)

    def open_sequence(self, group: int) -> int:
        """Open a sequence and return its id. Its rows begin with the group's prompt."""
        self._call(lib.rs_sequence_open, group, self._id)
        return int(self._id[0])

    def text(self, sequence: int) -> Int32Array:
        """The tokens of an open sequence after its prompt, indexed or not, int32 [n]."""
        number, tokens = ffi.new("int64_t *"), np.empty(0, np.int32)
        while True:
            buffer, num = ffi.from_buffer("int32_t[]", tokens, require_writable=True), len(tokens)
            self._call(lib.rs_sequence_text, sequence, buffer, num, number)
            if num == number[0]:
                return tokens
            tokens = np.empty(int(number[0]), np.int32)

    def close_sequence(self, sequence: int) -> None:
        """Close a sequence; its text stays in the group, and is indexed as a whole."""
        self._call(lib.rs_sequence_close, sequence)

    def park_sequence(self, sequence: int) -> None:
        """Keep a sequence while it is in no step."""
        self._call(lib.rs_sequence_park, sequence)

    def resume_sequence(self, sequence: int) -> None:
        """Its next row goes on after what it and the sequence's text begin with."""
        self._call(lib.rs_sequence_resume, sequence)

    def index_and_draft(
        self,
        sequences: Int32Array,
        token_ids: Int32Array,
        rows: Int32Array,
        levels: Int32Array,
        max_draft_tokens: Int32Array,
        min_survival: float = 0.0,
        max_tokens_to_index: int = ALL_TOKENS,
        model_drafts: ModelDrafts | None = None,
    ) -> StepResult:
        """Index what is new in n rows, then draft for them, in one native call without the GIL.

        Args:
            sequences: int32 [n], ids, each at most once.
            token_ids: int32 [R, L], rows contiguous (the stride between rows may be larger than L).
            rows: int32 [n], the row of token_ids that holds each sequence.
            levels: int32 [n], the number of tokens in that row, prompt included.
            max_draft_tokens: int32 [n]; 0: index only.
            min_survival: end a draft where its estimated survival falls below.
            max_tokens_to_index: to index of unindexed text; a row that still has some has no draft.
            model_drafts: of a model, after the first levels[i] tokens of each row of token_ids.

        A row that does not fit, or has a negative token, is dropped; the result says which. Where an argument
        is wrong the error names it and its entry, and nothing was indexed.

        An array is checked in the first step that it comes with: a caller whose batch stays writes the new
        values into the same arrays.
        """
        batch = self._batch
        vectors = sequences, rows, levels, max_draft_tokens
        if self._vectors is None or any(map(operator.is_not, vectors, self._vectors)):
            self._set_vectors(*vectors)
        if self._matrix is None or token_ids is not self._matrix:
            self._set_matrix(token_ids)
        if model_drafts is not None or batch.num_model_tokens:
            self._set_model(model_drafts, rows)
        batch.min_survival = min_survival
        batch.max_tokens_to_index = max_tokens_to_index
        self._call(lib.rs_step, batch)
        dropped = np.flatnonzero(self._result.num_draft_tokens < 0).tolist() if batch.num_dropped else []
        self._result.num_draft_tokens[dropped] = 0
        return self._result._replace(dropped=dropped, num_unindexed=batch.num_unindexed)

    def stats(self) -> IndexStats:
        stats = ffi.new("rs_stats *")
        lib.rs_index_stats(self._index, stats)
        return IndexStats._make(getattr(stats, field) for field in IndexStats._fields)

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        check_status(function(self._index, *arguments, self._error), self._error)

    def _set_vectors(self, *vectors: Int32Array) -> None:
        self._vectors = None
        check_vector("sequences", vectors[0], None)
        batch, n = self._batch, len(vectors[0])
        for name, vector in zip(("sequences", "rows", "levels", "max_draft_tokens"), vectors, strict=True):
            check_vector(name, vector, n)
            setattr(batch, name, ffi.from_buffer("int32_t[]", vector))
        if n > len(self._num_draft_tokens):
            self._make_buffers(n + n // 2)
        batch.num_sequences = n
        self._result = StepResult(self._draft_tokens[:n], self._survivals[:n], self._num_draft_tokens[:n])
        self._vectors = vectors

    def _set_model(self, model_drafts: ModelDrafts | None, rows: Int32Array) -> None:
        self._batch.num_model_tokens = 0
        if model_drafts is None:
            return
        self._model = tokens, confidences = model_drafts.of_rows(rows)
        self._batch.num_model_tokens = tokens.shape[1]
        self._batch.model_tokens = ffi.from_buffer("int32_t[]", tokens)
        self._batch.model_confidences = ffi.from_buffer("int32_t[]", confidences)

    def _make_buffers(self, num_rows: int) -> None:
        self._draft_tokens = np.zeros((num_rows, self._num_speculative_tokens), np.int32)
        self._survivals = np.zeros((num_rows, self._num_speculative_tokens), np.float32)
        self._num_draft_tokens = np.zeros(num_rows, np.int32)
        self._batch.draft_tokens = ffi.from_buffer("int32_t[]", self._draft_tokens)
        self._batch.survivals = ffi.from_buffer("float[]", self._survivals)
        self._batch.num_draft_tokens = ffi.from_buffer("int32_t[]", self._num_draft_tokens)

    def _set_matrix(self, token_ids: Int32Array) -> None:
        if type(token_ids) is not np.ndarray or token_ids.dtype != np.int32 or token_ids.ndim != 2:
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


def _tokens(name: str, token_ids: Int32Array) -> tuple[Any, int]:
    """The argument of this name for C: a pointer to an int32 vector, and its length."""
    check_vector(name, token_ids, None)
    return ffi.from_buffer("int32_t[]", token_ids), len(token_ids)
