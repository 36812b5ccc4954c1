"""vLLM's model runner V2: its requests and tokens for the proposer, drafts for its rows. An adapter.

V2 keeps tokens on the device and its rows in any order. `HostBatch` is the copy on the host that the proposer
reads. A step's tokens reach it on a stream of their own. Drafts go the way they go with V1: to the scheduler,
and from it, with the step's other inputs, to every worker.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from rollout_spec.config import SpecConfig
from rollout_spec.patches import Patch, guard_parameters, replace_function
from rollout_spec.vllm import sampler_v2, versions_v2
from rollout_spec.vllm.graphs import capture_plain_steps_v2
from rollout_spec.vllm.model_drafter import SHARED_NOISE, share_noise
from rollout_spec.vllm.options import names_our_drafter
from rollout_spec.vllm.proposer import SuffixProposer
from rollout_spec.vllm.scheduler import AHEAD_KEY, DRAFTS_KEY, Ahead

_SPECULATOR = Patch(
    name="vllm-v2-speculator",
    reason="model runner V2 builds the speculators that it names itself, and hands them neither requests nor "
    "sampled tokens",
    upstream="vllm/v1/worker/gpu/spec_decode/__init__.py, init_speculator",
    until="model runner V2 takes a custom_class, and gives it the requests of its rows",
)
ENGINE_PATCHES = (_SPECULATOR, sampler_v2.COUPLED, SHARED_NOISE)  # what engines apply to themselves

# Of what is called or replaced here, the parameters that are counted on.
_PARAMETERS: tuple[versions_v2.Parameters, ...] = (
    (model_runner, "init_speculator", (("vllm_config", "device"),)),
    (model_runner.GPUModelRunner, "add_requests", (("self", "scheduler_output"),)),
    (model_runner.GPUModelRunner, "postprocess_sampled",
     (("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),)),
    (model_runner.GPUModelRunner, "sample_tokens", (("self", "grammar_output"),)),
    (AsyncOutput, "get_output", (("self",),)),
    (DraftTokensHandler, "set_draft_tokens", (("self", "input_batch", "draft_tokens"),)),
    (DraftTokensHandler, "get_draft_tokens", (("self",),)),
    (BaseSpeculator, "init_cudagraph_manager", (("self", "cudagraph_mode"),)),
    (BaseSpeculator, "capture", (("self",),)),
)  # fmt: skip


def check_runner() -> None:
    """See that the installed model runner V2 is one that this module and its sampler were written for.

    Raises:
        PatchError: it is not.
    """
    for owner, name, accepted in _PARAMETERS:
        guard_parameters(_SPECULATOR, owner, name, *accepted)
    sampler_v2.check_sampler()


def teach_speculator() -> None:
    """Let vLLM build a `SuffixSpeculator` where `speculative_config` names our proposer. Idempotent.

    Raises:
        PatchError: the installed model runner V2 is not one that this was written for.
    """
    check_runner()
    init_speculator = model_runner.init_speculator

    @functools.wraps(init_speculator)
    def init_any_speculator(vllm_config: VllmConfig, device: torch.device, *others: Any) -> Any:
        if names_our_drafter(vllm_config):
            return SuffixSpeculator(vllm_config, device)
        return init_speculator(vllm_config, device, *others)

    replace_function(model_runner, "init_speculator", init_any_speculator, patch=_SPECULATOR)


def bind(runner: Any, config: SpecConfig) -> None:
    """Connect a runner with its speculator, if it has ours, and key its noise; once in its life."""
    check_runner()
    if isinstance(runner.speculator, SuffixSpeculator):
        runner.speculator.bind(runner)
        capture_plain_steps_v2(runner)
    if config.coupled:
        sampler_v2.couple(runner)
        if isinstance(runner.speculator, DraftModelSpeculator):
            share_noise(runner.speculator)


class HostBatch:
    """The requests of a V2 runner and their tokens, on the host: what the proposer reads of V1's runner.

    Attributes:
        requests: by name, with `prompt_token_ids` and `sampling_params`; preempted ones have no row.
        tokens: int32 [rows, max_model_len], row i holds those of `input_batch.req_ids[i]`.
        levels: int32 [rows], how many.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.parallel_config = runner.parallel_config
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        # Untouched pages take no memory.
        self.tokens = np.zeros((runner.max_num_reqs, runner.max_model_len), np.int32)
        self.levels = np.zeros(runner.max_num_reqs, np.int32)

    @property
    def max_model_len(self) -> int:
        return int(self._runner.max_model_len)

    def remove(self, request_ids: Collection[str]) -> None:
        """Forget requests that have ended."""
        self.suspend(request_ids)
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def suspend(self, request_ids: Collection[str]) -> None:
        """Requests have no row any more; the last row takes the place of each."""
        rows = self.input_batch.req_ids
        for request_id in request_ids:
            if request_id not in rows:
                continue
            row, last = rows.index(request_id), len(rows) - 1
            rows[row] = rows[last]
            rows.pop()
            level = self.levels[row] = self.levels[last]
            self.tokens[row, :level] = self.tokens[last, :level]

    def add(self, request: Any) -> None:
        """Take in one of a scheduler's new requests, which may be one that was preempted."""
        self.suspend([request.req_id])
        tokens, row = request.prefill_token_ids, len(self.input_batch.req_ids)
        self.requests[request.req_id] = request
        self.input_batch.req_ids.append(request.req_id)
        self.tokens[row, : len(tokens)] = tokens
        self.levels[row] = len(tokens)

    def extend(self, request_ids: list[str], tokens: Any, nums: Any) -> list[int]:
        """Append a step's tokens.

        Args:
            request_ids: of the step's rows.
            tokens: int64 [num_rows, K + 1], of which the first nums[i] are row i's.
            nums: int32 [num_rows].

        Returns:
            How many tokens each row of `self.tokens` got.
        """
        number = {request_id: row for row, request_id in enumerate(self.input_batch.req_ids)}
        rows = np.array([number.get(request_id, -1) for request_id in request_ids])
        nums = np.where(rows < 0, 0, nums)  # what has left, nobody reads
        places, columns = np.nonzero(np.arange(tokens.shape[1]) < nums[:, None])
        self.tokens[rows[places], self.levels[rows[places]] + columns] = tokens[places, columns]
        nums_new = np.zeros(len(number), np.int32)
        nums_new[rows[nums > 0]] = nums[nums > 0]
        self.levels[: len(number)] += nums_new
        return nums_new.tolist()


class _Arrival:
    """A step's tokens on their way to the host."""

    def __init__(
        self, request_ids: list[str], sampled_tokens: torch.Tensor, num_sampled: torch.Tensor
    ) -> None:
        self.request_ids = request_ids
        self._on_device = sampled_tokens, num_sampled  # theirs until they have been copied
        self._tokens, self._nums = async_copy_to_np(sampled_tokens), async_copy_to_np(num_sampled)
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()
        self.ended: float | None = None  # when the host first knew that the step had ended

    def note_end(self) -> None:
        if self.ended is None:
            self.ended = time.perf_counter()

    def wait(self) -> tuple[Any, Any]:
        """int64 [num_rows, K + 1] and int32 [num_rows]: the tokens, and how many."""
        self._event.synchronize()
        self.note_end()
        return self._tokens, self._nums


class SuffixSpeculator(BaseSpeculator):
    """A speculator of V2 whose drafts are those of `SuffixProposer`.

    It is also the runner's `draft_tokens_handler`, from which the scheduler takes the drafts.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.proposer = SuffixProposer(vllm_config)
        self.model = torch.nn.Module()  # of no layer: vLLM 0.24 prepares the communication of a speculator's
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._no_drafts = torch.zeros(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.speculative_config.num_speculative_tokens,
            dtype=torch.int64,
            device=device,
        )
        self._sampled_tokens: torch.Tensor | None = None
        self._arrivals: deque[_Arrival] = deque()
        self._waits = True
        self._drafts = DraftTokenIds([], [])

    def bind(self, runner: Any) -> None:
        """Take the place of what the runner does with drafts; once, as soon as it is made."""
        self._batch = HostBatch(runner)
        self.proposer.bind(self._batch)
        self.proposer.receive = functools.partial(self._receive, 0, in_time=False)
        self._runner = runner
        runner.drafter = self.proposer  # where V1's runner has it
        runner.draft_tokens_handler = self
        runner.add_requests = _then(self._add_requests, runner.add_requests)
        runner.postprocess_sampled = _then(self._keep_sampled, runner.postprocess_sampled)
        runner.sample_tokens = self._telling(runner.sample_tokens)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        self.proposer.load_model()

    def capture(self, *_: Any, **__: Any) -> None:
        """There is no model to capture."""

    def _add_requests(self, scheduler_output: Any) -> None:
        """Before the runner's own: the requests that go and come, and the drafts that the step verifies."""
        batch, states = self._batch, self._runner.req_states
        ahead = getattr(scheduler_output, AHEAD_KEY, Ahead(0, True))  # vLLM's own schedulers wait
        self._receive(ahead.num_in_flight, in_time=False)
        self._waits = ahead.waits
        batch.remove(scheduler_output.finished_req_ids)
        batch.suspend(scheduler_output.preempted_req_ids or ())
        for request in scheduler_output.scheduled_new_reqs:
            batch.add(request)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        known = [request_id for request_id in drafts if request_id in states.req_id_to_index]
        if not known:
            return
        tokens = np.zeros((len(known), self._no_drafts.shape[1]), np.int64)
        for row, request_id in enumerate(known):
            tokens[row, : len(drafts[request_id])] = drafts[request_id]
        rows = np.array([states.req_id_to_index[request_id] for request_id in known])
        states.draft_tokens[async_tensor_h2d(rows, device=self._device)] = async_tensor_h2d(
            tokens, device=self._device
        )

    def _keep_sampled(self, idx_mapping: torch.Tensor, sampled_tokens: torch.Tensor, *_: Any) -> None:
        self._sampled_tokens = sampled_tokens

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> torch.Tensor:
        """Draft for the step's rows; what is returned is nothing, drafts come with the next step's inputs."""
        nothing = self._no_drafts[: input_batch.num_reqs]
        if dummy_run or not self.proposer.is_used:
            return nothing
        assert self._sampled_tokens is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._arrivals.append(_Arrival(input_batch.req_ids, self._sampled_tokens, num_sampled))
        self._drafts = DraftTokenIds([], [])
        if self._waits:
            self._receive(0, in_time=True)
        return nothing

    def _receive(self, num_in_flight: int, *, in_time: bool) -> None:
        """Index the tokens of all steps but the latest few, and draft."""
        while len(self._arrivals) > num_in_flight:
            arrival = self._arrivals.popleft()
            tokens, nums = arrival.wait()
            nums_new = self._batch.extend(arrival.request_ids, tokens, nums)
            drafts = self.proposer.step(
                nums_new, self._batch.levels, self._batch.tokens, arrival.ended, in_time
            )
            self._drafts = DraftTokenIds(list(self._batch.input_batch.req_ids), drafts)

    def _telling(self, sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
        """Let a step's output say what was drafted, and when the step had ended."""

        @functools.wraps(sample_tokens)
        def sample_and_tell(*args: Any, **kwargs: Any) -> Any:
            output = sample_tokens(*args, **kwargs)
            if not isinstance(output, AsyncOutput):
                return output
            if self.proposer.next_step_waits:
                setattr(output.model_runner_output, DRAFTS_KEY, self._drafts)
            if self._arrivals:
                output.get_output = _noting(self._arrivals[-1], output.get_output)
            return output

        return sample_and_tell

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """What `propose` returned."""

    def get_draft_tokens(self) -> DraftTokenIds:
        return self._drafts


def _then(first: Callable[..., None], second: Callable[..., Any]) -> Callable[..., Any]:
    """Both, called with the same arguments; it returns what the second one does."""

    @functools.wraps(second)
    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return second(*args, **kwargs)

    return both


def _noting(arrival: _Arrival, get_output: Callable[[], Any]) -> Callable[[], Any]:
    def get_and_note() -> Any:
        output = get_output()
        arrival.note_end()
        return output

    return get_and_note
