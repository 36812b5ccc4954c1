"""Drafters in a replay: what one must do, and the suffix index as one. What a recorded model drafts."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafts import ModelDrafts
from rollout_spec.drafting.index import make_index
from rollout_spec.drafting.native import BudgetExceeded, Int32Array
from rollout_spec.trace import ResponseDrafts, Rollout


class ReplayDrafter(Protocol):
    """A drafter in a replay: `start` of a line, a `draft` for each decode step of its responses, `finish`."""

    def start(self, line: Rollout, earlier: Sequence[Int32Array]) -> None:
        """Begin a line's responses; `earlier` are responses to the same prompt."""
        return

    def draft(
        self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, max_draft_tokens: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Index what is new in n rows and draft for them.

        Args:
            rows: [n], rows of token_ids.
            token_ids: [num_rows, L], the prompt and the whole response of every row.
            levels: [n], the number of tokens that each row has so far.
            max_draft_tokens: [n], 0: index only.

        Returns:
            Draft tokens [n, >= longest draft], and their numbers [n].
        """

    def finish(self) -> None:
        return


def drafts_at(
    model_drafts: Sequence[ResponseDrafts | None], nums_done: Iterable[int], num_tokens: int
) -> ModelDrafts:
    """What a model drafts in n rows.

    Args:
        model_drafts: [n], of each row's response.
        nums_done: [n], how many tokens of the response exist; negative: the row gets no draft.
        num_tokens: of a draft, at most.
    """
    shape = (len(model_drafts), num_tokens)
    tokens, log_odds = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for row, (each, num_done) in enumerate(zip(model_drafts, nums_done, strict=True)):
        if each is not None and 0 <= num_done < len(each.tokens):
            drafted = each.tokens[num_done, :num_tokens]
            tokens[row, : len(drafted)] = drafted
            log_odds[row, : len(drafted)] = each.log_odds[num_done, :num_tokens]
    return ModelDrafts(tokens, log_odds)


def drafts_of_line(line: Rollout, rows: Int32Array, levels: Int32Array, most_tokens: int) -> ModelDrafts:
    """What a model drafts for all rows of a line, nothing in rows that are not named; levels: [n], of the
    named ones; most_tokens: of a draft."""
    nums_done = np.full(len(line.responses), -1)
    nums_done[rows] = levels - len(line.prompt_token_ids)
    num_tokens = min(most_tokens, max(each.tokens.shape[1] for each in line.model_drafts))
    return drafts_at(line.model_drafts, nums_done.tolist(), num_tokens)


class IndexDrafter:
    """The suffix index, with one group a line; `mixes` in what a model drafts, where the line has it."""

    def __init__(self, config: SpecConfig, *, mixes: bool = False) -> None:
        self.index, self._mixes = make_index(config), mixes
        self.min_survival = config.min_survival
        self.num_speculative_tokens = config.num_speculative_tokens
        self._group = -1
        self._sequences = np.empty(0, np.int32)
        self._line: Rollout | None = None  # whose model's drafts are mixed in

    def start(self, line: Rollout, earlier: Sequence[Int32Array]) -> None:
        self._group = self.index.open_group(line.prompt_token_ids)
        for response in reversed(earlier):  # of continuations that are equally frequent the latest is drafted
            self.index.add_text(self._group, response)
        self.index.catch_up()
        if self.index.stats().num_texts_left_out:
            raise BudgetExceeded("earlier responses do not fit")
        self._sequences = np.array([self.index.open_sequence(self._group) for _ in line.responses], np.int32)
        self._line = line if self._mixes and line.model_drafts else None

    def draft(
        self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, max_draft_tokens: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        model = None
        if self._line is not None:
            model = drafts_of_line(self._line, rows, levels, self.num_speculative_tokens)
        sequences = self._sequences[rows]
        result = self.index.index_and_draft(
            sequences, token_ids, rows, levels, max_draft_tokens, self.min_survival, model_drafts=model
        )
        if result.dropped:  # an engine goes on without them; here they are what is measured
            raise BudgetExceeded(f"{len(result.dropped)} responses do not fit")
        return result.draft_tokens, result.num_draft_tokens

    def finish(self) -> None:
        for sequence in self._sequences:
            self.index.close_sequence(int(sequence))
        self.index.close_group(self._group)
