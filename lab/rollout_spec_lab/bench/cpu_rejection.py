"""vLLM's rejection sampling on its CPU engine, which 0.24 calls with an argument that its kernel lacks.

Our drafts do not reach it. Others that are compared with them do.
"""

import inspect
from typing import Any

from vllm.platforms import current_platform

from rollout_spec.patches import Patch, replace_function

PATCH = Patch(
    name="vllm-cpu-rejection-sample",
    reason="every sampled request with draft tokens fails: _sample_recovered_tokens_kernel_impl() got an "
    "unexpected keyword argument 'USE_FP64_GUMBEL'",
    upstream="vllm/utils/cpu_triton_utils.py, _sample_recovered_tokens_kernel_impl",
    until="the CPU kernel takes that argument (0.29 does, and nothing is changed then)",
)


def mend_cpu_rejection() -> None:
    """Leave the argument out where the kernel lacks it, and give it its noise in float32, as 0.29 does."""
    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    kernel = getattr(cpu_triton_utils, "_sample_recovered_tokens_kernel_impl", None)
    if kernel is None or "USE_FP64_GUMBEL" in inspect.signature(kernel).parameters:
        return
    launched = cpu_triton_utils.sample_recovered_tokens_kernel
    recover = launched.func

    def recover_with_fewer_arguments(*args: Any, USE_FP64_GUMBEL: bool = False, **others: Any) -> None:  # noqa: N803
        tokens, ends, drafts, draft_probs, probs, noise, *rest = args
        recover(tokens, ends, drafts, draft_probs, probs, noise.float(), *rest, **others)

    replace_function(launched, "func", recover_with_fewer_arguments, patch=PATCH)
