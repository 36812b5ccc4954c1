"""A device made of time, for vLLM on a CPU: its kernels return at once.

Scheduler, input batch, drafter and what a step gives back stay vLLM's and ours. What a device would do is
replaced, and a clock says when it would be done. `Device.install` lists the replacements in model runner V1,
`host_device_v2` those in V2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.worker import gpu_model_runner

from rollout_spec.predict.step_times import Times


class Clock:
    """The host's time and the device's: nothing sleeps, and what else runs on the machine takes none of it.

    The host's is its CPU time, and what it would have waited. Real kernels take none of it.

    Args:
        cpu: seconds, as time.thread_time: all of an engine is in one thread.

    Attributes:
        free: when the device has done all that it was given, one step after the other.
        num_steps: that were given.
        num_ahead: of them, those that found it busy with another.
        kernel_s: CPU seconds of real kernels.
        launch_s: seconds that the host takes besides its CPU time, for what is not launched here.
        runs: whether a real kernel runs.
    """

    def __init__(self, cpu: Callable[[], float] = time.thread_time) -> None:
        self._cpu = cpu
        self._waited = 0.0
        self.kernel_s = self.launch_s = 0.0
        self.runs = False
        self.num_steps = self.num_ahead = 0
        self.free = self.now()

    def now(self) -> float:
        return self.host_s() + self._waited

    def host_s(self) -> float:
        """Seconds that the host has worked."""
        return self._cpu() - self.kernel_s + self.launch_s

    def submit(self, seconds: float) -> None:
        """Give the device a step: it begins now, or when the one before has ended."""
        now = self.now()
        self.num_ahead += now < self.free
        self.free = max(now, self.free) + seconds
        self.num_steps += 1

    def wait(self, end: float) -> None:
        """Let time pass until then."""
        self._waited += max(0.0, end - self.now())

    def run(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a real kernel gives; it is none of the host's work."""
        begin, self.runs = self._cpu(), True
        found = kernel(*args, **kwargs)
        self.kernel_s, self.runs = self.kernel_s + self._cpu() - begin, False
        return found


class Event:
    """In the place of a CUDA event."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.record()

    def record(self, *_: Any) -> None:
        self._end = self._clock.free

    def synchronize(self) -> None:
        """Wait for what the device was given before `record`."""
        self._clock.wait(self._end)


class Recording:
    """The texts of a cell's requests, by the names that they were added with.

    Args:
        requests: prompt and response, int32 vectors; request i is named `prefix` and i.
    """

    def __init__(
        self, prefix: str, requests: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]
    ) -> None:
        self._prefix, self._requests = prefix, requests
        responses = [response for _, response in requests]
        self._tokens = np.concatenate(responses)
        self._begins = np.cumsum([0, *map(len, responses)])
        self._numbers: dict[str, int] = {}

    def after(
        self, request_ids: Sequence[str], levels: npt.NDArray[Any], width: int
    ) -> npt.NDArray[np.int32]:
        """int32 [rows, width]: what comes behind the first levels[i] tokens of each row's response."""
        begins = self._begins[[self._number(request_id) for request_id in request_ids]]
        places = (begins + levels)[:, None] + np.arange(width)
        return self._tokens[np.minimum(places, len(self._tokens) - 1)]  # beyond an end vLLM cuts them off

    def text(self, request_id: str, level: int) -> npt.NDArray[np.int32]:
        """A request's prompt, and the first `level` tokens of its response."""
        prompt, response = self._requests[self._number(request_id)]
        return np.concatenate([prompt, response[:level]])

    def _number(self, request_id: str) -> int:
        """vLLM adds a dash and eight characters to a name."""
        if request_id not in self._numbers:
            number = request_id.removeprefix(self._prefix).rpartition("-")[0]
            self._numbers[request_id] = int(number)
        return self._numbers[request_id]


def verified(
    recorded: npt.NDArray[np.int32], drafts: npt.NDArray[np.int32], nums_drafts: npt.ArrayLike
) -> npt.NDArray[np.int32]:
    """What a verification gives: each row's drafts as far as they are the recorded tokens, and one more.

    Args:
        recorded: [rows, width], what comes next in each row; width is above every number of drafts.
        drafts: of all rows, one after the other.

    Returns:
        As `recorded`, with PLACEHOLDER_TOKEN_ID behind what a row gets.
    """
    nums = np.asarray(nums_drafts)
    columns = np.arange(recorded.shape[1])
    drafted = columns < nums[:, None]
    proposed = np.full_like(recorded, PLACEHOLDER_TOKEN_ID)
    proposed[drafted] = drafts
    num_accepted = np.cumprod(proposed == recorded, axis=1).sum(axis=1)
    return np.where(columns <= num_accepted[:, None], recorded, np.int32(PLACEHOLDER_TOKEN_ID))


def ngram_drafts(text: npt.NDArray[np.int32], least: int, most: int, num_drafts: int) -> list[int]:
    """As vLLM's NgramGPUSpeculator: what is behind the latest of the longest earlier places of a text's end.

    Args:
        least, most: tokens of the end that a place has to share.

    Returns:
        As many draft tokens as asked for: where there are no more, the last token again.
    """
    found = text[:0]
    for num in range(most, least - 1, -1):
        if len(text) <= num:
            continue
        places = np.flatnonzero((sliding_window_view(text[:-1], num) == text[-num:]).all(axis=1))
        if len(places):
            found = text[places[-1] + num :][:num_drafts]
            break
    return found.tolist() + [int(text[-1])] * (num_drafts - len(found))


class Device:
    """The device in the place of a model runner's kernels.

    Attributes:
        times: what a step takes; None: the CPU runs the kernels.
        recording: what is sampled; None: nothing has been asked for yet.
    """

    def __init__(self, runner: Any, clock: Clock) -> None:
        self.clock = clock
        self.times: Times | None = None
        self.recording: Recording | None = None
        self._runner = runner
        self._hidden = torch.zeros((runner.max_num_tokens, 1), dtype=runner.dtype)  # nobody reads them
        self._step: Any = None  # vLLM's SchedulerOutput

    def install(self) -> None:
        """Replace what a device does; once, when the engine is made."""
        runner = self._runner
        # Says what the next forward pass is of.
        runner.execute_model = self._noting(runner.execute_model)
        # The forward pass, where the step is given to the device, and the logits, which nobody reads.
        runner._model_forward = self._forward(runner._model_forward)
        runner.model.compute_logits = self._logits(runner.model.compute_logits)
        # Sampling and verification: hooks before them stay, ours too.
        runner.sampler.forward = self._replaced(runner.sampler.forward, self._sample)
        if runner.speculative_config is not None:
            verifier = runner.rejection_sampler
            verifier.forward = self._replaced(verifier.forward, self._verify)
        # Where the host waits for a step's tokens: a plain one, one with drafts, one scheduled ahead.
        runner._to_list = self._waiting(runner._to_list)
        RejectionSampler.parse_output = staticmethod(self._waiting(RejectionSampler.parse_output))
        gpu_model_runner.AsyncGPUModelRunnerOutput = self._async_output()
        runner._get_or_create_async_output_copy_stream = lambda: None

    def _noting(self, execute_model: Callable[..., Any]) -> Callable[..., Any]:
        def execute_noted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._step = scheduler_output
            return execute_model(scheduler_output, *args, **kwargs)

        return execute_noted

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def submit(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if self.times is None:
                hidden: torch.Tensor = self.clock.run(forward, input_ids=input_ids, **kwargs)
                self.clock.submit(0.0)
                return hidden
            step, cached = self._step, self._step.scheduled_cached_reqs
            num_context = step.total_num_scheduled_tokens + sum(cached.num_computed_tokens)
            drafted = bool(step.scheduled_spec_decode_tokens)
            self.clock.submit(self.times.seconds(step.total_num_scheduled_tokens, drafted, num_context))
            return self._hidden[: len(input_ids)]

        return submit

    def _logits(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return lambda hidden: hidden if self.times is not None else self.clock.run(compute, hidden)

    def _replaced(self, kernel: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self.clock.runs:  # a verification samples what comes behind the drafts
                return kernel(*args, **kwargs)
            if self.times is None:
                self.clock.run(kernel, *args, **kwargs)  # its tokens are others than the recording's
            return instead(*args, **kwargs)

        return replaced

    def _sample(self, *_: Any, **__: Any) -> SamplerOutput:
        return _sampled(self._recorded(1))

    def _verify(self, metadata: Any, *_: Any, **__: Any) -> SamplerOutput:
        drafts = metadata.draft_token_ids.numpy()
        recorded = self._recorded(metadata.max_spec_len + 1)
        return _sampled(verified(recorded, drafts, metadata.num_draft_tokens))

    def _recorded(self, width: int) -> npt.NDArray[np.int32]:
        assert self.recording is not None
        batch = self._runner.input_batch
        rows = slice(batch.num_reqs)
        # Of a step that is in flight vLLM has counted the token already.
        levels = batch.num_tokens_no_spec[rows] - batch.num_prompt_tokens[rows]
        return self.recording.after(batch.req_ids, levels, width)

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
                self,
                model_runner_output: Any,
                sampled_token_ids: torch.Tensor,
                invalid_req_indices: list[int],
                vocab_size: int,
                **_: Any,
            ) -> None:
                self._model_runner_output = model_runner_output
                self._invalid_req_indices = invalid_req_indices
                self._sampled_token_ids = self.sampled_token_ids_cpu = sampled_token_ids
                self.vocab_size = vocab_size
                self._logprobs_tensors = self._logprobs_tensors_cpu = None
                self._routed_experts = self._routed_experts_cpu = None  # of vLLM 0.24
                self._num_nans = self._num_nans_cpu = self._has_fault = None  # of 0.32
                self.async_copy_ready_event = Event(clock)

        return AsyncOutput


def _sampled(tokens: npt.NDArray[np.int32]) -> SamplerOutput:
    return SamplerOutput(sampled_token_ids=torch.from_numpy(tokens), logprobs_tensors=None)


def schedule_as_on_gpus() -> None:
    """Keep what vLLM decides on asynchronous scheduling; its platform for CPUs switches it off."""
    update = current_platform.check_and_update_config

    def update_but_scheduling(vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        decided = scheduler.async_scheduling
        update(vllm_config)
        scheduler.async_scheduling = decided

    type(current_platform).check_and_update_config = staticmethod(update_but_scheduling)
