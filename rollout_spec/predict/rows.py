"""The batch of a simulated engine: its requests by row."""

import numpy as np
import numpy.typing as npt

from rollout_spec.predict.load import Request


class Rows:
    """What runs, by row: the request, its tokens and its draft for the next step.

    Args:
        num_rows: the most that run at a time.
        longest: tokens of the longest prompt with its response.
    """

    def __init__(self, num_rows: int, longest: int) -> None:
        # The index takes no empty array.
        num_rows, longest = max(1, num_rows), max(1, longest)
        self.requests: list[Request] = []
        self.drafts: list[list[int]] = []
        self.token_ids = np.zeros((num_rows, longest), np.int32)  # whole responses
        # How many tokens of each row exist, and with how many it ends.
        self._levels, self._ends = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        self._names: dict[str, None] = {}  # the newest last

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def levels(self) -> npt.NDArray[np.int32]:
        """[row], how many of its tokens exist: a view."""
        return self._levels[: len(self)]

    @property
    def ends(self) -> npt.NDArray[np.int32]:
        """[row], with how many tokens it ends."""
        return self._ends[: len(self)]

    @property
    def nums_done(self) -> list[int]:
        """How many tokens of each response exist."""
        pairs = zip(self.levels.tolist(), self.requests, strict=True)
        return [level - len(request.prompt_token_ids) for level, request in pairs]

    @property
    def num_context(self) -> int:
        return int(self.levels.sum())

    @property
    def num_verified(self) -> int:
        """Tokens that the rows bring to a step: one each, and their drafts."""
        return len(self) + sum(map(len, self.drafts))

    @property
    def newest(self) -> int:
        """The row that was started last."""
        name = next(reversed(self._names))
        return next(row for row, request in enumerate(self.requests) if request.name == name)

    def start(self, request: Request, num_done: int) -> None:
        """Give a request the next row; `num_done` tokens of its response exist."""
        row, prompt, end = len(self), request.prompt_token_ids, request.num_tokens
        self.token_ids[row, : len(prompt)] = prompt
        self.token_ids[row, len(prompt) : end] = request.response
        self._levels[row], self._ends[row] = len(prompt) + num_done, end
        self.requests.append(request)
        self.drafts.append([])
        self._names[request.name] = None

    def remove(self, row: int) -> Request:
        """Take a request out; the last row takes its place, as in vLLM's batch."""
        last, request = len(self) - 1, self.requests[row]
        for rows in (self.token_ids, self._levels, self._ends):
            rows[row] = rows[last]
        self.requests[row], self.drafts[row] = self.requests[last], self.drafts[last]
        self.requests.pop()
        self.drafts.pop()
        del self._names[request.name]
        return request
