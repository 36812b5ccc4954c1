"""The groups of an index: after which text a request goes on, and which of a prompt's texts are indexed."""

import contextlib
import dataclasses
from collections import defaultdict, deque
from collections.abc import Collection, Hashable

import numpy as np

from rollout_spec.drafting.history import History, Text, group_key, prompt_key, sample_key
from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, Int32Array, OutOfMemory
from rollout_spec.metrics import EngineCounters

MAX_PARKED = 256  # sequences of one sample, or of all that have no name
_CONTEXT = 8  # tokens before a text that is cut off from another, by which it is found
_STALE_SHARE = 0.25  # of a group's text, which is too old to be kept: then the rest is indexed anew

_Key = tuple[str, Hashable]  # what identifies a group, and its value


@dataclasses.dataclass(eq=False)
class _Group:
    """One that is indexed. Of all others there are the history's texts alone."""

    handle: int
    key: _Key
    prompt: Int32Array  # after which new requests begin
    history_key: bytes
    training_step: int  # in which it was asked for last
    texts: set[Text] = dataclasses.field(default_factory=set)  # that are in the index
    running: set["GroupSequence"] = dataclasses.field(default_factory=set)
    parked: set["GroupSequence"] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class GroupSequence:
    """A sequence of a group: requests of which each goes on after the one before."""

    handle: int
    group: _Group
    sample: Hashable | None  # the name of what it belongs to
    prompt: Int32Array  # of the group, after which it begins
    said: Int32Array  # when its last request ended
    text: Text | None = None  # of the history
    is_aborted: bool = False  # that request was
    has_ended: bool = False  # the sample has

    def num_shared(self, prompt: Int32Array) -> int:
        """How many of the tokens that it said this prompt has after the group's; -1: that is another."""
        own = prompt[len(self.prompt) :]
        num = min(len(own), len(self.said))
        if not np.array_equal(prompt[: len(self.prompt)], self.prompt):
            return -1
        return int(np.append(own[:num] == self.said[:num], False).argmin())

    def num_to_repeat(self, prompt: Int32Array) -> int:
        """How many a prompt has that repeats all; after an abort its sender may lack the last ones."""
        return min(len(self.said), len(prompt) - len(self.prompt)) if self.is_aborted else len(self.said)


class Groups:
    """The groups and sequences of an index, and the history that they are indexed from.

    When a request has ended the history has its text, and its sequence is parked: the sample's next request
    goes on there. It is closed when the sample has said all, when too many are parked, or with its group.
    Calls of the index, also the drafter's, may give up groups in which nothing runs (native/ decides which):
    all but `text` and the close of what is parked. So every method first forgets those that were. After such
    a call of its own it names nothing idle or parked to the index; only `_find` has to, and forgets again.
    """

    def __init__(self, index: SuffixIndex, history: History, counters: EngineCounters) -> None:
        self._index = index
        self._history = history
        self._counters = counters
        self._groups: dict[_Key, _Group] = {}
        self._by_handle: dict[int, _Group] = {}
        self._waiting: deque[tuple[_Group, list[Text]]] = deque()  # to be indexed, the last text first
        # By the sample's name, None: those without; the one parked last is the last.
        self._parked: defaultdict[Hashable | None, list[GroupSequence]] = defaultdict(list)

    def add(
        self,
        prompt: Int32Array,
        group: Hashable | None,
        num_group_tokens: int | None,
        sample: Hashable | None,
    ) -> GroupSequence | None:
        """The sequence of a request; None where no memory is left, or the prompt has negative tokens.

        The arguments are those of `Drafter.add`.
        """
        self._forget_given_up()
        if prompt.min(initial=0) < 0:
            return None
        key: _Key = ("group", group) if group is not None else ("prompt", prompt.tobytes())
        try:
            sequence = self._resume_parked(prompt, key, sample)
            if sequence is None:
                found = self._find(key, prompt, prompt[:num_group_tokens])
                handle = self._index.open_sequence(found.handle)
                sequence = GroupSequence(handle, found, sample, found.prompt, prompt[:0])
        except (BudgetExceeded, OutOfMemory):
            return None
        entered = sequence.group
        if not entered.running:
            texts = self._history.texts(entered.history_key)
            self._waiting.append((entered, [text for text in texts if text not in entered.texts]))
        entered.running.add(sequence)
        return sequence

    def _resume_parked(self, prompt: Int32Array, key: _Key, sample: Hashable | None) -> GroupSequence | None:
        """The parked sequence after which the request goes on. What the prompt does not repeat of it stays a
        text of its own. None: there is none."""
        overlaps = self._overlaps(prompt, key, sample)
        if not overlaps:
            return None
        # Of equal ones what was interrupted, else the shortest: it has least that the prompt does not repeat.
        sequence = max(overlaps, key=lambda each: (overlaps[each], each.is_aborted, -len(each.said)))
        num = overlaps[sequence]
        is_all = num == sequence.num_to_repeat(prompt)
        if num == 0 and not is_all:
            return None
        self._index.resume_sequence(sequence.handle)
        self._unpark(sequence)
        self._counters.num_resumed += is_all
        if not is_all:
            self._remember(sequence, sequence.said[max(0, num - _CONTEXT) :])
        return sequence

    def _overlaps(self, prompt: Int32Array, key: _Key, sample: Hashable | None) -> dict[GroupSequence, int]:
        """The sample's parked sequences that the prompt goes on after, with how much of what each said: in
        the group, or in any where prompts identify groups. Without a sample's name it must repeat all."""
        parked = self._parked.get(sample, ())
        fit = [each for each in parked if each.group.key == key or each.group.key[0] == key[0] == "prompt"]
        nums = {each: each.num_shared(prompt) for each in fit}
        return {each: num for each, num in nums.items() if num >= (len(each.said) if sample is None else 0)}

    def _find(self, key: _Key, prompt: Int32Array, group_prompt: Int32Array) -> _Group:
        """The group, with a prompt that this one begins with: its own or, from now on, `group_prompt`."""
        found = self._groups.get(key)
        if found is not None and not found.running and self._is_stale(found):
            self._index.close_group(found.handle)
            self._forget(found)
        elif found is not None and not np.array_equal(prompt[: len(found.prompt)], found.prompt):
            self._index.set_prompt(found.handle, group_prompt)
            found.prompt = group_prompt.copy()
            self._forget_given_up()  # the group perhaps: its prompt may have taken the room of its other text
        found = self._groups.get(key)
        if found is None:
            handle = self._index.open_group(group_prompt)
            history_key = group_key(key[1]) if key[0] == "group" else prompt_key(group_prompt)
            found = _Group(handle, key, group_prompt.copy(), history_key, self._history.training_step)
            self._groups[key] = self._by_handle[handle] = found
        return found

    def _is_stale(self, group: _Group) -> bool:
        """Whether it is asked for in a new training step, and too much of it is too old to be kept. Not while
        a sample waits in it that was interrupted; one without a name may never come back."""
        before, group.training_step = group.training_step, self._history.training_step
        waits = any(each.is_aborted and each.sample is not None for each in group.parked)
        if waits or before == group.training_step:
            return False
        nums_old = [0 if self._history.keeps(text) else len(text.tokens) for text in group.texts]
        return sum(nums_old) > _STALE_SHARE * sum(len(text.tokens) for text in group.texts)

    @property
    def has_waiting(self) -> bool:
        """Whether there are texts of the history for `hand_on_next_text`."""
        return bool(self._waiting)

    def hand_on_next_text(self) -> None:
        """Give the index one of the texts that wait, if any: the last of each group, then those before."""
        self._forget_given_up()
        while self._waiting:
            group, texts = self._waiting.popleft()
            if not texts or self._groups.get(group.key) is not group:
                continue
            # Of equally frequent continuations the one that came first is drafted: so the latest first.
            text = texts.pop()
            self._waiting.append((group, texts))
            if self._history.keeps(text) and text not in group.texts:
                with contextlib.suppress(BudgetExceeded, OutOfMemory):  # the index counts it
                    self._index.add_text(group.handle, text.tokens)
                    group.texts.add(text)
            return

    def park(self, sequence: GroupSequence, *, is_aborted: bool) -> None:
        """Its request has ended; the sample may go on."""
        self._forget_given_up()
        group, said = sequence.group, self._index.text(sequence.handle)
        sequence.text = self._remember(sequence, said, sequence.text, is_cut=is_aborted)
        sequence.said, sequence.is_aborted = said, is_aborted
        group.running.remove(sequence)
        if sequence.has_ended:
            self._index.close_sequence(sequence.handle)
            return
        if len(self._parked[sequence.sample]) == MAX_PARKED:
            self._close(self._parked[sequence.sample][0])
        self._index.park_sequence(sequence.handle)  # a group that lacks a text is given up perhaps
        group.parked.add(sequence)
        self._parked[sequence.sample].append(sequence)

    def _remember(
        self, sequence: GroupSequence, said: Int32Array, text: Text | None = None, *, is_cut: bool = False
    ) -> Text:
        """Have the history keep what is indexed already."""
        name = None if sequence.sample is None else sample_key(sequence.sample)
        text = self._history.add(sequence.group.history_key, said, name, text, is_cut=is_cut)
        sequence.group.texts.add(text)
        return text

    def drop(self, sequence: GroupSequence) -> None:
        """The index has closed its sequence in a step."""
        self._forget_given_up()
        sequence.group.running.remove(sequence)

    def end_samples(self, samples: Collection[Hashable]) -> None:
        """Samples of these names, in whatever group, have said all: nothing goes on after what is parked."""
        self._forget_given_up()
        names = set(samples)
        for group in self._groups.values():
            for sequence in group.running:
                sequence.has_ended |= sequence.sample in names
        for sequence in [each for name in names for each in self._parked.get(name, ())]:
            self._close(sequence)

    def _close(self, sequence: GroupSequence) -> None:
        self._unpark(sequence)
        self._index.close_sequence(sequence.handle)

    def _unpark(self, sequence: GroupSequence) -> None:
        parked = self._parked[sequence.sample]
        parked.remove(sequence)
        if not parked:
            del self._parked[sequence.sample]
        sequence.group.parked.remove(sequence)

    def _forget_given_up(self) -> None:
        for handle in self._index.take_given_up():
            self._forget(self._by_handle[handle])

    def _forget(self, group: _Group) -> None:
        """It is packed now: nothing of it is indexed, and what it said is in the history."""
        del self._groups[group.key], self._by_handle[group.handle]
        for sequence in list(group.parked):
            self._unpark(sequence)
