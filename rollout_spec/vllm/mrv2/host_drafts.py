"""The tokens of vLLM's MRV2 on the host, for the proposer; drafts for the step that begins. An adapter.

MRV2 keeps tokens on the device and its rows in any order. `HostBatch` is the copy on the host that the
proposer reads. A step's tokens reach it on a stream of their own. With an `AheadScheduler` the next step is
there by then, with room for drafts: they go into it, and the runner never sees the room that stays empty.
With vLLM's own scheduler they go the way they go with MRV1, and come with the inputs of the next step.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import deque
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np

from rollout_spec.drafting.gate.costs import Ranks
from rollout_spec.drafting.index import ModelDrafts
from rollout_spec.vllm.mrv2.ahead import AHEAD_KEY, FILLED_KEY, Ahead, Filled
from rollout_spec.vllm.options import drafts_with_model, num_model_tokens
from rollout_spec.vllm.proposer import SuffixProposer
from rollout_spec.vllm.scheduler import MODEL_TOKENS_KEY


class HostBatch:
    """The requests of an MRV2 and their tokens, on the host: what the proposer reads of MRV1.

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
        self._last_levels = np.zeros(runner.max_num_reqs, np.int32)  # beyond which vLLM keeps no token

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
            self._last_levels[row] = self._last_levels[last]
            self.tokens[row, :level] = self.tokens[last, :level]

    def add(self, request: Any) -> None:
        """Take in one of a scheduler's new requests, which may be one that was preempted."""
        self.suspend([request.req_id])
        tokens, row = request.prefill_token_ids, len(self.input_batch.req_ids)
        self.requests.setdefault(request.req_id, request)  # the same object also where it has come back
        self.input_batch.req_ids.append(request.req_id)
        self.tokens[row, : len(tokens)] = tokens
        self.levels[row] = len(tokens)
        max_tokens = getattr(request.sampling_params, "max_tokens", None)
        self._last_levels[row] = self.max_model_len
        if max_tokens is not None:
            most = len(request.prompt_token_ids or ()) + max_tokens
            self._last_levels[row] = min(self.max_model_len, most)

    def extend(self, request_ids: list[str], tokens: Any, nums: Any) -> list[int]:
        """Append a step's tokens.

        Args:
            request_ids: of the step's rows.
            tokens: int64 [num_rows, K + 1], of which the first nums[i] are row i's.
            nums: int32 [num_rows].

        Returns:
            How many tokens each row of `self.tokens` got.
        """
        rows, num_rows = self._rows(request_ids), len(self.input_batch.req_ids)
        # Rows that have left get nothing. A step scheduled before we knew that a row ends may give it extra
        # tokens: cut them at `_last_levels`.
        nums = np.where(rows < 0, 0, np.minimum(nums, (self._last_levels - self.levels)[rows].clip(0)))
        places, columns = np.nonzero(np.arange(tokens.shape[1]) < nums[:, None])
        self.tokens[rows[places], self.levels[rows[places]] + columns] = tokens[places, columns]
        nums_new = np.zeros(num_rows, np.int32)
        nums_new[rows[nums > 0]] = nums[nums > 0]
        self.levels[:num_rows] += nums_new
        return nums_new.tolist()

    def place(self, request_ids: list[str], nums: Any, tokens: Any, log_odds: Any) -> ModelDrafts:
        """A step's drafts of a model, row for row of `self.tokens`.

        Args:
            request_ids: of the step's rows.
            nums: int32 [num_rows], how many tokens each has got: what got none drafts nothing.
            tokens: int64 [num_rows, m].
            log_odds: float32 [num_rows, m].
        """
        rows = self._rows(request_ids)
        drafts = (rows >= 0) & (nums > 0)
        shape = len(self.input_batch.req_ids), tokens.shape[1]
        placed = ModelDrafts(np.full(shape, -1, np.int32), np.zeros(shape, np.float32))
        placed.tokens[rows[drafts]], placed.log_odds[rows[drafts]] = tokens[drafts], log_odds[drafts]
        return placed

    def _rows(self, request_ids: list[str]) -> Any:
        """int64 [num_rows]: the row of each request; -1 of one that has none."""
        number = {request_id: row for row, request_id in enumerate(self.input_batch.req_ids)}
        return np.array([number.get(request_id, -1) for request_id in request_ids], np.int64)


class _Arrival:
    """A step's tokens on their way to the host, and what the step's ranks knew of each other."""

    def __init__(self, request_ids: list[str], ranks: Ranks | None, *on_device: torch.Tensor) -> None:
        self.request_ids, self.ranks = request_ids, ranks
        self._on_device = on_device  # theirs until they have been copied
        self._on_host = [async_copy_to_np(each) for each in on_device]
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()
        self.ended: float | None = None  # when the host first knew that the step had ended

    def forget(self, request_id: str) -> None:
        """Drop this request's tokens from the step: it was preempted and starts again."""
        if request_id in self.request_ids:
            self.request_ids = [each if each != request_id else "" for each in self.request_ids]

    def note_end(self) -> None:
        if self.ended is None:
            self.ended = time.perf_counter()

    def wait(self) -> list[Any]:
        """What `draft` was given: int64 [num_rows, K + 1], int32 [num_rows], and a model's drafts."""
        self._event.synchronize()
        self.note_end()
        return self._on_host


class HostDrafts:
    """Drafts of `SuffixProposer` for the rows of a runner.

    It is also the runner's `draft_tokens_handler`, from which a scheduler that waits takes the drafts.

    Attributes:
        has_room: whether the step that begins next has room for drafts; always, where the scheduler waits.
            All workers are told so.
        model_tokens: how many a model is to draft for it, at most; which they are told too.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.proposer = SuffixProposer(vllm_config)
        self.has_room = True
        self.model_tokens = num_model_tokens(vllm_config)
        self._has_model = drafts_with_model(vllm_config)
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
        self._drafts = DraftTokenIds([], [])
        self._ahead: Ahead | None = None  # of the step that runs; None: its scheduler waits for drafts
        self._nums_drafts: dict[str, int] = {}  # of its requests

    def bind(self, runner: Any) -> None:
        """Take the place of what the runner does with drafts; once, as soon as it is made."""
        self._batch = HostBatch(runner)
        self.proposer.bind(self._batch)
        self.proposer.receive = functools.partial(self._receive, 0, in_time=False)
        self._runner = runner
        runner.drafter = self.proposer  # where MRV1 has it
        runner.draft_tokens_handler = self
        runner.add_requests = _both(self._add_requests, runner.add_requests)
        runner.update_requests = _both(runner.update_requests, self._give_drafts)
        runner.execute_model = _with_a_copy(runner.execute_model)
        runner.postprocess_sampled = _both(self._keep_sampled, runner.postprocess_sampled)
        runner.sample_tokens = self._reporting(runner.sample_tokens)

    def _add_requests(self, scheduler_output: Any) -> None:
        """Before the runner's own: the requests that go and come."""
        batch = self._batch
        self._ahead = getattr(scheduler_output, AHEAD_KEY, None)
        self._receive(0 if self._ahead is None else self._ahead.num_in_flight, in_time=False)
        self.has_room = self._ahead is None or self._ahead.room > 0
        told = getattr(scheduler_output, MODEL_TOKENS_KEY, None)
        if told is not None:
            self.model_tokens = told
        batch.remove(scheduler_output.finished_req_ids)
        batch.suspend(scheduler_output.preempted_req_ids or ())
        for request in scheduler_output.scheduled_new_reqs:
            batch.add(request)
            # One that was preempted and is back at once: its scheduler drops what is on its way to it.
            for arrival in self._arrivals:
                arrival.forget(request.req_id)

    def _give_drafts(self, scheduler_output: Any) -> None:
        """After the runner's `update_requests`, the last moment before it reads how long the rows are."""
        if self._ahead is not None:
            self._fill(scheduler_output)
        given = scheduler_output.scheduled_spec_decode_tokens
        drafts = {name: tokens for name, tokens in given.items() if tokens and tokens[0] >= 0}
        self._nums_drafts = {name: len(tokens) for name, tokens in drafts.items()}
        if not drafts:
            return
        tokens, states = np.zeros((len(drafts), self._no_drafts.shape[1]), np.int64), self._runner.req_states
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
        drafts, requests = dict(scheduler_output.scheduled_spec_decode_tokens), self._batch.requests
        # vLLM makes the masks of a grammar by the scheduler's room (of a request that joins, from 0.29 on).
        rooms = {
            name: len(drafts.pop(name))
            for name in tuple(drafts)
            if getattr(requests[name].sampling_params, "structured_outputs", None) is None
        }
        if not rooms:
            return
        nums = {name: num - rooms.get(name, 0) for name, num in scheduler_output.num_scheduled_tokens.items()}
        if self.has_room:
            drafts |= self._draft_in_time(rooms)
        for name in drafts.keys() & rooms.keys():
            nums[name] += len(drafts[name])
        scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_scheduled_tokens = drafts, nums
        scheduler_output.total_num_scheduled_tokens = sum(nums.values())

    def _draft_in_time(self, rooms: dict[str, int]) -> dict[str, list[int]]:
        """Wait for the tokens of the step before and draft, for all tensor-parallel ranks the same.

        Args:
            rooms: of requests, how many draft tokens they can have.
        """
        of_rows = [rooms.get(name, 0) for name in self._batch.input_batch.req_ids]
        self._drafts = DraftTokenIds([], [])
        self._receive(0, in_time=True, rooms=np.array(of_rows, np.int32))
        drafts: dict[str, list[int]] = get_tp_group().broadcast_object(
            {
                name: draft[: rooms[name]]
                for name, draft in zip(self._drafts.req_ids, self._drafts.draft_token_ids, strict=True)
                if draft and rooms.get(name)
            }
        )
        return drafts

    def _keep_sampled(self, idx_mapping: torch.Tensor, sampled_tokens: torch.Tensor, *_: Any) -> None:
        self._sampled_tokens = sampled_tokens

    def draft(
        self, input_batch: Any, num_sampled: torch.Tensor, model_drafts: tuple[torch.Tensor, ...] = ()
    ) -> torch.Tensor:
        """Draft for the step's rows, after the tokens that they have got.

        Args:
            input_batch: the runner's.
            num_sampled: int32 [num_rows], how many tokens each has got.
            model_drafts: int64 and float32 [num_rows, m], a model's and their log-odds, if it has drafted.

        Returns:
            Nothing, int64 [num_rows, K]: drafts come when the next step begins.
        """
        if not self.proposer.is_used:
            return self.no_drafts(input_batch)
        assert self._sampled_tokens is not None
        arriving = self.proposer.other_ranks.ranks, self._sampled_tokens, num_sampled, *model_drafts
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._arrivals.append(_Arrival(input_batch.req_ids, *arriving))
        if self._ahead is None:
            self._drafts = DraftTokenIds([], [])
            self._receive(0, in_time=True)
        return self.no_drafts(input_batch)

    def no_drafts(self, input_batch: Any) -> torch.Tensor:
        """What `draft` returns, where nothing was sampled."""
        return self._no_drafts[: input_batch.num_reqs]

    def _receive(self, num_in_flight: int, *, in_time: bool, rooms: Any = None) -> None:
        """Index the tokens of all steps but the latest few, and draft; rooms: as of `Drafter`."""
        while len(self._arrivals) > num_in_flight:
            arrival = self._arrivals.popleft()
            given, is_last = arrival.wait(), not self._arrivals
            try:
                self._drafts = self._draft_after(arrival, *given, in_time=in_time and is_last, rooms=rooms)
            except Exception as error:
                self.proposer.fail(error)
                self._drafts = DraftTokenIds([], [])

    def _draft_after(
        self, arrival: _Arrival, tokens: Any, nums: Any, *drafted: Any, in_time: bool, rooms: Any
    ) -> DraftTokenIds:
        nums_new = self._batch.extend(arrival.request_ids, tokens, nums)
        model_drafts = self._batch.place(arrival.request_ids, nums, *drafted) if drafted else None
        drafts = self.proposer.draft(
            nums_new, self._batch.tokens, self._batch.levels, ranks=arrival.ranks, ended=arrival.ended,
            in_time=in_time and bool(drafted) == self._has_model, model_drafts=model_drafts, rooms=rooms,
        )  # fmt: skip
        return DraftTokenIds(list(self._batch.input_batch.req_ids), drafts)

    def _reporting(self, sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
        """Let a step's output say what was drafted, what is to be next, and when the step had ended."""

        @functools.wraps(sample_tokens)
        def sample_and_tell(*args: Any, **kwargs: Any) -> Any:
            output = sample_tokens(*args, **kwargs)
            said = output.model_runner_output if isinstance(output, AsyncOutput) else output
            if isinstance(said, ModelRunnerOutput):
                setattr(said, MODEL_TOKENS_KEY, self.proposer.model_tokens)
                if self._ahead is not None:
                    setattr(said, FILLED_KEY, Filled(self._nums_drafts, self.proposer.makes_room))
            if isinstance(output, AsyncOutput) and self._arrivals:
                output.get_output = _noting_end(self._arrivals[-1], output.get_output)
            return output

        return sample_and_tell

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """What `propose` returned."""

    def get_draft_tokens(self) -> DraftTokenIds | None:
        return self._drafts if self._ahead is None else None


def _both(first: Callable[..., None], second: Callable[..., Any]) -> Callable[..., Any]:
    """Both, called with the same arguments; it returns what the second one does."""

    @functools.wraps(second)
    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return second(*args, **kwargs)

    return both


def _with_a_copy(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    """With a SchedulerOutput of the runner's own: in one process it has the scheduler's."""

    @functools.wraps(execute_model)
    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        return execute_model(copy.copy(scheduler_output), *args, **kwargs)

    return execute


def _noting_end(arrival: _Arrival, get_output: Callable[[], Any]) -> Callable[[], Any]:
    def get_and_note() -> Any:
        output = get_output()
        arrival.note_end()
        return output

    return get_and_note
