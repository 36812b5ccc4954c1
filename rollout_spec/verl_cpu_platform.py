"""The platform `cpu`: verl's interface to a device, answered by the CPU."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase


def _engine_environment() -> dict[str, str]:
    """What vLLM asks for on the CPU: Intel's OpenMP when it is installed, and no reserved core.

    vLLM's default binding keeps one core free for the scheduler, which waits while the model runs. With
    VLLM_ENABLE_V1_MULTIPROCESSING=0 it accepts distributed_executor_backend=uni: the model then runs in
    the engine's process, one process fewer to start and to talk to; verl's default (mp) stays possible.
    """
    values = {
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    }
    preload = os.environ.get("LD_PRELOAD", "")
    library = os.path.join(sys.prefix, "lib", "libiomp5.so")
    if "omp" not in preload and os.path.exists(library):
        values["LD_PRELOAD"] = ":".join(filter(None, (preload, library)))
        # Milliseconds of spinning after a parallel region; vLLM's own choice when it binds the threads.
        values["KMP_BLOCKTIME"] = os.environ.get("KMP_BLOCKTIME", "5")
    return values


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes() -> int:
    # The kernel's two counts are not taken at the same moment.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident_bytes())


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    page = resource.getpagesize()
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _device_module() -> types.ModuleType:
    """torch.cpu and the functions of torch.cuda that verl calls whatever the device is."""
    module = types.ModuleType("rollout_spec.verl_cpu_platform.device")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    module.__dict__.update(
        # Ray's *logical* accelerator: one per machine, so that worker 0 finds device 0.
        device_count=lambda: 1,
        empty_cache=_nothing,
        get_device_name=lambda device=None: "CPU",
        get_rng_state=torch.get_rng_state,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        max_memory_allocated=lambda device=None: _peak_resident_bytes(),
        max_memory_reserved=lambda device=None: _peak_resident_bytes(),
        mem_get_info=_mem_get_info,
        memory_allocated=lambda device=None: _resident_bytes(),
        memory_reserved=lambda device=None: _resident_bytes(),
        reset_accumulated_memory_stats=_nothing,
        reset_peak_memory_stats=_nothing,
        set_rng_state=torch.set_rng_state,
    )
    return module


_DEVICE_MODULE = _device_module()


class PlatformCPU(PlatformBase):
    """verl's view of a machine whose only device is its CPU."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # Not an index: verl passes it to Module.to() and to FSDP, where 0 would mean cuda:0.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return

    def empty_cache(self) -> None:
        return

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        # verl writes Ray's accelerator id into it; CUDA_VISIBLE_DEVICES stays what the user set.
        return "ROLLOUT_SPEC_VISIBLE_CPUS"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return

    def profiler_stop(self) -> None:
        return

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return _engine_environment()

    def cudart(self) -> Any:
        return None
