"""Mends of vLLM's CPU engine, each in force only while a probe shows that upstream is wrong."""

from __future__ import annotations

import torch

from rollout_spec.patches import Patch, replace_function

_EXPAND = Patch(
    name="vllm-cpu-expand",
    reason="with draft tokens, temperature, top-k and top-p of a row are read from uninitialised memory, so "
    "tokens are drawn from the wrong distribution: _expand_kernel_impl fills an int64 copy of a float output",
    upstream="vllm/utils/cpu_triton_utils.py, _expand_kernel_impl",
    until="the CPU kernel writes its output for every dtype (the probe then finds nothing to mend)",
)
_REJECTION = Patch(
    name="vllm-cpu-rejection-sample",
    reason="every sampled request with draft tokens fails: _sample_recovered_tokens_kernel_impl() got an "
    "unexpected keyword argument 'USE_FP64_GUMBEL'",
    upstream="vllm/utils/cpu_triton_utils.py, _sample_recovered_tokens_kernel_impl",
    until="the CPU kernel takes that argument (the probe then finds nothing to mend)",
)


def mend_cpu_sampling() -> None:
    """Let the vectorised functions of `rollout_spec.verification.standard` stand in for broken CPU kernels.

    Does nothing on other platforms or where vLLM is right. The kernels are probed, not the version, so
    that a mend goes when its reason goes.

    Raises:
        PatchError: what is to be replaced is no longer there.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler

    from rollout_spec.verification import standard

    if not expand_is_right():
        replace_function(
            rejection_sampler, "expand_batch_to_tokens", standard.expand_batch_to_tokens, patch=_EXPAND
        )
    if not recovery_is_right():
        replace_function(rejection_sampler, "rejection_sample", standard.rejection_sample, patch=_REJECTION)


def expand_is_right() -> bool:
    """Whether the CPU engine's expand kernel repeats a float value for each token."""
    from vllm.utils import cpu_triton_utils

    kernel = getattr(cpu_triton_utils, "_expand_kernel_impl", None)
    if kernel is None:  # Triton runs on the CPU instead
        return True
    output = torch.full((3,), -1.0)
    kernel(output, torch.tensor([0.5, 0.25]), torch.tensor([1, 3]), 0, 1, MAX_NUM_TOKENS=128)
    return output.tolist() == [0.5, 0.25, 0.25]


def recovery_is_right() -> bool:
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
