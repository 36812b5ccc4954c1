"""repetition_penalty of a prompt of embeddings: vLLM takes what the row holds for the prompt's tokens."""

import inspect
from typing import Any

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.upstream import ALL

WHERE = {ALL: "vllm.v1.worker.gpu_input_batch"}
_ROW = "self.token_ids_cpu[req_index, :num_prompt_tokens]"
PATCH = Patch(
    name="vllm-embedded-prompts",
    reason="with drafts and without, the repetition_penalty of a request whose prompt is embeddings is for "
    "tokens of an earlier request in its row",
    upstream="vllm/v1/worker/gpu_input_batch.py, InputBatch.add_request",
    until="add_request writes tokens for a prompt that has none",
)


def applies(module: Any) -> bool:
    return inspect.getsource(module.InputBatch.add_request).count(_ROW) <= 1


def fix(module: Any) -> None:
    """Give a prompt of embeddings the tokens that it has in vLLM's scheduler, and in a new row: zeros."""

    @wrap(module.InputBatch, "add_request", PATCH, "42df2b27", "81e4d3d8")  # 0.23, 0.24; 0.29 to 0.33
    def add_request_and_clear(add_request: Any, self: Any, request: Any) -> int:
        row = add_request(self, request)
        if request.prompt_token_ids is None:
            self.token_ids_cpu[row, : request.num_prompt_tokens] = 0
        return row
