"""What a drafter gives an engine's rows, and what it is told of the step that may take it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollout_spec.drafting.native import Float32Array, Int32Array, InvalidArgument, lib


class Drafts(NamedTuple):
    """Drafts for the rows of a batch."""

    tokens: Int32Array  # [num_rows, K]: row i holds lengths[i] draft tokens, the rest is unspecified
    lengths: Int32Array  # [num_rows], most often 0

    @classmethod
    def none(cls, num_rows: int, width: int = 1) -> Drafts:
        return cls(np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32))

    def lists(self) -> list[list[int]]:
        tokens, end = self.tokens[np.arange(self.tokens.shape[1]) < self.lengths[:, None]].tolist(), 0
        return [tokens[end : (end := end + num)] for num in self.lengths.tolist()]


class StepsToCome(NamedTuple):
    """What a drafter wants of the steps that are not scheduled yet."""

    # Whether the first of them, which is one or two ahead, is to have room for drafts.
    drafts_wanted: bool = False
    # How many tokens a model is to draft for every row in the next step; 0: none, see `passes_for`. Where
    # ranks share a model all take the same passes: the scheduler tells them.
    num_model_tokens: int = 0


class ModelDrafts(NamedTuple):
    """What a model drafts after every row of a token matrix: R rows or more, m tokens each, m at most K."""

    tokens: Int32Array  # [R, m]; negative: nothing from there on
    # [R, m]: ln(p / (1 - p)) of each token's probability p by the model itself; where that is not a number,
    # the model is least sure.
    log_odds: Float32Array

    def of_rows(self, rows: Int32Array) -> tuple[Int32Array, Int32Array]:
        """The tokens and confidences, both int32 [n, m], of these rows of the matrix.

        Raises InvalidArgument: the shapes do not fit.
        """
        tokens, log_odds, last = self.tokens, self.log_odds, rows.max(initial=-1)
        if tokens.ndim != 2 or tokens.shape != log_odds.shape or len(tokens) <= last:
            shapes = f"has the shapes {tokens.shape} and {log_odds.shape}"
            raise InvalidArgument(f"model_drafts: {shapes}, must have two that are alike, with row {last}")
        least, most = lib.RS_LEAST_LOG_ODDS, lib.RS_LEAST_LOG_ODDS + lib.RS_MODEL_CONFIDENCES - 1
        confidences = np.floor(np.fmin(np.fmax(log_odds[rows], least), most)) - least
        return np.ascontiguousarray(tokens[rows], np.int32), confidences.astype(np.int32)


class NextStep(NamedTuple):
    """What the next step can take of drafts."""

    takes_drafts: bool = True  # False: it has begun without, or a model has drafted nothing for it
    # [num_rows], for how many draft tokens each row has room; None: any number.
    room: Int32Array | None = None


def passes_for(num_model_tokens: int) -> int:
    """How many passes a model takes for so many tokens: the first is that of every step, even for none."""
    return max(1, num_model_tokens)


TAKES_ANY, TAKES_NONE = NextStep(), NextStep(takes_drafts=False)
