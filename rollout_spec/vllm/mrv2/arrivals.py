"""A step's tokens on their way to the host."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np

from rollout_spec.drafting.gate.step import Work


class Arrival:
    """A step's tokens on their way to the host, and what the step has processed.

    vLLM's output copies them, on this stream. What a model drafts after them goes there too.
    """

    def __init__(
        self, output: AsyncOutput, work: Work | None, stream: Any, on_device: tuple[torch.Tensor, ...]
    ) -> None:
        self.request_ids: list[str] = output.model_runner_output.req_ids
        self.work, self._on_device = work, on_device  # held until they have been copied
        self._on_host = [output.sampled_token_ids, output.num_sampled_tokens_np]
        if on_device:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._on_host += map(async_copy_to_np, on_device)
        # A thread that sleeps, as for vLLM's own from 0.32 on, would take 20 to 60 us to wake up.
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self.ended: float | None = None  # when the host first knew that the step had ended

    def forget(self, request_ids: set[str]) -> None:
        """Drop these requests' tokens from the step: they were preempted and start again."""
        if not request_ids.isdisjoint(self.request_ids):
            self.request_ids = ["" if each in request_ids else each for each in self.request_ids]

    def note_end(self) -> None:
        if self.ended is None:
            self.ended = time.perf_counter()

    def wait(self, catch_up: Callable[[Callable[[], bool]], None]) -> list[Any]:
        """int64 [num_rows, K + 1 or 1], tokens; int32 [num_rows], how many; and a model's drafts.

        Until it is there the host indexes text: `catch_up` asks before each piece of it if there is time.
        """
        query = getattr(self._event, "query", None)
        if query is not None:  # vLLM's stand-in on CPUs has none, and nothing to wait for
            catch_up(lambda: not query())
        self._event.synchronize()
        self.note_end()
        return self._on_host


# Before AsyncOutput: get_output
class TimedOutput(AsyncOutput):
    """A step's output. vLLM copies its tokens to the host too: when they are there, the step has ended.

    A thread of vLLM's then makes lists of them. Where a step is about to begin that drafts after the same
    tokens, it waits until that is launched: else both would want the interpreter at the same time.
    """

    arrival: Arrival
    launching: threading.Lock

    def get_output(self) -> Any:
        self.copy_event.synchronize()
        self.arrival.note_end()
        with self.launching:
            return super().get_output()
