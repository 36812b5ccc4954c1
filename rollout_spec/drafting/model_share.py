"""What a model has in the drafts of an engine, and how much of that is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollout_spec.drafting.drafts import Drafts, ModelDrafts
from rollout_spec.drafting.gate.step import Floats
from rollout_spec.drafting.native import Int32Array
from rollout_spec.metrics import EngineCounters
from rollout_spec.trace import num_alike


class ModelShare(NamedTuple):
    """Of a step's drafts the tokens that they begin with and that the model proposed too."""

    lengths: dict[str, int]  # how many of each request's
    num_places: int  # tokens that the model drafted of each row

    @classmethod
    def of_drafts(cls, request_ids: Sequence[str], drafts: Drafts, model_drafts: ModelDrafts) -> ModelShare:
        each = zip(request_ids, drafts.lists(), model_drafts.tokens.tolist(), strict=False)
        lengths = {request_id: num_alike(draft, tokens) for request_id, draft, tokens in each}
        return cls(lengths, model_drafts.tokens.shape[1])

    def count_accepted(
        self, counters: EngineCounters, request_ids: Sequence[str], nums_new_tokens: Int32Array
    ) -> tuple[Floats, Floats] | None:
        """Count what was accepted of it by the step that verified it, in which these requests got so many
        tokens; returns that step's `EndedStep.model_shares`."""
        each = zip(request_ids, nums_new_tokens.tolist(), strict=True)
        rows = [(self.lengths[name], num - 1) for name, num in each if num and name in self.lengths]
        if not rows:
            return None
        verified, accepted = np.array(rows).T
        accepted = np.minimum(verified, accepted)
        counters.num_model_accepted_tokens += int(accepted.sum())
        places = np.arange(self.num_places)
        return (verified[:, None] > places).mean(axis=0), (accepted[:, None] > places).mean(axis=0)
