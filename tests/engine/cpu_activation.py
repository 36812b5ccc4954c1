"""Experts on CPUs without AVX-512. vLLM before 0.29 makes a layer in every pass of theirs, which fails:
"Current vLLM config is not set"."""

import contextlib

with contextlib.suppress(ImportError):
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    cpu_fused_moe._CPU_MOE_ACT_FN[cpu_fused_moe.MoEActivation.SILU] = SiluAndMul.forward_native
