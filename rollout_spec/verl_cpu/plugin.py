"""verl on a machine without an accelerator: the platform `cpu`. Inert wherever there is one."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os

from rollout_spec.verl_cpu import patches

PLATFORM = "cpu"
_ACCELERATOR_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/davinci[0-9]*")


def activate() -> None:
    """Register the platform and the patches it needs, where `is_wanted`; safe to call again."""
    if not is_wanted():
        return
    # Not above: verl imports the plugin that imports this module.
    from verl.plugin.platform import PlatformRegistry, set_platform

    from rollout_spec.verl_cpu.platform import PlatformCPU

    _use_all_cores()
    PlatformRegistry.register(platform=PLATFORM)(PlatformCPU)
    set_platform(PlatformCPU())
    patches.apply()


def is_wanted() -> bool:
    """True when the engine is a CPU build, the machine has no accelerator and nobody chose a platform.

    The engine's build is part of the test because the driver of a GPU cluster may sit on a machine
    that has no accelerator itself.
    """
    if os.environ.get("VERL_PLATFORM", PLATFORM) != PLATFORM:
        return False
    return engine_is_cpu_build() and not _has_accelerator()


def engine_is_cpu_build() -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("vllm").endswith("+cpu")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(patches.ENGINE))
    return False


def _has_accelerator() -> bool:
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
