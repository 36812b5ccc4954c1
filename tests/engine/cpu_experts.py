"""The worker extension of the tests with several engine cores.

Workers import this module, and with it the collectives that vLLM's CPU engine lacks, and the activation of
experts that vLLM 0.24 and before cannot call without AVX-512.
"""

from __future__ import annotations

import contextlib

import tests.engine.cpu_collectives  # noqa: F401
from rollout_spec.verl.server import SpecWorkerExtension

# vLLM before 0.29 makes a layer in every pass without AVX-512: "Current vLLM config is not set".
with contextlib.suppress(ImportError):
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    cpu_fused_moe._CPU_MOE_ACT_FN[cpu_fused_moe.MoEActivation.SILU] = SiluAndMul.forward_native


class Extension(SpecWorkerExtension):
    """Ours, a look inside and a way to break the drafter."""

    def last_step_of_the_ranks(self) -> tuple[int, int]:
        return tuple(self.model_runner.drafter.other_ranks.ranks)

    def pass_the_drafter_by(self) -> None:
        self.model_runner.effective_drafter_max_model_len = 0
