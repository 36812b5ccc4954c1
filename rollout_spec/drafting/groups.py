"""The groups of an index: opened with their history, kept while idle, closed where room is needed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from rollout_spec.drafting.backlog import Backlog
from rollout_spec.drafting.history import History, group_key, prompt_key
from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, Int32Array, NativeError, OutOfMemory

# Siblings that wait in the engine's queue find their group's text here when they start.
# Few are enough: the samples of a prompt arrive together and are served in order.
MAX_IDLE_GROUPS = 32

# Tokens that are indexed at once, about a millisecond: of a prompt, and in a step of rows that are behind.
MAX_TOKENS_AT_ONCE = 4096

# Tokens of the backlog that one step indexes, and more for every row: as long as the rest takes, about.
_BACKLOG_TOKENS = 256
_BACKLOG_TOKENS_PER_ROW = 16
_BACKLOG_SHARE = 0.875  # of the byte budget: beyond it no group gets more than what is generated here
_BYTES_PER_TOKEN = 64  # about, of the index

_Key = tuple[str, Hashable]  # what identifies a group, and its value
_Result = TypeVar("_Result")


@dataclasses.dataclass
class _Group:
    handle: int
    prompt: Int32Array
    history_key: bytes
    num_live: int = 0


@dataclasses.dataclass(frozen=True)
class Member:
    """An open sequence of a group."""

    sequence: int
    key: _Key
    after_prompt: bool  # its text in the index is what comes after the group's prompt


class Groups:
    """The groups and sequences of an index within its byte budget, and the history they begin with.

    What a full index gives up is decided here alone, by `with_room` and then `left_out`; the history of a
    group that opens gives way to all else.
    """

    def __init__(self, index: SuffixIndex, history: History) -> None:
        self._index = index
        self._history = history
        self._backlog = Backlog(index)
        self._groups: dict[_Key, _Group] = {}
        # The groups without live requests, which may be closed; the one that has been idle longest first.
        self._idle: OrderedDict[_Key, None] = OrderedDict()

    def add(
        self, prompt: Int32Array, group: Hashable | None, num_group_tokens: int | None = None
    ) -> Member | None:
        """A new sequence in a group, by default that of the exact prompt; None where no memory is left, or
        where the prompt holds what no text can.

        Args:
            prompt: int32 [num_prompt_tokens], the request's.
            group: names the group.
            num_group_tokens: how many of them are the group's prompt, by default all. The rest is text of
                this sequence: what it said before it was interrupted, or earlier turns.
        """
        key: _Key = ("group", group) if group is not None else ("prompt", prompt.tobytes())
        try:
            opened = self._groups.get(key) or self._open_group(key, prompt[:num_group_tokens])
            after_prompt = np.array_equal(prompt[: len(opened.prompt)], opened.prompt)
            sequence = self._index.open_sequence(opened.handle, after_prompt=after_prompt)
        except NativeError:
            return None
        opened.num_live += 1
        self._idle.pop(key, None)
        return Member(sequence, key, after_prompt)

    def remove(self, member: Member, *, remember: bool = True) -> None:
        """Its text stays in its group until the group is closed, and in the history if to be remembered."""
        if remember:
            self.remember(member)
        self._index.close_sequence(member.sequence)
        group = self._groups[member.key]
        group.num_live -= 1
        if group.num_live == 0:
            self._idle[member.key] = None
            self._close_idle(len(self._idle) - MAX_IDLE_GROUPS)

    def remember(self, member: Member) -> None:
        """Keep its text in the history."""
        if self._history.num_responses and member.after_prompt:
            self._history.add(self._groups[member.key].history_key, self._index.text(member.sequence))

    def clear(self) -> None:
        """Close every group and sequence."""
        self._index.clear()
        self._backlog.clear()
        self._groups.clear()
        self._idle.clear()

    def index_backlog(self, num_rows: int) -> None:
        """Index what one step may of the prompts that are long and of the responses of the history."""
        num_tokens = _BACKLOG_TOKENS + num_rows * _BACKLOG_TOKENS_PER_ROW
        try:
            num_tokens = self.with_room(lambda: self._backlog.index_prompts(num_tokens))
        except NativeError:
            self._backlog.drop_prompt()
            return
        with contextlib.suppress(NativeError):
            self._backlog.index(num_tokens)

    def with_room(self, call: Callable[[], _Result]) -> _Result:
        """What the call on the index returns. While the index is full it is tried again with fewer idle
        groups: those that have been idle longest go. A try costs as much as a step, so each time twice as
        many do.

        Raises:
            NativeError: the call's, where nothing is idle, or it wants no room.
        """
        num_closed = 1
        while True:
            try:
                return call()
            except (BudgetExceeded, OutOfMemory):
                if not self._close_idle(num_closed):
                    raise
            num_closed *= 2

    def left_out(self, error: NativeError, levels: Int32Array) -> int:
        """Which of the rows, at these levels, goes where `with_room` finds none: the one that the error
        names; the longest where all together are too much.

        Raises:
            NativeError: the error, where it is no row's.
        """
        if error.row < 0 and not isinstance(error, BudgetExceeded):
            raise error
        return error.row if error.row >= 0 else int(np.argmax(levels))

    def _open_group(self, key: _Key, prompt: Int32Array) -> _Group:
        num_indexed = min(len(prompt), MAX_TOKENS_AT_ONCE)
        handle = self.with_room(lambda: self._index.open_group(prompt, num_indexed))
        kind, name = key
        history_key = group_key(name) if kind == "group" else prompt_key(prompt)
        self._groups[key] = group = _Group(handle, prompt.copy(), history_key)
        self._idle[key] = None
        if num_indexed < len(prompt):
            self._backlog.add_prompt(handle, group.prompt)
        self._index_later(group, self._history.get(history_key))
        return group

    def _index_later(self, group: _Group, responses: Sequence[Int32Array]) -> None:
        # A full index does without them rather than without what is generated here.
        num_tokens = sum(len(response) for response in responses) + self._backlog.num_tokens
        num_bytes = self._index.stats().num_bytes + num_tokens * _BYTES_PER_TOKEN
        if responses and num_bytes <= _BACKLOG_SHARE * self._index.max_bytes:
            self._backlog.add(group.handle, len(group.prompt), responses)

    def _close_idle(self, num: int) -> bool:
        """Close up to `num` idle groups; False if none was closed."""
        closed = list(islice(self._idle, max(0, num)))
        for key in closed:
            del self._idle[key]
            handle = self._groups.pop(key).handle
            self._backlog.drop(handle)
            self._index.close_group(handle)
        return bool(closed)
