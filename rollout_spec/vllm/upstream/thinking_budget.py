"""thinking_token_budget in the row of another request: vLLM moves what it counts wrongly.

In an engine with drafts it also forces the end of a reasoning in the first row of a step without drafts.
"""

import dataclasses
from typing import Any

from rollout_spec.patches import Patch, temporarily, wrap
from rollout_spec.vllm.upstream import ALL

WHERE = {ALL: "vllm.v1.sample.thinking_budget_state"}
PATCH = Patch(
    name="vllm-thinking-budget",
    reason="a request gets the end of another's reasoning: where it takes the place of one that has ended, "
    "whose budget stays there; where it is swapped with one that has a budget (before 0.29); and, in an "
    "engine with drafts, where it has the first row of a step without any",
    upstream="vllm/v1/sample/thinking_budget_state.py, ThinkingBudgetStateHolder.sync_batch, apply_to_logits",
    until="sync_batch takes both rows' budgets out before it moves one, as vLLM's logits processors do, and "
    "a step without drafts has one row of logits for each request",
)


def fix(module: Any) -> None:
    """Let each budget follow its request, and no other."""

    # 0.23, 0.24; 0.29 to 0.33
    @wrap(module.ThinkingBudgetStateHolder, "sync_batch", PATCH, "a5433f73", "83308e95")
    def sync_batch_and_swap(sync_batch: Any, self: Any, batch_update: Any) -> None:
        if not batch_update:
            return
        sync_batch(self, dataclasses.replace(batch_update, moved=()))
        for row, other, direction in batch_update.moved:
            state, swapped = self._state.pop(row, None), self._state.pop(other, None)
            if state is not None:
                self._state[other] = state
            if swapped is not None and direction == module.MoveDirectionality.SWAP:
                self._state[row] = swapped

    @wrap(module.ThinkingBudgetStateHolder, "apply_to_logits", PATCH, "2d7ec619")  # 0.23 to 0.33
    def apply_in_own_rows(
        apply: Any, self: Any, logits: Any, predict_bonus_token: bool, spec_token_ids: Any
    ) -> Any:
        with temporarily(self, "in_spec_mode", self.in_spec_mode and any(spec_token_ids or ())):
            return apply(self, logits, predict_bonus_token, spec_token_ids)
