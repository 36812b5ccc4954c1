"""A step's tokens on their way to the host."""

import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np

from rollout_spec.drafting.gate.step import Step


class Arrival:
    """A step's tokens on their way to the host, and what the step has processed."""

    def __init__(self, request_ids: list[str], work: Step | None, *on_device: torch.Tensor) -> None:
        self.request_ids, self.work = request_ids, work
        self._on_device = on_device  # held until they have been copied
        self._on_host = [async_copy_to_np(each) for each in on_device]
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()
        self.ended: float | None = None  # when the host first knew that the step had ended

    def forget(self, request_ids: set[str]) -> None:
        """Drop these requests' tokens from the step: they were preempted and start again."""
        if not request_ids.isdisjoint(self.request_ids):
            self.request_ids = ["" if each in request_ids else each for each in self.request_ids]

    def note_end(self) -> None:
        if self.ended is None:
            self.ended = time.perf_counter()

    def wait(self, work: Callable[[Callable[[], bool]], None]) -> list[Any]:
        """What `take_sampled` was given: int64 [num_rows, K + 1], int32 [num_rows], and a model's drafts.

        Until it is there the host does `work`, which asks before each piece of it whether there is time.
        """
        query = getattr(self._event, "query", None)
        if query is not None:  # vLLM's stand-in on CPUs has none, and nothing to wait for
            work(lambda: not query())
        self._event.synchronize()
        self.note_end()
        return self._on_host


class TimedOutput(AsyncOutput):
    """A step's output. vLLM copies its tokens to the host too: when they are there, the step has ended."""

    arrival: Arrival

    def get_output(self) -> Any:
        output = super().get_output()
        self.arrival.note_end()
        return output
