"""Mixtures of experts on a CPU without AVX-512: in vLLM before 0.29 their forward pass fails."""

from __future__ import annotations

from typing import Any

import torch

from rollout_spec.patches import Patch, misfit, record

MODULE = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
_PATCH = Patch(
    name="vllm-cpu-experts",
    reason="on a processor without AVX-512, mixtures of experts fail, with drafts and without: 'Current vLLM "
    "config is not set', because their forward pass makes an activation layer",
    upstream="vllm/model_executor/layers/fused_moe/cpu_fused_moe.py, _CPU_MOE_ACT_FN",
    until="the activation is called without a layer (the probe then finds nothing to mend)",
)


def mend(cpu_fused_moe: Any) -> None:
    """Call the activation without a layer, where making the layer fails.

    Raises:
        PatchError: there is no such table of activations.
    """
    from vllm.model_executor.layers.activation import SiluAndMul

    if not hasattr(cpu_fused_moe, "_CPU_MOE_ACT_FN"):
        raise misfit(_PATCH, f"{MODULE}._CPU_MOE_ACT_FN does not exist")
    if not is_right(cpu_fused_moe):
        cpu_fused_moe._CPU_MOE_ACT_FN[cpu_fused_moe.MoEActivation.SILU] = SiluAndMul.forward_native
        record(_PATCH)


def is_right(cpu_fused_moe: Any) -> bool:
    """Whether the experts can be activated in a forward pass, where no configuration is set."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(None):
        try:
            cpu_fused_moe._CPU_MOE_ACT_FN[cpu_fused_moe.MoEActivation.SILU](torch.zeros(1, 2))
        except AssertionError:
            return False
    return True
