"""From the tokens of an MRV2's steps, as they arrive on the host, to drafts."""

from collections import deque
from typing import Any

import numpy as np

from rollout_spec.drafting.drafts import TAKES_NONE, Drafts, NextStep
from rollout_spec.drafting.native import Int32Array
from rollout_spec.vllm.mrv2.arrivals import Arrival
from rollout_spec.vllm.mrv2.host_batch import HostBatch
from rollout_spec.vllm.proposing.proposer import BatchProposer


class ArrivalQueue:
    """The steps whose tokens the batch on the host does not have yet; the proposer drafts after them.

    A failure costs the drafts, not the rollout: the batch is wrong then, and nothing is said of its rows.
    """

    def __init__(self, batch: HostBatch, proposer: BatchProposer) -> None:
        self._arrivals = deque[Arrival]()  # the oldest first
        self._batch, self._proposer, self._has_failed = batch, proposer, False

    def add(self, arrival: Arrival) -> None:
        """A step's tokens are on their way."""
        self._arrivals.append(arrival)

    def change_requests(self, scheduler_output: Any) -> None:
        """The requests that go and come with a step; before the runner takes them in."""
        try:
            self._batch.change(scheduler_output)
            # One that was preempted and is back at once: its scheduler drops what is on its way to it.
            for arrival in self._arrivals:
                arrival.forget({request.req_id for request in scheduler_output.scheduled_new_reqs})
        except Exception as error:
            self._fail(error)

    def take_in(self, all_but: int = 0) -> None:
        """Index the tokens of all steps but the last `all_but`, and draft nothing after them."""
        while len(self._arrivals) > all_but:
            self._draft_after(self._arrivals.popleft(), TAKES_NONE)

    def draft_for_rows(self, next_step: NextStep) -> tuple[list[str], Drafts]:
        """Index the tokens of all steps, draft after the last, for all requests that have a row: these."""
        self.take_in(all_but=1)
        request_ids = [*self._batch.input_batch.req_ids]
        if not self._arrivals:
            return request_ids, Drafts.none(len(request_ids))
        return request_ids, self._draft_after(self._arrivals.popleft(), next_step)

    def draft_for(self, request_ids: list[str], room: Int32Array) -> tuple[Drafts, Int32Array | None]:
        """The same for requests that have so much room; and how many tokens each has, None: nobody knows."""
        rows = self._batch.rows(request_ids)
        room_of_rows = np.zeros(len(self._batch.input_batch.req_ids), np.int32)
        if not self._has_failed:
            room_of_rows[rows] = room
        _, drafts = self.draft_for_rows(NextStep(room=room_of_rows))
        if self._has_failed:
            return Drafts.none(len(request_ids)), None
        return Drafts(drafts.tokens[rows], drafts.lengths[rows]), self._batch.levels[rows]

    def _draft_after(self, arrival: Arrival, next_step: NextStep) -> Drafts:
        """Wait for a step's tokens, index them, and draft after them."""
        places = self._batch.places_to_append(arrival.request_ids)
        tokens, nums, *drafted = arrival.wait(self._proposer.catch_up)
        try:
            nums_new = self._batch.extend(places, tokens, nums)
            model_drafts = self._batch.by_row(places, nums, *drafted) if drafted else None
            # A step for which a model has drafted nothing gets no drafts of the text either.
            takes_drafts = next_step.takes_drafts and (bool(drafted) or not self._proposer.most_model_tokens)
            may_end = any((tokens == end).any() for end in self._proposer.requests.end_token_ids)
            return self._proposer.draft(
                nums_new, self._batch.tokens, self._batch.levels, arrival.work, model_drafts,
                NextStep(takes_drafts, next_step.room), may_end, arrival.ended,
            )  # fmt: skip
        except Exception as error:
            self._fail(error)
            return Drafts.none(len(self._batch.input_batch.req_ids))

    def _fail(self, error: Exception) -> None:
        self._proposer.fail(error)
        self._has_failed = True
