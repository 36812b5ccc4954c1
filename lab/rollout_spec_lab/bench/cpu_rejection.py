"""vLLM's rejection sampling on its CPU engine, which 0.24 calls with an argument that its kernel lacks.

Our drafts do not reach it. Others that are compared with them do.
"""

from typing import Any

import torch
from vllm.platforms import current_platform

from rollout_spec.patches import Patch, replace_function

PATCH = Patch(
    name="vllm-cpu-rejection-sample",
    reason="every sampled request with draft tokens fails: _sample_recovered_tokens_kernel_impl() got an "
    "unexpected keyword argument 'USE_FP64_GUMBEL'",
    upstream="vllm/utils/cpu_triton_utils.py, _sample_recovered_tokens_kernel_impl",
    until="the CPU kernel takes that argument (0.29 does; the probe then finds nothing to fix)",
)


def mend_cpu_rejection() -> None:
    """Leave the argument out where the kernel lacks it, and give it its noise in float32, as 0.29 does."""
    if not _is_wrong():
        return
    from vllm.utils.cpu_triton_utils import sample_recovered_tokens_kernel as launched

    recover = launched.func

    def recover_with_fewer_arguments(*args: Any, USE_FP64_GUMBEL: bool = False, **others: Any) -> None:  # noqa: N803
        tokens, ends, drafts, draft_probs, probs, noise, *rest = args
        recover(tokens, ends, drafts, draft_probs, probs, noise.float(), *rest, **others)

    replace_function(launched, "func", recover_with_fewer_arguments, patch=PATCH)


def _is_wrong() -> bool:
    """Whether the kernel for recovered tokens cannot be called as vLLM calls it."""
    if not current_platform.is_cpu():
        return False
    from vllm.utils import cpu_triton_utils

    kernel = getattr(cpu_triton_utils, "_sample_recovered_tokens_kernel_impl", None)
    if kernel is None:
        return False
    output = torch.full((1,), -1, dtype=torch.int64)
    try:
        kernel(
            output, torch.tensor([1]), torch.tensor([0]), None, torch.tensor([[0.5, 0.25, 0.25]]),
            torch.tensor([[1.0, 1.0, 3.0]]), 3, 8192, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=False,
        )  # fmt: skip
    except TypeError:
        return True
    return output.tolist() != [2]
