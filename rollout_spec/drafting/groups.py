"""The groups of an index: whom a request belongs to, and the history that a group begins with."""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Any

import numpy as np

from rollout_spec.drafting.history import History, group_key, prompt_key
from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, Int32Array, OutOfMemory

_HISTORY_SHARE = 0.875  # of the byte budget: beyond it no group gets more than what is generated here
_BYTES_PER_TOKEN = 64  # about, of the index

MAX_UNNAMED = 256  # parked sequences that are found by their text alone
_TAIL = 8  # tokens at its end by which a text is looked for

_Key = tuple[str, Hashable]  # what identifies a group, and its value
SampleName = tuple[Hashable | None, Hashable]  # of its group, if that has one, and its own in there


@dataclasses.dataclass(eq=False)
class _Group:
    handle: int
    key: _Key
    prompt: Int32Array
    history_key: bytes
    has_history: bool = False  # it was asked for its earlier responses


@dataclasses.dataclass(eq=False)
class Member:
    """A sequence of a group: a request, or between two requests what their sample has said so far."""

    sequence: int
    group: _Group
    after_prompt: bool  # its text in the index is what comes after the group's prompt
    sample: SampleName | None  # None: what it says is remembered when its request has ended


class Groups:
    """The groups and sequences of an index, and the history they begin with.

    When a request has ended, its sequence is parked: the sample's next request goes on there. It is closed
    when the sample has said all, when too many without a name are parked, or with its group. What leaves a
    full index is decided in native/: idle groups, then text that nobody goes on with, then what does not fit.
    """

    def __init__(self, index: SuffixIndex, history: History) -> None:
        self._index = index
        self._history = history
        self._groups: dict[_Key, _Group] = {}
        self._keys: dict[int, _Key] = {}  # of the groups, by their handles
        self.num_resumed = 0  # requests that went on where their sample's text ended
        self.num_texts_left_out = 0  # responses of the history, for which there was no memory
        self._parked: dict[SampleName, Member] = {}
        # Those without, by the number and the last of all their tokens; the one parked last is the last.
        self._unnamed: OrderedDict[tuple[int, bytes], Member] = OrderedDict()

    def add(
        self,
        prompt: Int32Array,
        group: Hashable | None,
        num_group_tokens: int | None,
        sample: Hashable | None,
    ) -> Member | None:
        """The sequence of a request; None where no memory is left, or the prompt holds what no text can.

        The arguments are those of `Drafter.add`.
        """
        if prompt.min(initial=0) < 0:
            return None
        key: _Key = ("group", group) if group is not None else ("prompt", prompt.tobytes())
        self._forget_given_up()
        name = None if sample is None else (group, sample)
        member = self._take_by_text(prompt, key) if name is None else self._parked.pop(name, None)
        if member is not None:
            if not member.after_prompt or _begins_with(prompt, member.group.prompt):
                said = self._whole_text(member)
                if _begins_with(prompt, said[: len(prompt)]):  # after an abort its sender may lack the last
                    self.num_resumed += 1
                self._index.resume_sequence(member.sequence)
                return member
            self._close(member)
        try:
            found = self._groups.get(key) or self._open(key, prompt[:num_group_tokens])
            after_prompt = _begins_with(prompt, found.prompt)
            sequence = self._index.open_sequence(found.handle, after_prompt=after_prompt)
        except (BudgetExceeded, OutOfMemory):
            return None
        if not found.has_history:
            self._add_history(found)
        return Member(sequence, found, after_prompt, name)

    def park(self, member: Member, *, remember: bool) -> None:
        """Its request has ended; the sample may go on. `remember`: without a name its text is kept now."""
        self._index.park_sequence(member.sequence)
        name = member.sample
        if name is None:
            if remember:
                self._remember(member)
            self._park_unnamed(member)
            return
        other = self._parked.get(name)  # the sample had two requests at a time
        if other is not None:
            other, member = sorted((other, member), key=lambda each: len(self._index.text(each.sequence)))
            self._index.close_sequence(other.sequence)
        self._parked[name] = member

    def _park_unnamed(self, member: Member) -> None:
        text = self._whole_text(member)
        place = len(text), text[-_TAIL:].tobytes()
        replaced = self._unnamed.pop(place, None)
        self._unnamed[place] = member
        if replaced is None and len(self._unnamed) > MAX_UNNAMED:
            _, replaced = self._unnamed.popitem(last=False)
        if replaced is not None:
            self._close(replaced)

    def end_samples(self, samples: Collection[Hashable]) -> None:
        """Samples of these names, in whatever group, have said all: the history keeps the parked ones."""
        for name in [name for name in self._parked if name[1] in samples]:
            self._close(self._parked.pop(name))

    def _close(self, member: Member) -> None:
        """Nothing goes on after a parked sequence any more; without a name it is remembered already."""
        if member.sample is not None:
            self._remember(member)
        self._index.close_sequence(member.sequence)

    def _remember(self, member: Member) -> None:
        """Keep its text in the history."""
        if self._history.num_responses and member.after_prompt:
            self._history.add(member.group.history_key, self._index.text(member.sequence))

    def _whole_text(self, member: Member) -> Int32Array:
        text = self._index.text(member.sequence)
        return np.concatenate([member.group.prompt, text]) if member.after_prompt else text

    def _take_by_text(self, prompt: Int32Array, key: _Key) -> Member | None:
        """One without a name that the prompt begins with, the longest text first."""
        places = [
            place
            for place, member in self._unnamed.items()
            if place[0] <= len(prompt)
            and prompt[max(0, place[0] - _TAIL) : place[0]].tobytes() == place[1]
            and (member.group.key == key or member.group.key[0] == key[0] == "prompt")
        ]
        for place in sorted(places, reverse=True):
            if _begins_with(prompt, self._whole_text(self._unnamed[place])):
                return self._unnamed.pop(place)
        return None

    def _open(self, key: _Key, prompt: Int32Array) -> _Group:
        handle = self._index.open_group(prompt)
        self._forget_given_up()
        kind, name = key
        history_key = group_key(name) if kind == "group" else prompt_key(prompt)
        self._groups[key] = found = _Group(handle, key, prompt.copy(), history_key)
        self._keys[handle] = key
        return found

    def _forget_given_up(self) -> None:
        for handle in self._index.given_up():
            group = self._groups.pop(self._keys.pop(handle))
            both: list[dict[Any, Member]] = [self._parked, self._unnamed]
            for parked in both:
                for name in [name for name, member in parked.items() if member.group is group]:
                    self._close(parked.pop(name))

    def _add_history(self, group: _Group) -> None:
        """The latest first: of continuations that are equally frequent the one that came first is drafted."""
        group.has_history = True
        responses = self._history.get(group.history_key)
        if not responses:
            return
        # A full index does without them rather than without what is generated here.
        stats = self._index.stats()
        num_tokens = stats.num_tokens_behind + sum(map(len, responses))
        most = _HISTORY_SHARE * (self._index.max_bytes or math.inf)
        if stats.num_bytes + num_tokens * _BYTES_PER_TOKEN <= most:
            for number, response in enumerate(reversed(responses), 1):
                try:
                    self._index.add_text(group.handle, response)
                except (BudgetExceeded, OutOfMemory):  # which the index counts
                    self.num_texts_left_out += len(responses) - number
                    return
        else:
            self.num_texts_left_out += len(responses)


def _begins_with(prompt: Int32Array, text: Int32Array) -> bool:
    return np.array_equal(prompt[: len(text)], text)
