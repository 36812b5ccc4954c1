"""SuffixDecoding as a reference: groups are decoded a second time, from what the target has said for them.

A reference decodes each row at the pace that its own drafts give it, in an index of its own, as soon as the
text is known as far as a draft could reach. Beside what it has spent on a text stands what the engine has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.index import SuffixIndex
from rollout_spec.native import BoolArray, Int32Array
from rollout_spec.rows import Heard, Replayed

REFERENCE_MIN_TOKEN_PROB = 0.1
AIM = 0.992  # of the budget: what a group drafts at its very end, which is most, is not all seen
MEMORY = 1_000_000  # row-steps after which what was spent is mostly forgotten
MAX_PACE = 2  # steps of a reference for each of the engine's
PLAIN_TOKENS_PER_ROW = 16  # that the engine drafts for: how many are only indexed at once
MIN_PLAIN_TOKENS = 128  # likewise
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


class Followed:
    """A group that is decoded a second time by each reference: a row for each sequence."""

    def __init__(self, references: list[Reference], prompt: Int32Array) -> None:
        self._num_prompt_tokens = len(prompt)
        self._references = references
        self._groups = [reference.index.open_group(prompt) for reference in references]
        self._row_of: dict[int, int] = {}  # of the open sequences
        self._num_steps = [0] * len(references)  # of the engine, when each decoded last
        self._heard = Heard.nothing()
        self._replayed = [Replayed.nothing(self._heard) for _ in references]

    @property
    def num_bytes(self) -> int:
        return self._heard.token_ids.nbytes

    def open(self, sequence: int, after_prompt: bool, weight: int) -> None:
        self._drop_closed()
        start = self._num_prompt_tokens if after_prompt else 0
        self._row_of[sequence] = len(self._heard.ends)
        self._heard = self._heard.with_row(sequence, start)
        for number, (reference, group) in enumerate(zip(self._references, self._groups, strict=True)):
            opened = reference.index.open_sequence(group, after_prompt=after_prompt, weight=weight)
            self._replayed[number] = self._replayed[number].with_row(self._heard, opened, start)

    def hear(self, index: SuffixIndex) -> int:
        """What the sequences have said so far; returns the row-steps since it was asked last.

        Raises:
            BegunAnew: a sequence has.
        """
        return index.hear(self._heard)

    def close_sequence(self, sequence: int) -> None:
        """After it was heard."""
        row = self._row_of.pop(sequence)
        self._heard.sequences[row] = -1
        self._heard.growing[row] = 0

    def is_over(self) -> bool:
        return not self._row_of

    def has_drafts(self) -> bool:
        """Whether any of its text came with drafts: until then none is even indexed."""
        return self._heard.has_drafts

    def decode(self, number: int, num_steps: int, num_drafting: int = 0) -> bool:
        """A bounded part of what one reference can decode; False: it is another group's turn.

        Args:
            num_steps: the engine's, so far.
            num_drafting: rows that it drafts for.
        """
        if not self.has_drafts():
            return False
        self._drop_closed()
        reference, num_new = self._references[number], num_steps - self._num_steps[number]
        counts = reference.index.replay(
            self._replayed[number],
            max_steps=MAX_PACE * max(1, num_new),
            max_plain_tokens=max(MIN_PLAIN_TOKENS, PLAIN_TOKENS_PER_ROW * num_drafting),
        )
        self._num_steps[number] = num_steps
        reference.spent.add(counts.num_row_steps, counts.num_draft_tokens)
        reference.ours.add(counts.heard_row_steps, counts.heard_draft_tokens)
        return counts.num_tokens > 0 or not self.is_over()

    def close(self) -> None:
        self._keep(np.zeros(len(self._heard.ends), np.bool_))
        for reference, group in zip(self._references, self._groups, strict=True):
            reference.index.close_group(group)

    def _drop_closed(self) -> None:
        """Of the closed sequences those that are decoded; their text stays in the group."""
        heard = self._heard
        if len(self._row_of) == len(heard.ends):
            return
        is_kept = heard.sequences >= 0
        for replayed in self._replayed:
            is_kept |= replayed.levels < heard.ends
        if is_kept.all():
            return
        for reference, replayed in zip(self._references, self._replayed, strict=True):
            rows = np.arange(len(is_kept), dtype=np.int32)
            sequences, levels = replayed.sequences, replayed.levels
            reference.index.step(sequences, heard.token_ids, rows, levels, np.zeros_like(rows))
        self._keep(is_kept)

    def _keep(self, is_kept: BoolArray) -> None:
        self._heard = self._heard.kept(is_kept)
        for number, (reference, replayed) in enumerate(zip(self._references, self._replayed, strict=True)):
            for sequence in replayed.sequences[~is_kept].tolist():
                reference.index.close_sequence(sequence)
            self._replayed[number] = replayed.kept(self._heard, is_kept)
        rows = np.cumsum(is_kept) - 1
        self._row_of = {sequence: int(rows[row]) for sequence, row in self._row_of.items()}
