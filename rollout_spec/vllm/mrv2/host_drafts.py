"""The tokens of vLLM's MRV2 on the host, for the proposer; drafts for the step that begins. An adapter.

MRV2 keeps tokens on the device and its rows in any order. `HostBatch` is the copy on the host that the
proposer reads. A step's tokens reach it on a stream of their own. With an `AheadScheduler` the next step is
there by then, with room for drafts: they go into it, and the runner never sees the room that stays empty.
With vLLM's own scheduler they go the way they go with MRV1, and come with the inputs of the next step.
"""

from collections import deque
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from rollout_spec.config import SpecConfig
from rollout_spec.patches import Patch, put_before
from rollout_spec.vllm.mrv2.arrivals import Arrival, TimedOutput
from rollout_spec.vllm.mrv2.host_batch import HostBatch
from rollout_spec.vllm.proposer import SuffixProposer
from rollout_spec.vllm.step_notes import Plan, Report, attach, plan_of

SPECULATOR = Patch(
    name="vllm-v2-speculator",
    reason="MRV2 builds the speculators that it names itself, and hands them neither requests nor "
    "sampled tokens",
    upstream="vllm/v1/worker/gpu/spec_decode/__init__.py, init_speculator; "
    "vllm/v1/worker/gpu/model_runner.py, GPUModelRunner",
    until="MRV2 takes a custom_class, and gives it the requests of its rows",
)


class HostDrafts:
    """Drafts of `SuffixProposer` for the rows of a runner.

    In each step vLLM calls `begin_step`, `give_drafts`, `take_sampled` and `report`, in this order. It is

    - the receiver of tokens: `take_sampled` sends them, `_draft_after_arrivals` waits for them, and drafts
      after them;
    - the giver of the drafts that a step verifies: `give_drafts`;
    - the runner's `draft_tokens_handler`, from which a scheduler that waits takes the drafts.

    Attributes:
        sampled_tokens: int64 [num_rows, K + 1], of the step that has just sampled.
        takes_model_drafts: whether what a model drafts in the step that runs can be verified in the next one.
        num_passes: how many passes a model is to take for it, at most. All workers are told these two.
    """

    def __init__(self, runner: Any, config: SpecConfig) -> None:
        self._runner, self._batch = runner, HostBatch(runner)
        self.proposer = SuffixProposer(runner.vllm_config)
        self.proposer.bind(self._batch, config, self._draft_after_arrivals)
        self.sampled_tokens: torch.Tensor | None = None
        self.takes_model_drafts = True
        self.num_passes = self.proposer.most_model_tokens
        self._has_model = self.proposer.most_model_tokens > 0
        self._device = runner.device
        self._stream = torch.cuda.Stream(self._device)
        self._num_tokens = config.num_speculative_tokens
        self._arrivals: deque[Arrival] = deque()
        self._drafts = DraftTokenIds([], [])
        self._plan = Plan()  # of the step that runs
        self._nums_drafts: dict[str, int] = {}  # of its requests
        runner.drafter = self.proposer  # where MRV1 has it
        runner.draft_tokens_handler = self

    def begin_step(self, scheduler_output: Any) -> None:
        """The requests that go and come with a step; before the runner takes them in."""
        self._plan = plan = plan_of(scheduler_output)
        self._draft_after_arrivals(plan.num_in_flight or 0)
        self.takes_model_drafts = plan.room > 0 or not plan.is_ahead
        if plan.num_passes is not None:
            self.num_passes = plan.num_passes
        try:
            self._batch.change(scheduler_output)
            # One that was preempted and is back at once: its scheduler drops what is on its way to it.
            for arrival in self._arrivals:
                arrival.forget({request.req_id for request in scheduler_output.scheduled_new_reqs})
        except Exception as error:
            self.proposer.fail(error)

    def give_drafts(self, scheduler_output: Any) -> None:
        """Put a step's drafts where the runner reads them, before it reads how long the rows are.

        Args:
            scheduler_output: the runner's own, which may be changed.
        """
        if self._plan.is_ahead:
            self._fill(scheduler_output)
        given = scheduler_output.scheduled_spec_decode_tokens
        drafts = {name: tokens for name, tokens in given.items() if tokens and tokens[0] >= 0}
        self._nums_drafts = {name: len(tokens) for name, tokens in drafts.items()}
        self.proposer.note_work(scheduler_output, has_waited=self._plan.room > 0)
        if not drafts:
            return
        tokens, states = np.zeros((len(drafts), self._num_tokens), np.int64), self._runner.req_states
        for row, draft in zip(tokens, drafts.values(), strict=True):
            row[: len(draft)] = draft
        rows = np.array([states.req_id_to_index[request_id] for request_id in drafts])
        states.draft_tokens[async_tensor_h2d(rows, device=self._device)] = async_tensor_h2d(
            tokens, device=self._device
        )

    def _fill(self, scheduler_output: Any) -> None:
        """Put drafts where a step has room for some, and take away the room that stays empty.

        Args:
            scheduler_output: the runner's own. The scheduler's stays as it is: that takes back the tokens for
                which there was room, and that were not accepted.
        """
        rooms = {name: len(room) for name, room in scheduler_output.scheduled_spec_decode_tokens.items()}
        if not rooms:
            return
        drafts, levels = self._draft_in_time(rooms)
        scheduled = scheduler_output.num_scheduled_tokens
        self._correct_counts({name: levels[name] for name in scheduled if name in levels})
        nums = {name: num - rooms.get(name, 0) + len(drafts.get(name, ())) for name, num in scheduled.items()}
        scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_scheduled_tokens = drafts, nums
        scheduler_output.total_num_scheduled_tokens = sum(nums.values())

    def _draft_in_time(self, rooms: dict[str, int]) -> tuple[dict[str, list[int]], dict[str, int]]:
        """Wait for the tokens of the step before and draft, for all tensor-parallel ranks the same.

        Args:
            rooms: of requests, how many draft tokens they can have.

        Returns:
            The drafts of requests that have some, and how many tokens each request has.
        """
        of_rows = [rooms.get(name, 0) for name in self._batch.input_batch.req_ids]
        drafts = self._draft_after_arrivals(in_time=True, rooms=np.array(of_rows, np.int32))
        filling = {
            name: draft[: rooms[name]]
            for name, draft in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
            if draft and rooms.get(name)
        }
        levels = dict(zip(drafts.req_ids, self._batch.levels.tolist(), strict=False))
        found: tuple[dict[str, list[int]], dict[str, int]] = get_tp_group().broadcast_object(
            (filling, levels)
        )
        return found

    def _correct_counts(self, levels: dict[str, int]) -> None:
        """Let the host know how far these rows are: their scheduler counts all room of the step before.

        Attention that decodes rows of one length only takes the others for prompts, and that count for exact.
        """
        states = self._runner.req_states
        rows, counts = [states.req_id_to_index[name] for name in levels], states.num_computed_tokens_np
        counts[rows] = np.minimum(counts[rows], np.array([*levels.values()], np.int32) - 1)

    def take_sampled(
        self, input_batch: Any, num_sampled: torch.Tensor, model_drafts: tuple[torch.Tensor, ...] = ()
    ) -> torch.Tensor:
        """Let the tokens of the step's rows start on their way to the host; where the scheduler waits, draft
        after them.

        Args:
            input_batch: the runner's.
            num_sampled: int32 [num_rows], how many tokens each has got.
            model_drafts: int64 and float32 [num_rows, m], a model's and their log-odds, if it has drafted.

        Returns:
            Nothing, int64 [num_rows, K]: drafts come when the next step begins.
        """
        if not self.proposer.is_used:
            return self.no_drafts(input_batch)
        assert self.sampled_tokens is not None
        arriving = self.proposer.work, self.sampled_tokens, num_sampled, *model_drafts
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._arrivals.append(Arrival(input_batch.req_ids, *arriving))
        if not self._plan.is_ahead:
            self._drafts = self._draft_after_arrivals(in_time=True)
        return self.no_drafts(input_batch)

    def no_drafts(self, input_batch: Any) -> torch.Tensor:
        """What `take_sampled` returns, where nothing was sampled."""
        # A new one each time: vLLM 0.33 writes into it.
        return torch.zeros(input_batch.num_reqs, self._num_tokens, dtype=torch.int64, device=self._device)

    def _draft_after_arrivals(
        self, num_in_flight: int = 0, *, in_time: bool = False, rooms: Any = None
    ) -> DraftTokenIds:
        """Index the tokens of all steps but the last `num_in_flight`, and draft after the last of these.

        in_time, rooms: as of `Drafter.draft`, after the last step.
        """
        drafts = DraftTokenIds([], [])
        while len(self._arrivals) > num_in_flight:
            arrival = self._arrivals.popleft()
            given, is_last = arrival.wait(self.proposer.catch_up), not self._arrivals
            try:
                drafts = self._draft_after(arrival, *given, in_time=in_time and is_last, rooms=rooms)
            except Exception as error:
                self.proposer.fail(error)
                drafts = DraftTokenIds([], [])
        return drafts

    def _draft_after(
        self, arrival: Arrival, tokens: Any, nums: Any, *drafted: Any, in_time: bool, rooms: Any
    ) -> DraftTokenIds:
        nums_new = self._batch.extend(arrival.request_ids, tokens, nums)
        model_drafts = self._batch.place(arrival.request_ids, nums, *drafted) if drafted else None
        drafts = self.proposer.draft(
            nums_new, self._batch.tokens, self._batch.levels, work=arrival.work, ended=arrival.ended,
            in_time=in_time and bool(drafted) == self._has_model, model_drafts=model_drafts, rooms=rooms,
        )  # fmt: skip
        return DraftTokenIds(list(self._batch.input_batch.req_ids), drafts)

    def report(self, output: Any) -> Any:
        """Let a step's output say what was drafted, what is to be next, and when the step had ended."""
        said = output.model_runner_output if isinstance(output, AsyncOutput) else output
        if isinstance(said, ModelRunnerOutput):
            nums_drafts = self._nums_drafts if self._plan.is_ahead else None
            attach(said, Report(self.proposer.num_passes, nums_drafts, self.proposer.wants_room))
        if isinstance(output, AsyncOutput) and self._arrivals:
            output.arrival = self._arrivals[-1]
            put_before(TimedOutput, output, SPECULATOR)
        return output

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """What `propose` returned."""

    def get_draft_tokens(self) -> DraftTokenIds | None:
        return None if self._plan.is_ahead else self._drafts
