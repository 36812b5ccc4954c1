"""The platform `cpu`: verl's interface to a device, answered by the CPU."""

import contextlib
import os
import resource
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase

from rollout_spec_lab.verl_cpu.activation import engine_environment


def _resident_bytes(device: Any = None) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes(device: Any = None) -> int:
    # The kernel's two counts are not taken at the same moment.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident_bytes())


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    page = resource.getpagesize()
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _device_module() -> types.ModuleType:
    """torch.cpu and the functions of torch.cuda that verl calls whatever the device is."""
    module = types.ModuleType(f"{__name__}.device")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    module.__dict__.update(
        # Ray's *logical* accelerator: one per machine, so that worker 0 finds device 0.
        device_count=lambda: 1,
        empty_cache=_nothing,
        get_device_name=lambda device=None: "CPU",
        get_rng_state=torch.get_rng_state,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        max_memory_allocated=_peak_resident_bytes,
        max_memory_reserved=_peak_resident_bytes,
        mem_get_info=_mem_get_info,
        memory_allocated=_resident_bytes,
        memory_reserved=_resident_bytes,
        reset_accumulated_memory_stats=_nothing,
        reset_peak_memory_stats=_nothing,
        set_rng_state=torch.set_rng_state,
    )
    return module


class PlatformCPU(PlatformBase):
    """verl's view of a machine whose only device is its CPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    # There is one device, it is always current, and it has no queue, no allocator and no profiler of its own.
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # Not an index: verl passes it to Module.to() and to FSDP, where 0 would mean cuda:0.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

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

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return engine_environment()
