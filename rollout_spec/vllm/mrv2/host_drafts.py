"""The tokens of vLLM's MRV2 on the host, for the proposer; drafts for the step that begins. An adapter.

`HostBatch` is the copy on the host that the proposer reads. A step's tokens reach it on a stream of their
own. With an `AheadScheduler` the next step is there by then, with room for drafts: they go into it, and the
runner never sees the room that stays empty. With vLLM's own scheduler they come with the inputs of the next
step.
"""

import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils import torch_utils
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafts import TAKES_ANY, TAKES_NONE, Drafts, NextStep
from rollout_spec.drafting.native import Int32Array
from rollout_spec.patches import Patch, put_before
from rollout_spec.vllm.mrv2.arrivals import Arrival, TimedOutput
from rollout_spec.vllm.mrv2.host_batch import HostBatch
from rollout_spec.vllm.proposer import SuffixProposer
from rollout_spec.vllm.step_notes import Plan, Report, attach, plan_of

SPECULATOR = Patch(
    name="vllm-mrv2-speculator",
    reason="MRV2 builds the speculators that it names itself, and hands them neither requests nor "
    "sampled tokens",
    upstream="vllm/v1/worker/gpu/spec_decode/__init__.py, init_speculator; "
    "vllm/v1/worker/gpu/model_runner.py, GPUModelRunner",
    until="MRV2 takes a custom_class, and gives it the requests of its rows",
)


class HostDrafts:
    """Drafts of `SuffixProposer` for the rows of a runner.

    In a step vLLM calls `begin_step`, `note_step`, `give_drafts`, `no_drafts` and `report`, in this order; a
    model's speculator calls `take_model_drafts` before `no_drafts`. After `report` the step's tokens are on
    their way: an `Arrival`. `_draft_after` waits for it, and is called

    - in `report` itself, if the scheduler waits. As the runner's `draft_tokens_handler` this object gives it
      the drafts;
    - in the next step's `give_drafts`, if that step has room for drafts;
    - else in a later `begin_step`, or when counters are asked for, to index them only.

    Attributes:
        launching: held while a step begins that waits for drafts.
        num_model_tokens: how many a model drafts for every row in the step that runs; 0: its first pass
            drafts nothing, as nothing can be verified in the next step. All workers are told the same.
    """

    def __init__(self, runner: Any, config: SpecConfig) -> None:
        self._runner, self._batch = runner, HostBatch(runner)
        self.proposer = SuffixProposer(runner.vllm_config)
        self.proposer.bind(self._batch, config, self._index_arrivals)
        self.launching = threading.Lock()
        self._model_drafts: tuple[torch.Tensor, ...] = ()  # after the step that runs; empty: nothing
        self._most_model_tokens = self.num_model_tokens = self.proposer.most_model_tokens
        self._device, self._num_tokens = runner.device, config.num_speculative_tokens
        # What the device gets; who has the tokens of the last step knows that its copy has ended.
        self._sent = torch.zeros(
            runner.max_num_reqs, self._num_tokens, dtype=torch.int64, pin_memory=torch_utils.PIN_MEMORY
        )
        self._arrivals: deque[Arrival] = deque()
        self._drafts = DraftTokenIds([], [])
        self._latest = Drafts.none(0)  # what the drafter has answered last
        self._undrafted: Any = None  # the SchedulerOutput of the step that begins, until it has its drafts
        self._plan = Plan()  # of the step that runs
        self._nums_drafts: dict[str, int] = {}  # of its requests
        runner.rollout_spec_proposer = runner.drafter = self.proposer  # `drafter`: where MRV1 has it
        runner.draft_tokens_handler = self

    def begin_step(self, scheduler_output: Any) -> None:
        """The requests that go and come with a step; before the runner takes them in."""
        self._plan = plan = plan_of(scheduler_output)
        self._index_arrivals(plan.num_in_flight or 0)
        told = plan.num_model_tokens
        most = self._most_model_tokens if told is None else max(1, told)  # the first pass runs anyway
        self.num_model_tokens = most if plan.next_step_takes_drafts else 0
        try:
            self._batch.change(scheduler_output)
            # One that was preempted and is back at once: its scheduler drops what is on its way to it.
            for arrival in self._arrivals:
                arrival.forget({request.req_id for request in scheduler_output.scheduled_new_reqs})
        except Exception as error:
            self.proposer.fail(error)

    def note_step(self, scheduler_output: Any) -> None:
        """The runner has taken in this step. The output is its own: `give_drafts` puts drafts into it."""
        self._undrafted = scheduler_output

    def give_drafts(self) -> None:
        """Put a step's drafts where the runner reads them, before it reads how long the rows are; once."""
        step, self._undrafted = self._undrafted, None
        if step is None:
            return
        given, self._nums_drafts = step.scheduled_spec_decode_tokens, {}
        if given:
            states, names = self._runner.req_states, [*step.num_scheduled_tokens]
            rows = np.array([states.req_id_to_index[name] for name in names])
            drafts = self._fill(step, names, rows) if self._plan.is_ahead else self._scheduled(given, names)
            nums = zip(names, drafts.lengths.tolist(), strict=True)
            self._nums_drafts = {name: num for name, num in nums if num}
            if self._nums_drafts:
                self._sent.numpy()[rows, : drafts.tokens.shape[1]] = drafts.tokens
                states.draft_tokens.copy_(self._sent, non_blocking=True)
        self.proposer.note_work(step, has_waited=self._plan.room > 0)

    def _scheduled(self, given: dict[str, list[int]], names: list[str]) -> Drafts:
        """What a scheduler gives that has waited for drafts; -1 stands for none."""
        lists = [[token for token in given.get(name, ()) if token >= 0] for name in names]
        tokens = [draft + [0] * (self._num_tokens - len(draft)) for draft in lists]
        return Drafts(np.array(tokens, np.int32), np.array(list(map(len, lists)), np.int32))

    def _fill(self, step: Any, names: list[str], rows: npt.NDArray[np.int64]) -> Drafts:
        """Put drafts where a step has room for some, and take away the room that stays empty; returns the
        drafts of its requests, whose names these are, in these rows of the runner.

        `step` is the runner's own. The scheduler's stays as it is: that takes back the tokens for which there
        was room, and that were not accepted.
        """
        given, counts = step.scheduled_spec_decode_tokens, self._runner.req_states.num_computed_tokens_np
        room = np.array([len(given.get(name, ())) for name in names], np.int32)
        nums = np.array([*step.num_scheduled_tokens.values()], np.int32) - room
        # For all tensor-parallel ranks the same.
        drafts, levels = get_tp_group().broadcast_object(self._draft_for(names, room))
        # The host now knows how far rows are: their scheduler counts all room of the step before. Attention
        # that decodes rows of one length only takes the others for prompts, and that count for exact.
        counts[rows] = np.minimum(counts[rows], levels - 1)
        of_names = zip(names, drafts.lists(), strict=True)
        step.scheduled_spec_decode_tokens = {name: draft for name, draft in of_names if draft}
        nums += drafts.lengths
        step.num_scheduled_tokens = dict(zip(names, nums.tolist(), strict=True))
        step.total_num_scheduled_tokens = int(nums.sum())
        return drafts

    def _draft_for(self, names: list[str], room: Int32Array) -> tuple[Drafts, Int32Array]:
        """Wait for the tokens of the step before and draft for requests that have so much room; returns their
        drafts, and how many tokens each has."""
        rows = self._batch.rows(names)
        of_rows = np.zeros(len(self._batch.input_batch.req_ids), np.int32)
        of_rows[rows] = room
        drafts = self._draft_after_last(NextStep(room=of_rows))
        return Drafts(drafts.tokens[rows], drafts.lengths[rows]), self._batch.levels[rows]

    def no_drafts(self, input_batch: Any) -> torch.Tensor:
        """What a speculator has for the runner's rows: drafts come when the next step begins."""
        # A new one each time: vLLM 0.33 writes into it.
        return torch.zeros(input_batch.num_reqs, self._num_tokens, dtype=torch.int64, device=self._device)

    def _index_arrivals(self, num_in_flight: int = 0) -> None:
        """Index the tokens of all steps but the last `num_in_flight`, and draft nothing after them."""
        while len(self._arrivals) > num_in_flight:
            self._draft_after(self._arrivals.popleft(), TAKES_NONE)

    def _draft_after_last(self, next_step: NextStep) -> Drafts:
        """Index the tokens of all steps, and draft after the last; next_step: as `_draft_after` has it."""
        self._index_arrivals(num_in_flight=1)
        if not self._arrivals:
            return Drafts.none(len(self._batch.input_batch.req_ids))
        return self._draft_after(self._arrivals.popleft(), next_step)

    def _draft_after(self, arrival: Arrival, next_step: NextStep) -> Drafts:
        """Wait for a step's tokens, index them, and draft after them.

        next_step: what it can take, but for the model's drafts, which have come with the tokens.
        """
        places = self._batch.places_to_append(arrival.request_ids)
        tokens, nums, *drafted = arrival.wait(self.proposer.catch_up)
        try:
            nums_new = self._batch.extend(places, tokens, nums)
            model_drafts = self._batch.by_row(places, nums, *drafted) if drafted else None
            # A step for which a model has drafted nothing gets no drafts of the text either.
            takes_drafts = next_step.takes_drafts and (bool(drafted) or not self._most_model_tokens)
            may_end = any((tokens == end).any() for end in self.proposer.end_token_ids)
            self._latest = self.proposer.draft(
                nums_new, self._batch.tokens, self._batch.levels, arrival.work,
                NextStep(model_drafts, takes_drafts, next_step.room), may_end, arrival.ended,
            )  # fmt: skip
            return self._latest
        except Exception as error:
            self.proposer.fail(error)
            return Drafts.none(len(self._batch.input_batch.req_ids))

    def take_model_drafts(self, tokens: torch.Tensor, log_odds: torch.Tensor) -> None:
        """What a model has drafted after the step that runs: int64 and float32 [num_rows, m]."""
        if self.num_model_tokens:
            # Both are overwritten by the next passes, which may come before they are on the host.
            self._model_drafts = tokens.clone(), log_odds.clone()

    def report(self, output: Any) -> Any:
        """A step's tokens are on their way. Where the scheduler waits, draft after them. Let the output say
        what was drafted, what is to be next, and when the step had ended."""
        model_drafts, self._model_drafts = self._model_drafts, ()
        if isinstance(output, AsyncOutput) and self.proposer.is_used:
            arrival = Arrival(output, self.proposer.work, self._runner.output_copy_stream, model_drafts)
            self._arrivals.append(arrival)
            output.arrival, output.launching = arrival, self.launching
            put_before(TimedOutput, output, SPECULATOR)
            if not self._plan.is_ahead:
                drafts = self._draft_after_last(TAKES_ANY)
                self._drafts = DraftTokenIds([*self._batch.input_batch.req_ids], drafts.lists())
        said = output.model_runner_output if isinstance(output, AsyncOutput) else output
        if isinstance(said, ModelRunnerOutput):
            nums_drafts = self._nums_drafts if self._plan.is_ahead else None
            attach(said, Report(self._latest.num_model_tokens, nums_drafts, self._latest.drafts_wanted))
        return output

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """What `propose` returned."""

    def get_draft_tokens(self) -> DraftTokenIds | None:
        return None if self._plan.is_ahead else self._drafts
