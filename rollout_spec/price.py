"""The price of a draft token where the options name none: mode sam spends what SuffixDecoding would.

One price is not one number of draft tokens: text that is easy to foresee gets long drafts at any price. So a
few groups are followed: what the target says for them is decoded a second time, with SuffixDecoding's own
drafts (mode suffix_policy) and at the pace that these give each row. The draft tokens that this takes per
step are the budget; the price follows what the followed groups themselves have spent over it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

import numpy as np

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
from rollout_spec.reference import BYTES_SHARE, Followed, Reference, Setting

# As vLLM has it by default, and one that drafts nearly all it can; with history that may be spent whole. The
# first decides, and the second where it leaves less, down to LEAST_SHARE of the first.
SETTINGS = (Setting(1.0, 1.0), Setting(4.0, 2 / 3))
SETTINGS_WITH_HISTORY = (Setting(4.0, 1.0),)
LEAST_SHARE = 0.9

LEAST_PRICE = 0.055
STEEPNESS = 1e-3  # of the logarithm of the price, for every token spent too much
MAX_EXCESS = 10_000.0  # tokens: what a long stretch has saved or wasted is not made up for in the next

# Who is followed: one row in ROWS_PER_FOLLOWED; after the first row-steps one row-step in STEPS_PER_FOLLOWED.
ROWS_PER_FOLLOWED = 8
STEPS_PER_FOLLOWED = 16
NUM_FIRST_ROW_STEPS = 1 << 18
# One group is decoded by one reference at a time. What is due then is about as much for any number of rows.
DECODE_EVERY = 8  # steps of the engine, with
FEW_ROWS = 8  # that are followed; more often with more


class SuffixPrice:
    """Follows some groups of an index. One per index; not thread-safe.

    Args:
        config: the options of the index.
        index: what the engine drafts with.
    """

    def __init__(self, config: SpecConfig, index: SuffixIndex) -> None:
        self.value = self._first = config.least_survival
        """The price, as min_token_prob takes it."""
        settings = SETTINGS_WITH_HISTORY if config.history else SETTINGS
        self._references = [Reference(setting, config) for setting in settings]
        self._index = index
        self._max_bytes = (config.max_index_mb << 20) // BYTES_SHARE
        self._followed: dict[int, Followed] = {}  # by the group
        self._group_of: dict[int, int] = {}  # of the open sequences that are followed
        self._drafting: set[int] = set()  # of these, those whose next tokens come with drafts
        self._is_followed = np.zeros(64, np.bool_)  # by the sequence; the last stands for those beyond
        self._batch: Int32Array | None = None  # the sequences of the last step
        self._entries = np.empty(0, np.intp)  # those of them that are followed
        self._num_open = 0
        self._num_steps = self._next = self._turn = 0
        self._allowance = float(NUM_FIRST_ROW_STEPS)  # of row-steps of followed groups

    def open_group(self, group: int, prompt: Int32Array) -> None:
        num_followed = len(self._group_of)
        if self._allowance > 0 and ROWS_PER_FOLLOWED * num_followed <= self._num_open:
            with self._unless_full():
                self._followed[group] = Followed(self._references, prompt)

    def follows_group(self, group: int) -> bool:
        return group in self._followed

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

    def close_sequence(self, sequence: int) -> None:
        """Before the index has closed it."""
        self._num_open -= 1
        if sequence not in self._group_of:
            return
        self._count_drafted(np.array([sequence], np.int32))
        self._hear(sequence, self._index.text(sequence), after_start=True, drafts=False)
        group = self._group_of.pop(sequence, None)
        if group is None:
            return
        self._is_followed[sequence] = False
        self._batch = None
        followed = self._followed[group]
        followed.close_sequence(sequence)
        if not followed.is_over():
            return
        if not followed.has_drafts():
            self.close_group(group)  # its text is of no use but to siblings that may never come
            return
        with self._unless_full():
            for reference in range(len(self._references)):
                followed.decode(reference, self._num_steps)

    def step(
        self,
        sequences: Int32Array,
        token_ids: Int32Array,
        rows: Int32Array,
        levels: Int32Array,
        max_draft_tokens: Int32Array,
    ) -> None:
        """What a step of the index was given."""
        is_new = sequences is not self._batch  # while it is the same array it is the same batch
        if not is_new and self._num_steps + 1 < self._next:
            self._num_steps += 1
            return
        num_drafting = int(np.count_nonzero(max_draft_tokens))
        self._num_steps += num_drafting > 0
        is_due = num_drafting > 0 and self._num_steps >= self._next
        if is_due:
            every = max(1, DECODE_EVERY * FEW_ROWS // max(FEW_ROWS, len(self._group_of)))
            self._next = self._num_steps + every
            self._allowance += every * num_drafting / STEPS_PER_FOLLOWED
            self._allowance = min(self._allowance, NUM_FIRST_ROW_STEPS)
        if not self._group_of or not (num_drafting or self._drafting):
            return
        if not num_drafting and self._drafting.isdisjoint(sequences.tolist()):
            return  # no drafts before or after: a closed gate, or text of the history
        if is_new:
            self._batch = sequences
            self._entries = np.flatnonzero(self._is_followed.take(sequences, mode="clip"))
        entries = self._entries
        self._count_drafted(sequences[entries])
        # For so few numbers lists are faster than numpy.
        of_entries = (array[entries].tolist() for array in (sequences, rows, levels, max_draft_tokens))
        for sequence, row, level, room in zip(*of_entries, strict=True):
            self._hear(sequence, token_ids[row, :level], drafts=room > 0)
        if is_due:
            self._decode()

    def _count_drafted(self, sequences: Int32Array) -> None:
        """By followed sequences, since it was counted last."""
        spent = np.stack(self._index.spent(sequences), axis=1)
        by_group: dict[int, list[int]] = {}
        for entry, sequence in enumerate(sequences.tolist()):
            by_group.setdefault(self._group_of[sequence], []).append(entry)
        for group, entries in by_group.items():
            self._allowance -= self._followed[group].owe(sequences[entries].tolist(), spent[entries])

    def _decode(self) -> None:
        """Groups and references take turns, so that no step waits for all."""
        if sum(each.num_bytes for each in self._followed.values()) > self._max_bytes:
            self._forget()
        pairs = list(itertools.product(self._followed.values(), range(len(self._references))))
        with self._unless_full():
            for _ in pairs:
                self._turn += 1
                followed, reference = pairs[self._turn % len(pairs)]
                if followed.decode(reference, self._num_steps):
                    break
        excess = self._excess()
        self.value = min(1.0, max(LEAST_PRICE, self._first * math.exp(STEEPNESS * excess)))

    def _excess(self) -> float:
        """The draft tokens that were spent too much; what is beyond MAX_EXCESS is forgotten."""
        first, *others = self._references
        excess = first.excess(first.share)
        for other in others:
            excess = max(excess, min(other.excess(other.share), first.excess(LEAST_SHARE)))
        bounded = min(MAX_EXCESS, max(-MAX_EXCESS, excess))
        for reference in self._references:
            reference.ours.num_draft_tokens += bounded - excess
        return bounded

    def clear(self) -> None:
        """The index is empty; what was spent stays."""
        self._forget()
        self._num_open = 0

    def close(self) -> None:
        for reference in self._references:
            reference.index.close()

    def _hear(self, sequence: int, said: Int32Array, *, after_start: bool = False, drafts: bool) -> None:
        if sequence not in self._group_of:
            return  # forgotten in this very step
        (self._drafting.add if drafts else self._drafting.discard)(sequence)
        followed = self._followed[self._group_of[sequence]]
        if not followed.hear(sequence, said, after_start=after_start, drafts=drafts):
            self._forget()

    def _forget(self) -> None:
        """Follow none of the groups any more."""
        for reference in self._references:
            reference.index.clear()
        self._followed.clear()
        self._group_of.clear()
        self._drafting.clear()
        self._is_followed[:] = False
        self._batch = None

    @contextlib.contextmanager
    def _unless_full(self) -> Iterator[None]:
        try:
            yield
        except (BudgetExceeded, OutOfMemory):
            self._forget()


class PricedIndex(SuffixIndex):
    """A suffix index whose drafts end where their survival falls below a SuffixPrice.

    Args:
        config: the options of `rollout.spec`.

    Raises:
        ConfigError: the corpus cannot be used; OutOfMemory, BudgetExceeded.
    """

    def __init__(self, config: SpecConfig) -> None:
        super().__init__(**index_options(config) | {"min_token_prob": 0.0})
        self.price = SuffixPrice(config, self)

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

    def open_sequence(
        self, group: int, *, after_prompt: bool = True, weight: int = FULL_WEIGHT, keep_text: bool = False
    ) -> int:
        keep_text = keep_text or self.price.follows_group(group)
        sequence = super().open_sequence(group, after_prompt=after_prompt, weight=weight, keep_text=keep_text)
        self.price.open_sequence(sequence, group, after_prompt, weight)
        return sequence

    def close_sequence(self, sequence: int) -> None:
        self.price.close_sequence(sequence)
        super().close_sequence(sequence)

    def step(
        self,
        sequences: Int32Array,
        token_ids: Int32Array,
        rows: Int32Array,
        levels: Int32Array,
        max_draft_tokens: Int32Array,
        min_token_prob: float = 0.0,
    ) -> StepResult:
        price = max(min_token_prob, self.price.value)
        result = super().step(sequences, token_ids, rows, levels, max_draft_tokens, price)
        self.price.step(sequences, token_ids, rows, levels, max_draft_tokens)
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
