"""What gets into an index in parts, so that no step waits for all: long prompts, earlier responses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import Int32Array, NativeError

_ZERO = np.zeros(1, np.int32)


@dataclasses.dataclass
class _Part:
    group: int
    row: Int32Array  # [1, length]; the prompt's tokens are not read again and may be anything
    level: int  # tokens indexed, the prompt included
    sequence: int = -1  # -1: not opened yet


class Backlog:
    """The prompts and responses that are still to be indexed, in this order; prompts first."""

    def __init__(self, index: SuffixIndex) -> None:
        self._index = index
        self._prompts: OrderedDict[int, Int32Array] = OrderedDict()  # of groups; indexed in part
        self._parts: deque[_Part] = deque()
        self.num_tokens = 0
        """Still to be indexed."""

    def add(self, group: int, num_prompt_tokens: int, responses: Sequence[Int32Array]) -> None:
        """Index responses behind the prompt of a group, when their turn comes.

        The latest first: of continuations that are equally frequent the one that came first is drafted.
        """
        for response in reversed(responses):
            row = np.zeros((1, num_prompt_tokens + len(response)), np.int32)
            row[0, num_prompt_tokens:] = response
            self._parts.append(_Part(group, row, num_prompt_tokens))
            self.num_tokens += len(response)

    def add_prompt(self, group: int, prompt: Int32Array) -> None:
        """Index the rest of the prompt that the group was opened with."""
        self._prompts[group] = prompt

    def index_prompts(self, max_tokens: int) -> int:
        """Index the next tokens of prompts; returns how many more may be.

        Raises:
            NativeError: no room is left for the first prompt; it can be tried again.
        """
        while self._prompts and max_tokens > 0:
            group, prompt = next(iter(self._prompts.items()))
            num_before = self._index.stats().num_tokens
            if self._index.extend_group(group, prompt, max_tokens) == 0:
                del self._prompts[group]
            max_tokens -= self._index.stats().num_tokens - num_before
        return max_tokens

    def drop_prompt(self) -> None:
        """Leave out the first prompt; its group drafts nothing."""
        if self._prompts:
            self.drop(next(iter(self._prompts)))

    def index(self, max_tokens: int) -> None:
        """Index the next tokens of responses, once all prompts are indexed.

        Raises:
            NativeError: no room is left, or a response is no text; its group gets no more of its responses.
        """
        while self._parts and not self._prompts and max_tokens > 0:
            part = self._parts[0]
            level = min(part.level + max_tokens, part.row.shape[1])
            try:
                if part.sequence < 0:
                    part.sequence = self._index.open_sequence(part.group)
                sequence, levels = np.array([part.sequence], np.int32), np.array([level], np.int32)
                self._index.step(sequence, part.row, _ZERO, levels, _ZERO)
            except NativeError:
                self.drop(part.group)
                raise
            max_tokens -= level - part.level
            self.num_tokens -= level - part.level
            part.level = level
            if level == part.row.shape[1]:
                self._index.close_sequence(self._parts.popleft().sequence)

    def drop(self, group: int) -> None:
        """Leave out what is left for a group; it can be closed then."""
        self._prompts.pop(group, None)
        for part in self._parts:
            if part.group != group:
                continue
            self.num_tokens -= part.row.shape[1] - part.level
            if part.sequence >= 0:
                self._index.close_sequence(part.sequence)
        self._parts = deque(part for part in self._parts if part.group != group)

    def clear(self) -> None:
        """Forget everything, after the index has been cleared."""
        self._prompts.clear()
        self._parts.clear()
        self.num_tokens = 0
