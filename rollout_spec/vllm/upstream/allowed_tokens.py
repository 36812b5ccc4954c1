"""allowed_token_ids in the row of another request: vLLM before 0.32 moves the rows of its mask wrongly."""

import inspect
from typing import Any

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.upstream import ALL

WHERE = {ALL: "vllm.v1.worker.gpu_input_batch"}
_MASK = "allowed_token_ids_mask_cpu_tensor"  # bool [max_num_reqs, vocab_size], True where it is not allowed
PATCH = Patch(
    name="vllm-allowed-token-ids",
    reason="with drafts and without, the allowed_token_ids of a request stay in its row for the next one "
    "there: condense copies the row of a mask and does not clear it, swap_states swaps views",
    upstream="vllm/v1/worker/gpu_input_batch.py, InputBatch.condense and swap_states",
    until="condense clears the row that it has moved (0.32 does)",
)


def applies(module: Any) -> bool:
    return f"{_MASK}[last_req_index].fill_(False)" not in inspect.getsource(module.InputBatch.condense)


def fix(module: Any) -> None:
    """Let each row of a batch have the mask of its own request."""
    batch = module.InputBatch

    @wrap(batch, "condense", PATCH, "c6a59066", "91c54dce")  # 0.23, 0.24; 0.29
    def condense_and_clear(condense: Any, self: Any) -> None:
        num_before = len(self._req_ids)
        condense(self)
        mask = getattr(self, _MASK)
        if mask is not None:
            mask[self.num_reqs : num_before] = False

    @wrap(batch, "swap_states", PATCH, "f1cd7c78", "6c1b4215")  # 0.23, 0.24; 0.29
    def swap_states_and_masks(swap_states: Any, self: Any, i1: int, i2: int) -> None:
        mask = getattr(self, _MASK)
        swapped = None if mask is None else mask[[i2, i1]]  # a copy
        swap_states(self, i1, i2)
        if mask is not None:
            mask[[i1, i2]] = swapped
