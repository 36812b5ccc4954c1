"""The price of a draft token where the options name none: mode sam spends what SuffixDecoding would.

One price is not one number of draft tokens: text that is easy to foresee gets long drafts at any price. So a
few groups are followed: what the target says for them is decoded a second time, with SuffixDecoding's own
drafts (mode suffix_policy in the group's automaton alone) and at the pace that these give each row. The draft
tokens that this takes per step are the budget; the price follows what the followed groups themselves have
spent over it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

from rollout_spec.config import SpecConfig
from rollout_spec.index import FULL_WEIGHT, StepResult, SuffixIndex, index_options
from rollout_spec.native import BegunAnew, Int32Array
from rollout_spec.reference import BYTES_SHARE, Followed, Reference, Setting
from rollout_spec.suffix_policy import TwoTreeIndex

# As vLLM has it by default, and one that drafts nearly all it can; with history that may be spent whole. The
# first decides, and the second where it leaves less, down to LEAST_SHARE of the first.
SETTINGS = (Setting(1.0, 1.0), Setting(4.0, 2 / 3))
SETTINGS_WITH_HISTORY = (Setting(4.0, 1.0),)
LEAST_SHARE = 0.9

LEAST_PRICE = 0.02
STEEPNESS = 1e-3  # of the logarithm of the price, for every token spent too much
MAX_EXCESS = 10_000.0  # tokens: what a long stretch has saved or wasted is not made up for in the next

# Who is followed: one row in ROWS_PER_FOLLOWED; after the first row-steps one row-step in STEPS_PER_FOLLOWED.
ROWS_PER_FOLLOWED = 8
STEPS_PER_FOLLOWED = 16
NUM_FIRST_ROW_STEPS = 1 << 18
MAX_WAIT = 8  # steps, until a group is decoded


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
        self._num_open = 0
        self._num_steps = self._next = self._turn = 0
        self._allowance = float(NUM_FIRST_ROW_STEPS)  # of row-steps of followed groups

    def open_group(self, group: int, prompt: Int32Array) -> None:
        num_followed = len(self._group_of)
        if self._allowance > 0 and ROWS_PER_FOLLOWED * num_followed <= self._num_open:
            with self._or_forget():
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
        with self._or_forget():
            self._followed[group].open(sequence, after_prompt, weight)
            self._group_of[sequence] = group

    def close_sequence(self, sequence: int) -> None:
        """Before the index has closed it."""
        self._num_open -= 1
        group = self._group_of.get(sequence)
        if group is None:
            return
        followed = self._followed[group]
        with self._or_forget():
            self._hear(followed)
            del self._group_of[sequence]
            followed.close_sequence(sequence)
            if not followed.is_over():
                return
            if not followed.has_drafts():
                self.close_group(group)  # its text is of no use but to siblings that may never come
                return
            for reference in range(len(self._references)):
                followed.decode(reference, self._num_steps)

    def step(self, num_drafting: int) -> None:
        """The index has taken one, in which so many of its rows were allowed to draft."""
        if not num_drafting:
            return  # a closed gate, or text of the history
        self._num_steps += 1
        self._allowance += num_drafting / STEPS_PER_FOLLOWED
        self._allowance = min(self._allowance, NUM_FIRST_ROW_STEPS)
        if not self._followed or self._num_steps < self._next:
            return
        # Then as many row-steps are due of each reference as this step has drafted for.
        self._next = self._num_steps + min(MAX_WAIT, num_drafting // max(1, len(self._group_of)))
        self._decode(num_drafting)

    def _hear(self, followed: Followed) -> None:
        self._allowance -= followed.hear(self._index)

    def _decode(self, num_drafting: int) -> None:
        """One group by one reference: they take turns, so that no step waits for all."""
        if sum(each.num_bytes for each in self._followed.values()) > self._max_bytes:
            self._forget()
        pairs = list(itertools.product(self._followed.values(), range(len(self._references))))
        with self._or_forget():
            for _ in pairs:
                self._turn += 1
                followed, reference = pairs[self._turn % len(pairs)]
                self._hear(followed)
                if followed.decode(reference, self._num_steps, num_drafting):
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

    def _forget(self) -> None:
        """Follow none of the groups any more."""
        for reference in self._references:
            reference.index.clear()
        self._followed.clear()
        self._group_of.clear()

    @contextlib.contextmanager
    def _or_forget(self) -> Iterator[None]:
        """Where there is no room, or a request has begun anew."""
        try:
            yield
        except (MemoryError, BegunAnew):
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
        self.price.step(self.num_drafting)
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
    if config.mode == "suffix_policy" and config.group_sharing:
        return TwoTreeIndex(config)
    return PricedIndex(config) if config.has_own_price else SuffixIndex(**index_options(config))
