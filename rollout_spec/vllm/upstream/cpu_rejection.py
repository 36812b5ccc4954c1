"""Rejection sampling on the CPU engine, which vLLM 0.24 calls with an argument that its kernel lacks."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from rollout_spec.patches import Patch, guard_parameters, replace_function
from rollout_spec.verification import standard

MODULE = "vllm.v1.sample.rejection_sampler"
_PATCH = Patch(
    name="vllm-cpu-rejection-sample",
    reason="every sampled request with draft tokens fails: _sample_recovered_tokens_kernel_impl() got an "
    "unexpected keyword argument 'USE_FP64_GUMBEL'",
    upstream="vllm/utils/cpu_triton_utils.py, _sample_recovered_tokens_kernel_impl",
    until="the CPU kernel takes that argument (the probe then finds nothing to mend)",
)


def mend(rejection_sampler: Any) -> None:
    """Verify in plain torch where the CPU's kernel cannot be called.

    Raises:
        PatchError: what is to be replaced is no longer there, or takes other arguments.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and not is_right():
        expected = tuple(inspect.signature(standard.rejection_sample).parameters)
        guard_parameters(_PATCH, rejection_sampler, "rejection_sample", expected)
        replace_function(rejection_sampler, "rejection_sample", standard.rejection_sample, patch=_PATCH)


def is_right() -> bool:
    """Whether the CPU engine's kernel for recovered tokens can be called as vLLM calls it."""
    from vllm.utils import cpu_triton_utils

    kernel = getattr(cpu_triton_utils, "_sample_recovered_tokens_kernel_impl", None)
    if kernel is None:
        return True
    output = torch.full((1,), -1, dtype=torch.int64)
    try:
        kernel(
            output, torch.tensor([1]), torch.tensor([0]), None, torch.tensor([[0.5, 0.25, 0.25]]),
            torch.tensor([[1.0, 1.0, 3.0]]), 3, 8192, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=False,
        )  # fmt: skip
    except TypeError:
        return False
    return output.tolist() == [2]
