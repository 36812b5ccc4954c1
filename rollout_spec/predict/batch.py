"""The running requests of a simulated engine, by row."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.predict.load import Request
from rollout_spec.trace import num_alike


class Batch:
    """At most `num_rows` requests, the longest of `longest` tokens. The last row takes the place of one that
    goes, as in vLLM's."""

    def __init__(self, num_rows: int, longest: int) -> None:
        shape = max(1, num_rows), max(1, longest)  # the index takes no empty array
        self.requests: list[Request] = []
        self.token_ids = np.zeros(shape, np.int32)  # prompts and whole responses
        # How many tokens of each row exist, with how many it ends, and how many requests were added before.
        self.levels, self.ends, self._numbers = np.zeros((3, shape[0]), np.int32)
        self.drafts: list[list[int]] = []
        self._unfilled: list[int] = []  # tokens of each that are still to be prefilled
        self._num_added = 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def nums_left(self) -> npt.NDArray[np.int32]:
        """Tokens that each row still gets, [n]."""
        return self.ends[: len(self)] - self.levels[: len(self)]

    @property
    def nums_done(self) -> list[int]:
        """Tokens of each response that exist."""
        levels = self.levels[: len(self)].tolist()
        return [each - len(req.prompt_token_ids) for each, req in zip(levels, self.requests, strict=True)]

    @property
    def num_context(self) -> int:
        return int(self.levels[: len(self)].sum())

    @property
    def num_verified(self) -> int:
        """Tokens that the rows bring to a step: one each, and their drafts."""
        return self._unfilled.count(0) + sum(map(len, self.drafts))

    def newest_row(self) -> int:
        return int(self._numbers[: len(self)].argmax())

    def prefill(self, most: int) -> int:
        """Prefill as many tokens at most; returns how many."""
        num_left = most
        for row, num in enumerate(self._unfilled):
            part = max(0, min(num, num_left))
            self._unfilled[row] -= part
            num_left -= part
        return most - num_left

    def add(self, request: Request, num_done: int, num_unfilled: int) -> int:
        """Give a request the next row, of whose response `num_done` tokens exist; returns where it ends."""
        row, prompt = len(self), request.prompt_token_ids
        end = len(prompt) + len(request.response)
        self.token_ids[row, : len(prompt)] = prompt
        self.token_ids[row, len(prompt) : end] = request.response
        self.levels[row], self.ends[row], self._numbers[row] = len(prompt) + num_done, end, self._num_added
        self.requests.append(request)
        self.drafts.append([])
        self._unfilled.append(num_unfilled)
        self._num_added += 1
        return end

    def remove(self, row: int) -> Request:
        request, last = self.requests[row], len(self) - 1
        for array in (self.token_ids, self.levels, self.ends, self._numbers):
            array[row] = array[last]
        by_row: tuple[list[Any], ...] = (self.requests, self.drafts, self._unfilled)
        for values in by_row:
            values[row] = values[last]
            values.pop()
        return request

    def advance(self) -> tuple[list[int], list[int]]:
        """Give every row that has its prompt the accepted tokens of its draft, and one more; returns how many
        tokens each row got, and how many it accepted."""
        nums_new, nums_accepted = [int(not num) for num in self._unfilled], [0] * len(self)
        for row, draft in enumerate(self.drafts):
            if draft:
                level, end = int(self.levels[row]), int(self.ends[row])
                recorded = self.token_ids[row, level : min(end, level + len(draft))].tolist()
                nums_accepted[row] = num_alike(recorded, draft)
                nums_new[row] = min(nums_accepted[row] + 1, end - level)
        self.levels[: len(self)] += np.array(nums_new, np.int32)
        return nums_new, nums_accepted
