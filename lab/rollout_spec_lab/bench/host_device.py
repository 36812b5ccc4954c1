"""A simulated device, for vLLM on a CPU: its kernels return at once.

Scheduler, input batch, drafter and what a step gives back stay vLLM's and ours. What a device would do is
replaced, on MRV2 also launches of kernels, and a clock says when it would be done.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.worker import gpu_model_runner

from rollout_spec.predict.step_times import Times
from rollout_spec_lab.bench.recorded import Recorded

# What Triton takes on the host to launch a compiled kernel: vLLM's pull request 34838 measured 8.7 us with
# kernels of MRV2 on a GB200, tritonbench's 1002 about 11.
LAUNCH_SECONDS = 10e-6


class Clock:
    """The host's time and the device's: nothing sleeps, and what else runs on the machine takes none of it.

    The host's is the CPU time of its thread, in which all of an engine is, and what it would have waited.
    """

    def __init__(self, cpu: Callable[[], float] = time.thread_time) -> None:
        self._cpu, self._waited = cpu, 0.0
        self.kernel_s = 0.0  # CPU seconds of what stands in for kernels, which are none of the host's
        self.launch_s = 0.0  # that the host takes besides its CPU time, for what is not launched here
        self.num_steps = self.num_ahead = 0  # given to the device; of them, those that found it busy
        self.free = self.now()  # when the device has done all that it was given, one step after the other

    def now(self) -> float:
        return self.host_s() + self._waited

    def host_s(self) -> float:
        return self._cpu() - self.kernel_s + self.launch_s

    def submit(self, seconds: float) -> None:
        """Give the device a step: it begins now, or when the one before has ended."""
        now = self.now()
        self.num_ahead += now < self.free
        self.free = max(now, self.free) + seconds
        self.num_steps += 1

    def wait(self, end: float) -> None:
        self._waited += max(0.0, end - self.now())

    def run(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What stands in for a kernel gives; it is none of the host's work."""
        begin = self._cpu()
        found = kernel(*args, **kwargs)
        self.kernel_s += self._cpu() - begin
        return found


class Event:
    """Stands in for a CUDA event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.record()

    def record(self, *_: Any) -> None:
        self._end = self._clock.free

    def query(self) -> bool:
        return self._clock.now() >= self._end

    def synchronize(self) -> None:
        """Wait for what the device was given before `record`."""
        self._clock.wait(self._end)


class Device:
    """Stands in for a model runner's kernels; made when the engine is, and started before its steps."""

    def __init__(self, runner: Any, clock: Clock) -> None:
        self.clock, self._runner = clock, runner
        self._hidden = torch.zeros((runner.max_num_tokens, 1), dtype=runner.dtype)  # nobody reads them
        self._install()

    def start(self, times: Times, responses: Sequence[Any], prefix: str) -> None:
        """From now on steps take these times, and requests get these responses, as in `Recorded.start`."""
        self._times = times
        self._recorded.start(responses, prefix)

    def _install(self) -> None:
        runner = self._runner
        # The forward pass, where the step is given to the device, and the logits, which nobody reads.
        runner._model_forward = self._forward
        runner.model.compute_logits = lambda hidden: hidden
        # Sampling and verification: hooks before them stay, ours too.
        nothing = SamplerOutput(torch.zeros((1, 1), dtype=torch.int32), logprobs_tensors=None)
        runner.sampler.forward = lambda *_, **__: nothing
        if runner.speculative_config is not None:
            runner.rejection_sampler.forward = lambda *_, **__: nothing
        self._recorded = Recorded(runner, self.clock.run)
        # Where the host waits for a step's tokens: a plain one, one with drafts, one scheduled ahead.
        runner._to_list = self._waiting(runner._to_list)
        RejectionSampler.parse_output = staticmethod(self._waiting(RejectionSampler.parse_output))
        gpu_model_runner.AsyncGPUModelRunnerOutput = self._async_output()
        runner._get_or_create_async_output_copy_stream = lambda: None

    def _forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        step = self._recorded.step
        cached = step.scheduled_cached_reqs
        num_context = step.total_num_scheduled_tokens + sum(cached.num_computed_tokens)
        drafted = bool(step.scheduled_spec_decode_tokens)
        self.clock.submit(self._times.seconds(step.total_num_scheduled_tokens, drafted, num_context))
        return self._hidden[: len(input_ids)]

    def _waiting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_read(*args: Any, **kwargs: Any) -> Any:
            self.clock.wait(self.clock.free)
            return read(*args, **kwargs)

        return wait_and_read

    def _async_output(self) -> type:
        """vLLM's output of a step that is scheduled ahead, without its CUDA stream and event."""
        clock = self.clock

        class AsyncOutput(gpu_model_runner.AsyncGPUModelRunnerOutput):
            def __init__(
                self, model_runner_output: Any, sampled_token_ids: torch.Tensor,
                invalid_req_indices: list[int], vocab_size: int, **_: Any,
            ) -> None:  # fmt: skip
                self._model_runner_output = model_runner_output
                self._invalid_req_indices = invalid_req_indices
                self._sampled_token_ids = self.sampled_token_ids_cpu = sampled_token_ids
                self.vocab_size = vocab_size
                self._logprobs_tensors = self._logprobs_tensors_cpu = None
                self._routed_experts = self._routed_experts_cpu = None  # of vLLM 0.24
                self._num_nans = self._num_nans_cpu = self._has_fault = None  # of 0.32
                self.async_copy_ready_event = Event(clock)

        return AsyncOutput


class DeviceMRV2(Device):
    """Stands in for MRV2's kernels."""

    def _install(self) -> None:
        # Not above: MRV2's modules take what vLLM replaces in torch for CPUs when the engine is made.
        from triton.runtime.interpreter import InterpretedFunction
        from vllm.v1.worker.gpu import model_runner

        runner = self._runner
        runner.model.forward = self._forward
        runner.model.compute_logits = lambda hidden: hidden
        self._recorded = Recorded(runner, self.clock.run)
        InterpretedFunction.run = self._launch
        # Where the host waits for a step's tokens.
        torch.cuda.Event = torch.Event = lambda *_, **__: Event(self.clock)
        torch.cuda.stream = lambda stream: stream  # as vLLM itself replaces it from 0.29 on
        # Each attention backend makes its own; those of CPUs read what kernels have left.
        for group in itertools.chain.from_iterable(runner.attn_groups):
            group.get_metadata_builder(0).build = lambda *_, **__: None
        # What kernels say here is used to index.
        for name in ("combine_sampled_and_draft_tokens", "expand_idx_mapping"):
            setattr(model_runner, name, _zeros_of(getattr(model_runner, name)))

    def _launch(self, *_: Any, **__: Any) -> None:
        self.clock.launch_s += LAUNCH_SECONDS


def _zeros_of(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_zeros(*args: Any, **kwargs: Any) -> Any:
        found = prepare(*args, **kwargs)
        for tensor in found if isinstance(found, tuple) else (found,):
            tensor.zero_()
        return found

    return prepare_zeros


def schedule_as_on_gpus() -> None:
    """Keep what vLLM decides on asynchronous scheduling; its platform for CPUs switches it off."""
    update = current_platform.check_and_update_config

    def update_but_scheduling(vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        decided = scheduler.async_scheduling
        update(vllm_config)
        scheduler.async_scheduling = decided

    type(current_platform).check_and_update_config = staticmethod(update_but_scheduling)
