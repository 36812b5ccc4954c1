"""The groups of an index: whom a request belongs to, and the history that a group begins with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable

import numpy as np

from rollout_spec.drafting.history import History, group_key, prompt_key
from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, Int32Array, OutOfMemory

# Siblings that wait in the engine's queue find their group's text here when they start.
# Few are enough: the samples of a prompt arrive together and are served in order.
MAX_IDLE_GROUPS = 32

# Tokens that are indexed at once, about a millisecond: of a prompt, and in a step of rows that are behind.
MAX_TOKENS_AT_ONCE = 4096

_HISTORY_SHARE = 0.875  # of the byte budget: beyond it no group gets more than what is generated here
_BYTES_PER_TOKEN = 64  # about, of the index

_Key = tuple[str, Hashable]  # what identifies a group, and its value


@dataclasses.dataclass
class _Group:
    handle: int
    prompt: Int32Array
    history_key: bytes


@dataclasses.dataclass(frozen=True)
class Member:
    """An open sequence of a group."""

    sequence: int
    after_prompt: bool  # its text in the index is what comes after the group's prompt
    history_key: bytes  # of the group


class Groups:
    """The groups and sequences of an index, and the history they begin with.

    Which groups and rows leave a full index is decided there (native/memory.c): idle groups, then what does
    not fit.
    """

    def __init__(self, index: SuffixIndex, history: History) -> None:
        self._index = index
        self._history = history
        self._groups: dict[_Key, _Group] = {}
        self._keys: dict[int, _Key] = {}  # of the groups, by their handles

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
        if prompt.min(initial=0) < 0:
            return None
        key: _Key = ("group", group) if group is not None else ("prompt", prompt.tobytes())
        self._forget_given_up()
        is_new = key not in self._groups
        try:
            found = self._open(key, prompt[:num_group_tokens]) if is_new else self._groups[key]
            after_prompt = np.array_equal(prompt[: len(found.prompt)], found.prompt)
            sequence = self._index.open_sequence(found.handle, after_prompt=after_prompt)
        except (BudgetExceeded, OutOfMemory):
            return None
        if is_new:
            self._add_history(found)
        return Member(sequence, after_prompt, found.history_key)

    def remove(self, member: Member, *, remember: bool = True) -> None:
        """Its text stays in its group until the group is closed, and in the history if to be remembered."""
        if remember:
            self.remember(member)
        self._index.close_sequence(member.sequence)

    def remember(self, member: Member) -> None:
        """Keep its text in the history."""
        if self._history.num_responses and member.after_prompt:
            self._history.add(member.history_key, self._index.text(member.sequence))

    def clear(self) -> None:
        """Close every group and sequence."""
        self._index.clear()
        self._groups.clear()
        self._keys.clear()

    def _open(self, key: _Key, prompt: Int32Array) -> _Group:
        handle = self._index.open_group(prompt, MAX_TOKENS_AT_ONCE)
        self._forget_given_up()
        kind, name = key
        history_key = group_key(name) if kind == "group" else prompt_key(prompt)
        self._groups[key] = found = _Group(handle, prompt.copy(), history_key)
        self._keys[handle] = key
        return found

    def _forget_given_up(self) -> None:
        for handle in self._index.given_up():
            del self._groups[self._keys.pop(handle)]

    def _add_history(self, group: _Group) -> None:
        """The latest first: of continuations that are equally frequent the one that came first is drafted."""
        responses = self._history.get(group.history_key)
        if not responses:
            return
        # A full index does without them rather than without what is generated here.
        stats = self._index.stats()
        num_tokens = stats.num_waiting_tokens + sum(map(len, responses))
        if stats.num_bytes + num_tokens * _BYTES_PER_TOKEN <= _HISTORY_SHARE * self._index.max_bytes:
            with contextlib.suppress(BudgetExceeded, OutOfMemory):
                for response in reversed(responses):
                    self._index.add_text(group.handle, response)
