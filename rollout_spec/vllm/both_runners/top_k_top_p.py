"""Top-k and top-p in one way for any number of rows: by vLLM's kernel that has one program a row.

It keeps exactly k tokens: of those that tie at the k-th place, the ones with the smallest ids.
"""

import importlib
from typing import Any

from rollout_spec.patches import Patch, wrap

_SAMPLER, _KERNELS = (f"vllm.v1.sample.ops.{name}" for name in ("topk_topp_sampler", "topk_topp_triton"))
_LARGEST_SPLIT, _MOST_ROWS = "_SPLIT_MAX_BATCH", "_max_sampler_batch_size"  # from 0.32 on
PATCH = Patch(
    name="vllm-top-k-top-p-by-rows",
    reason="on a GPU which tokens top-k and top-p keep depends on the number of rows, and so on drafts: "
    "before 0.32 fewer than 8 rows are sorted by torch, which keeps all that tie at the k-th place; from "
    "0.32 on up to 64 rows are split. Used by engines that draft, or with method=keyed",
    upstream="vllm/v1/sample/ops/topk_topp_sampler.py, apply_top_k_top_p; "
    "vllm/v1/sample/ops/topk_topp_triton.py, apply_top_k_top_p_triton",
    until="which tokens vLLM keeps follows from the row alone",
)


def cut_rows_alike(most_rows: int | None = None) -> None:
    """Let this process cut every row of logits by that kernel, where Triton runs. Idempotent.

    Args:
        most_rows: of logits in a step; None: as many as vLLM believes, which warms up for every number.

    Raises PatchError: vLLM's functions take other arguments.
    """
    module, kernels = (importlib.import_module(name) for name in (_SAMPLER, _KERNELS))

    @wrap(module, "apply_top_k_top_p_pytorch", PATCH, "226497dc")  # 0.23 to 0.33
    def cut_by_the_kernel(sort: Any, logits: Any, k: Any, p: Any, *args: Any, **kwargs: Any) -> Any:
        if logits.device.type == "cpu" or not module.HAS_TRITON:
            return sort(logits, k, p, *args, **kwargs)
        return module.apply_top_k_top_p_triton(logits, k, p)

    if hasattr(kernels, _LARGEST_SPLIT):
        setattr(kernels, _LARGEST_SPLIT, 0)
    if most_rows is not None and hasattr(kernels, _MOST_ROWS):
        setattr(kernels, _MOST_ROWS, lambda vllm_config: most_rows)
