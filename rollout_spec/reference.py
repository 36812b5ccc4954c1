"""SuffixDecoding as a reference: groups are decoded a second time, from what the target has said for them.

A reference decodes each row at the pace that its own drafts give it, in an index of its own, as soon as the
text is known as far as a draft could reach. Beside what it has spent on a text stands what the engine has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.config import SpecConfig
from rollout_spec.index import Int32Array, Int64Array, SuffixIndex

REFERENCE_MIN_TOKEN_PROB = 0.1
AIM = 0.992  # of the budget: what a group drafts at its very end, which is most, is not all seen
MEMORY = 1_000_000  # row-steps after which what was spent is mostly forgotten
MAX_PACE = 2  # steps of a reference for each of the engine's
MAX_PLAIN_TOKENS = 384  # at once, that are only indexed
BYTES_SHARE = 16  # of the byte budget, for the index of each reference and for all texts


class Setting(NamedTuple):
    """Of SuffixDecoding (arXiv 2411.04975), and the share of its draft tokens that may be spent."""

    max_spec_factor: float
    share: float


class Spending:
    """Draft tokens, and for how many row-steps; what was long ago counts less and less."""

    def __init__(self) -> None:
        self.num_row_steps = self.num_draft_tokens = 0.0

    def add(self, num_row_steps: float, num_draft_tokens: float) -> None:
        kept = max(0.0, 1.0 - num_row_steps / MEMORY)
        self.num_row_steps = kept * self.num_row_steps + num_row_steps
        self.num_draft_tokens = kept * self.num_draft_tokens + num_draft_tokens


class Reference:
    """SuffixDecoding with one setting: an index for all followed groups, and what was spent on them."""

    def __init__(self, setting: Setting, config: SpecConfig) -> None:
        self.share = setting.share
        self.spent, self.ours = Spending(), Spending()  # both for the text that the reference has decoded
        self.index = SuffixIndex(
            num_speculative_tokens=config.num_speculative_tokens,
            mode="suffix_policy",
            max_spec_factor=setting.max_spec_factor,
            min_token_prob=REFERENCE_MIN_TOKEN_PROB,
            max_bytes=(config.max_index_mb << 20) // BYTES_SHARE,
        )

    def excess(self, share: float) -> float:
        """The draft tokens that we have spent beyond a share of its own."""
        spent, ours = self.spent, self.ours
        if not spent.num_row_steps:
            return 0.0
        budget = AIM * share * spent.num_draft_tokens / spent.num_row_steps
        return ours.num_draft_tokens - budget * ours.num_row_steps


class _Decoding:
    """A followed group as one reference decodes it: arrays with a row for each sequence."""

    def __init__(self, reference: Reference, prompt: Int32Array) -> None:
        self.reference = reference
        self.group = reference.index.open_group(prompt)
        self.sequences = np.empty(0, np.int32)
        self.levels = np.empty(0, np.int32)  # tokens that are decoded
        self.plain = np.empty(0, np.int32)  # up to here, what is not decoded came without drafts
        self.owed = np.empty((0, 2))  # row-steps and draft tokens that the rest has taken us
        self._num_steps = 0  # of the engine, when it decoded last

    def open(self, start: int, after_prompt: bool, weight: int) -> None:
        index = self.reference.index
        sequence = index.open_sequence(self.group, after_prompt=after_prompt, weight=weight)
        self.sequences = np.append(self.sequences, np.int32(sequence))
        self.levels = np.append(self.levels, np.int32(start))
        self.plain = np.append(self.plain, np.int32(start))
        self.owed = np.append(self.owed, np.zeros((1, 2)), axis=0)

    def decode(self, tokens: Int32Array, ends: Int32Array, growing: Int32Array, num_steps: int) -> None:
        max_steps = MAX_PACE * max(1, num_steps - self._num_steps)
        self._num_steps = num_steps
        before = self.levels.copy()
        num_plain = np.maximum(self.plain - before, 0)
        if num_plain.any():
            self.levels += np.minimum(num_plain, max(1, MAX_PLAIN_TOKENS // int(np.count_nonzero(num_plain))))
            self.index_all(tokens)
            self._settle(before, ends)
            return
        spent = self.reference.index.replay(
            self.sequences, tokens, self.levels, ends, growing, max_steps=max_steps
        )
        self.reference.spent.add(*spent)
        self.reference.ours.add(*self._settle(before, ends))

    def index_all(self, tokens: Int32Array) -> None:
        rows = np.arange(len(self.sequences), dtype=np.int32)
        self.reference.index.step(self.sequences, tokens, rows, self.levels, np.zeros_like(rows))

    def _settle(self, before: Int32Array, ends: Int32Array) -> list[float]:
        """Row-steps and draft tokens that we needed for the text decoded since, in proportion."""
        settled = self.owed * ((self.levels - before) / np.maximum(ends - before, 1))[:, None]
        self.owed -= settled
        return settled.sum(axis=0).tolist()

    def keep(self, is_kept: npt.NDArray[np.bool_]) -> None:
        for sequence in self.sequences[~is_kept].tolist():
            self.reference.index.close_sequence(sequence)
        self.sequences, self.levels = self.sequences[is_kept], self.levels[is_kept]
        self.plain, self.owed = self.plain[is_kept], self.owed[is_kept]

    def close(self) -> None:
        self.keep(np.zeros(len(self.sequences), np.bool_))
        self.reference.index.close_group(self.group)


class Followed:
    """A group that is decoded a second time: a row for each sequence, with what the target has said."""

    def __init__(self, references: list[Reference], prompt: Int32Array) -> None:
        self._num_prompt_tokens = len(prompt)
        self._decodings = [_Decoding(reference, prompt) for reference in references]
        self._row_of: dict[int, int] = {}  # of the open sequences
        self._tokens = np.empty((0, 1), np.int32)  # may have more rows than there are
        self._starts = np.empty(0, np.int32)
        self._ends = np.empty(0, np.int32)  # of what was said
        self._growing = np.empty(0, np.int32)  # 1: what is said next comes with drafts
        self._spent = np.empty((0, 2), np.int64)  # by the engine: row-steps and draft tokens

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes

    def open(self, sequence: int, after_prompt: bool, weight: int) -> None:
        self._drop_closed()
        start = self._num_prompt_tokens if after_prompt else 0
        for decoding in self._decodings:
            decoding.open(start, after_prompt, weight)
        self._row_of[sequence] = len(self._ends)
        self._starts = np.append(self._starts, np.int32(start))
        self._ends = np.append(self._ends, np.int32(start))
        self._growing = np.append(self._growing, np.int32(0))
        self._spent = np.append(self._spent, np.zeros((1, 2), np.int64), axis=0)
        num_rows, num_columns = self._tokens.shape
        if len(self._ends) > num_rows:
            self._resize(2 * len(self._ends), num_columns)

    def hear(self, sequence: int, said: Int32Array, *, after_start: bool = False, drafts: bool) -> bool:
        """What a sequence has said so far; False: it has begun anew.

        Args:
            said: all its tokens, or those after the prompt of the group if it is `after_start`.
            drafts: what it says next comes with drafts.
        """
        row = self._row_of[sequence]
        start, end = int(self._starts[row]), int(self._ends[row])
        first = start if after_start else 0
        level = first + len(said)
        if level < end or (end > start and said[end - first - 1] != self._tokens[row, end - 1]):
            return False
        if level > self._tokens.shape[1]:
            self._resize(len(self._tokens), 2 * level)
        self._tokens[row, end:level] = said[end - first :]
        self._ends[row] = level
        if level > end and not self._growing[row]:
            for decoding in self._decodings:
                decoding.plain[row] = level
        self._growing[row] = drafts
        return True

    def owe(self, sequences: list[int], spent: Int64Array) -> int:
        """Row-steps and draft tokens that sequences have taken us, [n, 2]; returns the new row-steps."""
        rows = [self._row_of[sequence] for sequence in sequences]
        added = spent - self._spent[rows]
        self._spent[rows] = spent
        for decoding in self._decodings:
            decoding.owed[rows] += added
        return int(added[:, 0].sum())

    def close_sequence(self, sequence: int) -> None:
        self._growing[self._row_of.pop(sequence)] = 0

    def is_over(self) -> bool:
        return not self._row_of

    def has_drafts(self) -> bool:
        """Whether any of its text came with drafts: until then none is even indexed."""
        return bool((self._ends > self._decodings[0].plain).any())

    def decode(self, reference: int, num_steps: int) -> bool:
        """A bounded part of what can be decoded; False: there is nothing.

        num_steps: the engine's, so far.
        """
        self._drop_closed()
        decoding = self._decodings[reference]
        if not (decoding.levels < self._ends).any() or not self.has_drafts():
            return False
        decoding.decode(self._tokens, self._ends, self._growing, num_steps)
        return True

    def close(self) -> None:
        for decoding in self._decodings:
            decoding.close()

    def _drop_closed(self) -> None:
        """Of the closed sequences those that are decoded; their text stays in the group."""
        if len(self._row_of) == len(self._ends):
            return
        is_kept = np.zeros(len(self._ends), np.bool_)
        is_kept[list(self._row_of.values())] = True
        for decoding in self._decodings:
            is_kept |= decoding.levels < self._ends
        if is_kept.all():
            return
        for decoding in self._decodings:
            decoding.index_all(self._tokens)
            decoding.keep(is_kept)
        rows = np.cumsum(is_kept) - 1
        self._row_of = {sequence: int(rows[row]) for sequence, row in self._row_of.items()}
        self._tokens = self._tokens[: len(is_kept)][is_kept]
        self._starts, self._ends, self._growing = (
            array[is_kept] for array in (self._starts, self._ends, self._growing)
        )
        self._spent = self._spent[is_kept]

    def _resize(self, num_rows: int, num_columns: int) -> None:
        tokens = np.zeros((num_rows, num_columns), np.int32)
        rows, columns = self._tokens.shape
        tokens[:rows, :columns] = self._tokens
        self._tokens = tokens
