"""bad_words of several tokens on MRV2: vLLM before 0.29 reads the token before the one that it means."""

import inspect
from typing import Any

from rollout_spec.patches import Patch, wrap
from rollout_spec.vllm.upstream import WITH_DRAFTS

WHERE = {WITH_DRAFTS: "vllm.v1.worker.gpu.sample.bad_words"}
_WRONG = "input_ids_ptr + cur_req_first_pos + spec_offset)"
PATCH = Patch(
    name="vllm-bad-words",
    reason="with drafts on MRV2, bad_words of several tokens forbid other tokens than without: of a row's "
    "inputs, the first is its last token and not its first draft token (vLLM issue 52311)",
    upstream="vllm/v1/worker/gpu/sample/bad_words.py, _bad_words_kernel",
    until="the kernel reads spec_offset + 1 (0.29 does)",
)


def applies(module: Any) -> bool:
    return _WRONG in inspect.getsource(module)


def fix(module: Any) -> None:
    """Give the kernel each row's draft tokens where it looks for them."""

    @wrap(module.BadWordsState, "apply_bad_words", PATCH, "59d4d2dd")  # 0.23, 0.24
    def apply_to_drafts(
        apply: Any, self: Any, logits: Any, expanded_idx_mapping: Any, idx_mapping_np: Any,
        input_ids: Any, expanded_local_pos: Any,
    ) -> None:  # fmt: skip
        if self.num_bad_words.np[idx_mapping_np].any():
            # The kernel reads no input after a row's last one, so what comes round does not matter.
            input_ids = input_ids.roll(-1)
        apply(self, logits, expanded_idx_mapping, idx_mapping_np, input_ids, expanded_local_pos)
