"""The requests of vLLM's MRV2 and their tokens, on the host."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.drafting.drafts import ModelDrafts
from rollout_spec.vllm.proposing.live_requests import max_level_of


class AppendPlaces(NamedTuple):
    """Where the next tokens of requests go."""

    rows: npt.NDArray[np.int64]  # of each; -1: it has left
    first: npt.NDArray[np.int64]  # in `HostBatch.tokens`, flat
    most: npt.NDArray[np.int64]  # tokens that it can still get


class HostBatch:
    """The requests of an MRV2 and their tokens, on the host: what the proposer reads of MRV1.

    Attributes:
        requests: by id, with `prompt_token_ids` and `sampling_params`; preempted ones have no row.
        tokens: int32 [rows, most tokens], row i holds those of `input_batch.req_ids[i]`.
        levels: int32 [rows], how many.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        # Untouched pages take no memory.
        self.tokens = np.zeros((runner.max_num_reqs, runner.max_model_len), np.int32)
        self.levels = np.zeros(runner.max_num_reqs, np.int32)
        self._max_levels = np.zeros(runner.max_num_reqs, np.int32)  # beyond which vLLM keeps no token

    def change(self, scheduler_output: Any) -> None:
        """The requests that go and come with a step."""
        self._suspend(scheduler_output.finished_req_ids)
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        self._suspend(scheduler_output.preempted_req_ids or ())
        for request in scheduler_output.scheduled_new_reqs:
            self._add(request)

    def _suspend(self, request_ids: Collection[str]) -> None:
        """Requests have no row any more; the last row takes the place of each."""
        rows = self.input_batch.req_ids
        for request_id in request_ids:
            if request_id not in rows:
                continue
            row, last = rows.index(request_id), len(rows) - 1
            rows[row] = rows[last]
            rows.pop()
            level = self.levels[row] = self.levels[last]
            self._max_levels[row] = self._max_levels[last]
            self.tokens[row, :level] = self.tokens[last, :level]

    def _add(self, request: Any) -> None:
        """Take in one of a scheduler's new requests, which may be one that was preempted."""
        self._suspend([request.req_id])
        tokens, row = request.prefill_token_ids, len(self.input_batch.req_ids)
        self.requests.setdefault(request.req_id, request)  # the same object also where it has come back
        self.input_batch.req_ids.append(request.req_id)
        self.tokens[row, : len(tokens)] = tokens
        self.levels[row] = len(tokens)
        self._max_levels[row] = max_level_of(request, self._runner.max_model_len)

    def rows(self, request_ids: list[str]) -> npt.NDArray[np.int64]:
        """[num_requests]: the row of each; -1 of one that has none."""
        number = {request_id: row for row, request_id in enumerate(self.input_batch.req_ids)}
        return np.array([number.get(request_id, -1) for request_id in request_ids], np.int64)

    def places_to_append(self, request_ids: list[str]) -> AppendPlaces:
        rows = self.rows(request_ids)
        # Rows that have left get nothing. A step scheduled before we knew that a row ends may give it extra
        # tokens: cut them at `_max_levels`.
        most = np.where(rows < 0, 0, np.maximum(self._max_levels - self.levels, 0)[rows])
        return AppendPlaces(rows, rows * self.tokens.shape[1] + self.levels[rows], most)

    def extend(self, places: AppendPlaces, tokens: Any, nums: Any) -> npt.NDArray[np.int32]:
        """Append a step's tokens; returns how many each row of `self.tokens` got.

        tokens: int64 [num_requests, K + 1], of which the first nums[i] are request i's.
        """
        nums, columns = np.minimum(nums, places.most), np.arange(tokens.shape[1])
        is_new = columns < nums[:, None]
        self.tokens.reshape(-1)[(places.first[:, None] + columns)[is_new]] = tokens[is_new]
        nums_new, has_some = np.zeros(len(self.input_batch.req_ids), np.int32), nums > 0
        nums_new[places.rows[has_some]] = nums[has_some]
        self.levels[: len(nums_new)] += nums_new
        return nums_new

    def by_row(self, places: AppendPlaces, nums: Any, tokens: Any, log_odds: Any) -> ModelDrafts:
        """A step's drafts of a model, [num_requests, m] each, row for row of `self.tokens`.

        nums: int32 [num_requests], how many tokens each has got: what got none drafts nothing.
        """
        rows, drafts = places.rows, (places.rows >= 0) & (nums > 0)
        shape = len(self.input_batch.req_ids), tokens.shape[1]
        placed = ModelDrafts(np.full(shape, -1, np.int32), np.zeros(shape, np.float32))
        placed.tokens[rows[drafts]], placed.log_odds[rows[drafts]] = tokens[drafts], log_odds[drafts]
        return placed
