"""Drafts for the steps of vLLM's MRV2, made on the host. An adapter."""

import dataclasses
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils import torch_utils
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafts import TAKES_ANY, Drafts
from rollout_spec.patches import Patch, put_before
from rollout_spec.vllm.mrv2.arrival_queue import ArrivalQueue
from rollout_spec.vllm.mrv2.arrivals import Arrival, TimedOutput
from rollout_spec.vllm.mrv2.host_batch import HostBatch
from rollout_spec.vllm.mrv2.room import drafts_in, fill_room, room_in
from rollout_spec.vllm.proposing.proposer import BatchProposer
from rollout_spec.vllm.step_notes import Plan, Report, attach, plan_of

SPECULATOR = Patch(
    name="vllm-mrv2-speculator",
    reason="MRV2 builds the speculators that it names itself, and hands them neither requests nor "
    "sampled tokens",
    upstream="vllm/v1/worker/gpu/spec_decode/__init__.py, init_speculator; "
    "vllm/v1/worker/gpu/model_runner.py, GPUModelRunner",
    until="MRV2 takes a custom_class, and gives it the requests of its rows",
)


@dataclasses.dataclass
class RunningStep:
    """The step that runs, from `begin_step` to `report`."""

    plan: Plan
    output: Any  # the runner's own SchedulerOutput; None once its drafts are in it
    num_model_tokens: int  # that a model drafts in it for every row; 0: its first pass drafts nothing
    nums_drafts: dict[str, int] = dataclasses.field(default_factory=dict)  # of requests that have some
    model_drafts: tuple[torch.Tensor, ...] = ()  # the tokens after it and their log-odds; empty: none


class DraftsForScheduler:
    """In the place of vLLM's `DraftTokensHandler`: what MRV2 gives a scheduler that waits for drafts."""

    drafts: DraftTokenIds | None = None  # of the next step; None: nobody waits, or there are no requests

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """What `propose` returned."""

    def get_draft_tokens(self) -> DraftTokenIds | None:
        return self.drafts


class HostDrafts:
    """Drafts of `BatchProposer` for the rows of a runner.

    In a step the runner calls `begin_step`, its block tables `give_drafts`, its speculator `no_drafts` (and a
    model's `take_model_drafts` before), and the runner `report`. Then the step's tokens are on their way: an
    `Arrival`. The host waits for it, and drafts after it,

    - in `report` itself, if the scheduler waits;
    - in the next step's `give_drafts`, if that step has room for drafts;
    - else in a later `begin_step`, or when counters are asked for, to index the tokens only.
    """

    def __init__(self, runner: Any, config: SpecConfig) -> None:
        self._runner, batch = runner, HostBatch(runner)
        self.proposer = BatchProposer(runner, config, batch, lambda: self._arrivals.take_in())
        self._arrivals = ArrivalQueue(batch, self.proposer)
        self.launching = threading.Lock()  # held while a step begins that waits for drafts
        self.step = RunningStep(Plan(), None, self.proposer.most_model_tokens)
        # What the device gets; who has the tokens of the last step knows that its copy has ended.
        shape = runner.max_num_reqs, config.num_speculative_tokens
        self._sent = torch.zeros(shape, dtype=torch.int64, pin_memory=torch_utils.PIN_MEMORY)
        self.for_scheduler = DraftsForScheduler()

    def begin_step(self, scheduler_output: Any) -> None:
        """The requests that go and come with a step; before the runner, whose output it is, takes them in."""
        plan = plan_of(scheduler_output)
        num_model_tokens = plan.num_drafted(self.proposer.most_model_tokens)
        self.step = RunningStep(plan, scheduler_output, num_model_tokens)
        self._arrivals.take_in(plan.num_in_flight or 0)
        self._arrivals.change_requests(scheduler_output)

    def give_drafts(self) -> None:
        """Put a step's drafts where the runner reads them, before it reads how long the rows are; once."""
        output, self.step.output = self.step.output, None
        if output is None:
            return
        if has_room := bool(output.scheduled_spec_decode_tokens):  # or drafts, where the scheduler waits
            index, request_ids = self._runner.req_states.req_id_to_index, [*output.num_scheduled_tokens]
            rows = np.array([index[request_id] for request_id in request_ids])
            is_ahead = self.step.plan.is_ahead
            drafts = self._fill(output, rows) if is_ahead else drafts_in(output, self._sent.shape[1])
            nums = zip(request_ids, drafts.lengths.tolist(), strict=True)
            self.step.nums_drafts = {request_id: num for request_id, num in nums if num}
            if self.step.nums_drafts:
                self._sent.numpy()[rows, : drafts.tokens.shape[1]] = drafts.tokens
                self._runner.req_states.draft_tokens.copy_(self._sent, non_blocking=True)
        self.proposer.note_scheduled(output, has_waited=has_room)

    def _fill(self, output: Any, rows: npt.NDArray[np.int64]) -> Drafts:
        """Fill the room of requests, which have these rows of the runner; returns their drafts."""
        found = self._arrivals.draft_for([*output.num_scheduled_tokens], room_in(output))
        drafts, levels = get_tp_group().broadcast_object(found)  # for all tensor-parallel ranks the same
        if levels is not None:
            self._correct_counts(rows, levels)
        fill_room(output, drafts)
        return drafts

    def _correct_counts(self, rows: npt.NDArray[np.int64], levels: npt.NDArray[np.int32]) -> None:
        """Tell the runner how far rows are: their scheduler counts all room of the step before.

        Attention that decodes rows of one length only takes the others for prompts, and that count for exact.
        """
        counts = self._runner.req_states.num_computed_tokens_np
        counts[rows] = np.minimum(counts[rows], levels - 1)

    def no_drafts(self, input_batch: Any) -> torch.Tensor:
        """What a speculator has for the runner's rows: drafts come when the next step begins."""
        # A new one each time: vLLM 0.33 writes into it.
        shape = input_batch.num_reqs, self._sent.shape[1]
        return torch.zeros(shape, dtype=torch.int64, device=self._runner.device)

    def take_model_drafts(self, tokens: torch.Tensor, log_odds: torch.Tensor) -> None:
        """What a model has drafted after the step that runs: int64 and float32 [num_rows, m]."""
        if self.step.num_model_tokens:
            # Both are overwritten by the next passes, which may come before they are on the host.
            self.step.model_drafts = tokens.clone(), log_odds.clone()

    def report(self, output: Any) -> Any:
        """A step's tokens are on their way. Where the scheduler waits, draft after them. Let the output say
        what was drafted, what is to be next, and when the step had ended."""
        step, self.for_scheduler.drafts = self.step, None
        if isinstance(output, AsyncOutput) and self.proposer.drafts_here:
            to_host = self._runner.output_copy_stream
            arrival = Arrival(output, self.proposer.busiest_work, to_host, step.model_drafts)
            self._arrivals.add(arrival)
            put_before(TimedOutput, output, SPECULATOR, arrival=arrival, launching=self.launching)
            if not step.plan.is_ahead:
                request_ids, drafts = self._arrivals.draft_for_rows(TAKES_ANY)
                self.for_scheduler.drafts = DraftTokenIds(request_ids, drafts.lists())
        said = output.model_runner_output if isinstance(output, AsyncOutput) else output
        if isinstance(said, ModelRunnerOutput):
            to_come, nums_drafts = self.proposer.to_come, step.nums_drafts if step.plan.is_ahead else None
            attach(said, Report(to_come.num_model_tokens, nums_drafts, to_come.drafts_wanted))
        return output
