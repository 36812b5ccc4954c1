"""How long a host and a GPU take to tell each other something, in a step's small messages.

It decides whether a step's inputs can be prepared before the tokens of the step before are on the host: the
stream would wait for a flag of the host's, behind work that is launched already.
"""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rollout_spec.config import UserError

ROUNDS = 200
ROWS, TOKENS = 64, 9  # of a step, and of a row of it
_BEFORE_FLAG = 2e-4  # seconds, after which the stream surely waits
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


def run(job: Mapping[str, Any]) -> dict[str, float]:
    """`latencies`; a UserError where they cannot be measured."""
    if not torch.cuda.is_available():
        raise UserError("only a GPU has a stream that can wait for the host")
    return latencies(torch.device("cuda"))


def latencies(device: torch.device) -> dict[str, float]:
    """Medians in microseconds.

    `copy`: from the end of a step until its tokens are on the host. `flag`: from a host's flag until what a
    stream has waiting behind it has run, and the host knows it. `graph`: the same for a launch of that work,
    which is a graph of one kernel. `launch`: the host's part of that.
    """
    stream = torch.cuda.Stream(device)
    to_device = _ToDevice(device, stream)
    begins = {"copy": to_device.copy, "graph": to_device.launch, "flag": to_device.raise_flag}
    with torch.cuda.stream(stream):
        found = {name: _median(begin, to_device.ended) for name, begin in begins.items()}
    return found | {"launch": statistics.median(to_device.launched) * 1e6}


class _ToDevice:
    """What a host begins on a device; each method gives the time at which it began."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device=device)
        self._on_host, self._flag = pinned(self._tokens.shape, torch.int64), pinned((1,), torch.int32)
        self._stream, self._graph = stream, torch.cuda.CUDAGraph()
        self._work = torch.zeros(1024, device=device)
        with torch.cuda.graph(self._graph):
            self._work.add_(1)
        self.ended, self.launched, self._num_flags = torch.cuda.Event(), list[float](), 0

    def copy(self) -> float:
        began = time.perf_counter()
        self._on_host.copy_(self._tokens, non_blocking=True)
        self.ended.record()
        return began

    def launch(self) -> float:
        began = time.perf_counter()
        self._graph.replay()
        self.launched.append(time.perf_counter() - began)
        self.ended.record()
        return began

    def raise_flag(self) -> float:
        self._num_flags += 1
        wait_for(self._stream, self._flag, self._num_flags)
        self._graph.replay()
        self.ended.record()
        time.sleep(_BEFORE_FLAG)
        began = time.perf_counter()
        self._flag[0] = self._num_flags
        return began


def _median(begin: Callable[[], float], ended: Any) -> float:
    seconds = []
    for _ in range(ROUNDS):
        began = begin()
        while not ended.query():
            pass
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e6


def pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that the device can read where they are."""
    return torch.zeros(shape, dtype=dtype, pin_memory=True)


def wait_for(stream: Any, flag: torch.Tensor, value: int) -> None:
    """Let a stream wait until the flag, int32 [1] in pinned memory, is at least the value.

    Raises RuntimeError: the driver does not let a stream wait.
    """
    arguments = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(flag.data_ptr())
    driver = ctypes.CDLL("libcuda.so.1")
    if status := driver.cuStreamWaitValue32_v2(*arguments, ctypes.c_uint32(value), ctypes.c_uint(_AT_LEAST)):
        raise RuntimeError(f"cuStreamWaitValue32: CUDA error {status}")
