"""How long a host and a GPU take to tell each other something, in a step's small messages.

It decides whether a step's inputs can be prepared before the tokens of the step before are on the host: the
stream would wait for a flag of the host's, behind work that is launched already.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = 200
ROWS, TOKENS = 64, 9  # of a step, and of a row of it
_BEFORE_FLAG = 2e-4  # seconds, after which the stream surely waits
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


def latencies(device: torch.device) -> dict[str, float]:
    """Medians in microseconds.

    `copy`: from the end of a step until its tokens are on the host. `flag`: from a host's flag until what a
    stream has waiting behind it has run, and the host knows it. `graph`: the same for a launch of that work,
    which is a graph of one kernel. `launch`: the host's part of that.
    """
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device=device)
    on_host, flag = pinned(tokens.shape, torch.int64), pinned((1,), torch.int32)
    stream, graph, work = torch.cuda.Stream(device), torch.cuda.CUDAGraph(), torch.zeros(1024, device=device)
    with torch.cuda.graph(graph):
        work.add_(1)
    launched, rounds, ended = list[float](), iter(range(1, 1 << 30)), torch.cuda.Event()

    def copy() -> float:
        began = time.perf_counter()
        on_host.copy_(tokens, non_blocking=True)
        ended.record()
        return began

    def launch() -> float:
        began = time.perf_counter()
        graph.replay()
        launched.append(time.perf_counter() - began)
        ended.record()
        return began

    def raise_flag() -> float:
        number = next(rounds)
        wait_for(stream, flag, number)
        graph.replay()
        ended.record()
        time.sleep(_BEFORE_FLAG)
        began = time.perf_counter()
        flag[0] = number
        return began

    with torch.cuda.stream(stream):
        found = {
            name: _median(begin, ended)
            for name, begin in (("copy", copy), ("graph", launch), ("flag", raise_flag))
        }
    return found | {"launch": statistics.median(launched) * 1e6}


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
