"""What a model has in the drafts of an engine, and how much of that is accepted."""

from collections.abc import Sequence

import numpy as np

from rollout_spec.drafting.drafts import Drafts, ModelDrafts
from rollout_spec.drafting.gate.step import Floats
from rollout_spec.drafting.native import Int32Array
from rollout_spec.metrics import EngineCounters
from rollout_spec.trace import num_alike


class ModelShare:
    """Counts the tokens that a draft begins with and that the model proposed too."""

    def __init__(self, counters: EngineCounters) -> None:
        self._counters = counters
        self._num_tokens = 0  # that the model drafted of each row for the step that runs
        self._lengths: dict[str, int] = {}  # how many of its tokens the step verifies, by request

    def count_drafted(
        self, request_ids: Sequence[str], drafts: Drafts, model_drafts: ModelDrafts | None
    ) -> None:
        """The step that begins next verifies these drafts."""
        if model_drafts is None:
            return
        self._num_tokens = model_drafts.tokens.shape[1]
        proposed = model_drafts.tokens.tolist()
        for request_id, draft, tokens in zip(request_ids, drafts.lists(), proposed, strict=False):
            self._lengths[request_id] = num_alike(draft, tokens)
        self._counters.num_model_draft_tokens += sum(self._lengths.values())

    def count_accepted(
        self, request_ids: Sequence[str], nums_new_tokens: Int32Array
    ) -> tuple[Floats, Floats] | None:
        """`EndedStep.model_shares` of the step that has ended, in which these requests got so many tokens."""
        lengths, self._lengths = self._lengths, {}
        if not lengths:
            return None
        each = zip(request_ids, nums_new_tokens.tolist(), strict=True)
        rows = [(lengths[name], num_new - 1) for name, num_new in each if num_new and name in lengths]
        if not rows:
            return None
        verified, accepted = np.array(rows).T
        accepted = np.minimum(verified, accepted)
        self._counters.num_model_accepted_tokens += int(accepted.sum())
        places = np.arange(self._num_tokens)
        return (verified[:, None] > places).mean(axis=0), (accepted[:, None] > places).mean(axis=0)
