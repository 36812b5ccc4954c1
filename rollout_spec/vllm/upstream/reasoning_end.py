"""The end of reasoning inside a draft: vLLM before 0.29 looks for it once a step, not once a token."""

from typing import Any

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.upstream import WITH_DRAFTS

WHERE = {WITH_DRAFTS: "vllm.v1.core.sched.scheduler"}
PATCH = Patch(
    name="vllm-reasoning-end",
    reason="a grammar begins where reasoning ends, and vLLM looks for that once a step: after an accepted "
    "draft that ends the reasoning, the answer breaks the grammar",
    upstream="vllm/v1/core/sched/scheduler.py, Scheduler.update_draft_token_ids",
    until="vLLM looks for the end of reasoning inside a draft (0.29 does)",
)
# Methods of vLLM's that came with what looks for the end of reasoning inside a draft: of 0.29, and of 0.32.
_SEES_REASONING_END = ("trim_reasoning_for_advance", "accept_tokens")


def applies(_: Any) -> bool:
    """Whether vLLM does not look for it inside a draft."""
    from vllm.v1.structured_output import StructuredOutputManager

    return not any(hasattr(StructuredOutputManager, name) for name in _SEES_REASONING_END)


def fix(module: Any) -> None:
    """Cut a draft before the token that ends the reasoning: it comes last in its step, as without drafts."""

    @wrap(module.Scheduler, "update_draft_token_ids", PATCH, "f4896f32")  # 0.23 to 0.29
    def update_with_cut_drafts(update: Any, self: Any, draft_token_ids: Any) -> None:
        for request_id, draft in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if draft and request is not None and request.use_structured_output:
                del draft[_num_reasoning(self.structured_output_manager, request, draft) :]
        update(self, draft_token_ids)


def _num_reasoning(manager: Any, request: Any, draft: list[int]) -> int:
    """How many tokens of a draft come before one that ends the reasoning; all, if none does."""
    reasoner = manager._get_reasoner(request)
    is_free = reasoner is not None and not manager.enable_in_reasoning
    if not is_free or request.structured_output_request.reasoning_ended:
        return len(draft)
    tokens = list(request.all_token_ids)
    for i, token in enumerate(draft):
        tokens.append(token)
        if reasoner.is_reasoning_end_streaming(tokens, [token]):
            return i
    return len(draft)
