"""Mends of vLLM's CPU engine, each in force only while a probe shows that upstream is wrong."""

from __future__ import annotations

import torch

from rollout_spec.patches import Patch, record, replace_function

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
_EXPERTS = Patch(
    name="vllm-cpu-experts",
    reason="on a processor without AVX-512, mixtures of experts fail, with drafts and without: 'Current vLLM "
    "config is not set', because their forward pass makes an activation layer",
    upstream="vllm/model_executor/layers/fused_moe/cpu_fused_moe.py, _CPU_MOE_ACT_FN",
    until="the activation is called without a layer (the probe then finds nothing to mend)",
)


def mend_cpu_engine() -> None:
    """Let right functions stand in for broken ones of vLLM's CPU engine.

    Does nothing on other platforms or where vLLM is right. The functions are probed, not the version, so
    that a mend goes when its reason goes.

    Raises:
        PatchError: what is to be replaced is no longer there.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    _mend_sampling()
    _mend_experts()


def _mend_sampling() -> None:
    from vllm.v1.sample import rejection_sampler

    from rollout_spec.verification import standard

    if not expand_is_right():
        replace_function(
            rejection_sampler, "expand_batch_to_tokens", standard.expand_batch_to_tokens, patch=_EXPAND
        )
    if not recovery_is_right():
        replace_function(rejection_sampler, "rejection_sample", standard.rejection_sample, patch=_REJECTION)


def _mend_experts() -> None:
    if experts_are_right():
        return
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    cpu_fused_moe._CPU_MOE_ACT_FN[cpu_fused_moe.MoEActivation.SILU] = SiluAndMul.forward_native
    record(_EXPERTS)


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


def experts_are_right() -> bool:
    """Whether the CPU engine's experts can be activated in a forward pass, where no configuration is set."""
    try:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import _CPU_MOE_ACT_FN, MoEActivation
    except ImportError:  # from vLLM 0.29 on experts are elsewhere
        return True
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(None):
        try:
            _CPU_MOE_ACT_FN[MoEActivation.SILU](torch.zeros(1, 2))
        except AssertionError:
            return False
    return True
