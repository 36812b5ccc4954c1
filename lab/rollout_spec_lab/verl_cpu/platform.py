"""The platform `cpu`: verl's interface to a device, answered by the CPU."""

import contextlib
import os
import resource
import types
from collections.abc import Callable
from typing import Any

import torch
from verl.plugin.platform import PlatformBase

from rollout_spec_lab.verl_cpu.environment import engine_environment


def _resident_bytes(device: Any = None) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes(device: Any = None) -> int:
    # The kernel's two counts are not taken at the same moment.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident_bytes())


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    page = resource.getpagesize()
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _constant(value: Any) -> Callable[..., Any]:
    """A function, or a method, that gives this."""
    return lambda *args, **kwargs: value


def _device_module() -> types.ModuleType:
    """torch.cpu and the functions of torch.cuda that verl calls whatever the device is."""
    module = types.ModuleType(f"{__name__}.device")
    module.__dict__.update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("__")})
    module.__dict__.update(
        # Ray's *logical* accelerator: one per machine, so that worker 0 finds device 0.
        device_count=_constant(1),
        empty_cache=_constant(None),
        get_device_name=_constant("CPU"),
        get_rng_state=torch.get_rng_state,
        max_memory_allocated=_peak_resident_bytes,
        max_memory_reserved=_peak_resident_bytes,
        mem_get_info=_mem_get_info,
        memory_allocated=_resident_bytes,
        memory_reserved=_resident_bytes,
        reset_accumulated_memory_stats=_constant(None),
        reset_peak_memory_stats=_constant(None),
        set_rng_state=torch.set_rng_state,
    )
    return module


class PlatformCPU(PlatformBase):
    """verl's view of a machine whose only device is its CPU."""

    device_name = vendor_name = "cpu"
    device_module = _device_module()

    # There is one device, it is always current, and it has no queue, no allocator and no profiler of its own.
    set_device = synchronize = set_allocator_settings = empty_cache = _constant(None)
    profiler_start = profiler_stop = cudart = _constant(None)
    is_available, device_count = _constant(True), _constant(1)
    # Not an index: verl passes it to Module.to() and to FSDP, where 0 would mean cuda:0.
    current_device = _constant(torch.device("cpu"))
    get_device_capability = _constant((None, None))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    nvtx_range = staticmethod(contextlib.nullcontext)
    communication_backend_name = _constant("gloo")
    is_ipc_supported = _constant(False)
    # verl writes Ray's accelerator id into it; CUDA_VISIBLE_DEVICES stays what the user set.
    visible_devices_envvar = _constant("ROLLOUT_SPEC_VISIBLE_CPUS")
    ray_resource_name = _constant("GPU")
    ray_noset_envvars = _constant(["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
    rollout_env_vars = staticmethod(engine_environment)
