"""Mode suffix_policy with SuffixDecoding's two trees: a request's own text, and what its group shares."""

from __future__ import annotations

import contextlib

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.index import FULL_WEIGHT, IndexStats, StepResult, SuffixIndex, index_options
from rollout_spec.native import BudgetExceeded, Int32Array, OutOfMemory

# In place of an id: no tree yet, and none until the sequence is closed, since there is no room.
_NONE, _REFUSED = -1, -2


class TwoTreeIndex(SuffixIndex):
    """Drafts for a row from its own prompt and response or from its group's text, whichever promises more.

    What a draft promises is the sum of its survivals, SuffixDecoding's score (arXiv 2411.04975); on a tie the
    own text decides, as in ArcticInference. Half the byte budget is for each. A sequence gets a tree of its
    own when it may draft: earlier responses have none, and where there is no room a sequence goes without.
    The corpus is the shared tree's.

    Args:
        config: the options of `rollout.spec`.

    Raises:
        ConfigError: the corpus cannot be used; OutOfMemory, BudgetExceeded.
    """

    def __init__(self, config: SpecConfig) -> None:
        options = index_options(config)
        options["max_bytes"] //= 2
        super().__init__(**options)
        self._own = SuffixIndex(**options | {"corpus": None})
        self._forget_own()
        self._places = np.arange(config.num_speculative_tokens)  # of a draft

    def _forget_own(self) -> None:
        self._prompts: dict[int, Int32Array] = {}  # by the group
        self._starts: dict[
            int, tuple[int, bool]
        ] = {}  # of open sequences: the group, and whether after its prompt
        self._own_groups: dict[int, int] = {}  # by the sequence
        self._own_sequences = np.full(64, _NONE, np.int32)  # likewise

    def open_group(self, prompt_token_ids: Int32Array) -> int:
        group = super().open_group(prompt_token_ids)
        self._prompts[group] = prompt_token_ids.copy()
        return group

    def close_group(self, group: int) -> None:
        super().close_group(group)
        del self._prompts[group]

    def open_sequence(
        self, group: int, *, after_prompt: bool = True, weight: int = FULL_WEIGHT, keep_text: bool = False
    ) -> int:
        sequence = super().open_sequence(group, after_prompt=after_prompt, weight=weight, keep_text=keep_text)
        self._starts[sequence] = (group, after_prompt)
        if sequence >= len(self._own_sequences):
            more = np.full(sequence, _NONE, np.int32)
            self._own_sequences = np.concatenate([self._own_sequences, more])
        return sequence

    def close_sequence(self, sequence: int) -> None:
        super().close_sequence(sequence)
        del self._starts[sequence]
        self._fell(sequence, _NONE)

    def step(
        self,
        sequences: Int32Array,
        token_ids: Int32Array,
        rows: Int32Array,
        levels: Int32Array,
        max_draft_tokens: Int32Array,
        min_token_prob: float = 0.0,
    ) -> StepResult:
        shared = super().step(sequences, token_ids, rows, levels, max_draft_tokens, min_token_prob)
        for sequence in sequences[max_draft_tokens > 0].tolist():
            self._plant(sequence)
        while True:
            entries = np.flatnonzero(self._own_sequences[sequences] >= 0)
            if not len(entries):
                return shared
            try:
                own = self._own.step(
                    self._own_sequences[sequences[entries]],
                    token_ids,
                    rows[entries],
                    levels[entries],
                    max_draft_tokens[entries],
                    min_token_prob,
                )
                break
            except (BudgetExceeded, OutOfMemory) as error:
                too_much = entries if error.row < 0 else entries[error.row : error.row + 1]
                for sequence in sequences[too_much].tolist():
                    self._fell(sequence, _REFUSED)
        better = (own.num_draft_tokens > 0) & (self._promise(own) >= self._promise(shared)[entries])
        for theirs, its in zip(shared, own, strict=True):
            theirs[entries[better]] = its[better]
        return shared

    def _plant(self, sequence: int) -> None:
        """A tree of its own for a sequence that has none, if there is room."""
        if self._own_sequences[sequence] != _NONE:
            return
        group, after_prompt = self._starts[sequence]
        prompt = self._prompts[group] if after_prompt else np.empty(0, np.int32)
        self._own_sequences[sequence] = _REFUSED
        with contextlib.suppress(BudgetExceeded, OutOfMemory):
            self._own_groups[sequence] = own_group = self._own.open_group(prompt)
            self._own_sequences[sequence] = self._own.open_sequence(own_group, after_prompt=after_prompt)

    def _fell(self, sequence: int, instead: int) -> None:
        """Fell a sequence's own tree, if it has one."""
        if self._own_sequences[sequence] >= 0:
            self._own.close_sequence(int(self._own_sequences[sequence]))
        if sequence in self._own_groups:
            self._own.close_group(self._own_groups.pop(sequence))
        self._own_sequences[sequence] = instead

    def _promise(self, result: StepResult) -> np.ndarray:
        """How many tokens of each draft are expected to be accepted, float32 [n]."""
        is_drafted = self._places < result.num_draft_tokens[:, None]
        return np.where(is_drafted, result.survivals, 0).sum(axis=1)

    def stats(self) -> IndexStats:
        """Of the shared text, but for the bytes, which are all."""
        stats = super().stats()
        return stats._replace(num_bytes=stats.num_bytes + self._own.stats().num_bytes)

    def validate(self) -> None:
        super().validate()
        self._own.validate()

    def clear(self) -> None:
        super().clear()
        self._own.clear()
        self._forget_own()

    def close(self) -> None:
        super().close()
        self._own.close()
