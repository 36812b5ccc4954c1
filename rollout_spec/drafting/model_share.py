"""What a model has in the drafts of an engine, and how much of that is accepted."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_spec.drafting.index import ModelDrafts
from rollout_spec.metrics import EngineCounters


class ModelShare:
    """Counts the tokens that a draft begins with and that the model proposed too."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}  # of what the step that runs verifies, by request

    def count_drafted(
        self,
        request_ids: Sequence[str],
        drafts: Sequence[list[int]],
        model_drafts: ModelDrafts | None,
        counters: EngineCounters,
    ) -> None:
        """The step that begins next verifies these drafts."""
        if model_drafts is None:
            return
        proposed = model_drafts.tokens.tolist()
        for request_id, draft, tokens in zip(request_ids, drafts, proposed, strict=False):
            self._lengths[request_id] = _num_alike(draft, tokens)
        counters.num_model_draft_tokens += sum(self._lengths.values())

    def count_accepted(
        self, request_ids: Sequence[str], nums_new_tokens: Sequence[int], counters: EngineCounters
    ) -> None:
        """The step has ended, and these requests got so many tokens."""
        lengths, self._lengths = self._lengths, {}
        if lengths:
            for request_id, num_new in zip(request_ids, nums_new_tokens, strict=True):
                counters.num_model_accepted_tokens += min(max(num_new - 1, 0), lengths.get(request_id, 0))


def _num_alike(draft: list[int], proposed: list[int]) -> int:
    """With how many equal tokens both begin."""
    pairs = enumerate(zip(draft, proposed, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(draft), len(proposed)))
