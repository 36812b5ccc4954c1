"""Programs import it first. Then vLLM's CPU engine finds Triton, and may take MRV2.

Triton's wheel has no backend for CPUs, which vLLM asks for. With TRITON_INTERPRET=1 none is used.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends

from rollout_spec_lab.verl_cpu.workarounds import answer_for_vllm


class Driver:
    """Triton's driver of a CPU. Some models of vLLM make one where they are imported."""

    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = SimpleNamespace(driver=Driver)

answer_for_vllm()  # vLLM before 0.32 asks for the version of the distribution `vllm` there
