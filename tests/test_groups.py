"""Where a sample's next request goes on: sequences that are parked, found by name or by their text."""

import dataclasses
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_spec.config import SpecConfig
from rollout_spec.drafting import groups as groups_module
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.groups import Groups
from rollout_spec.drafting.history import History, group_key, sample_key
from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, InvalidArgument
from rollout_spec.metrics import EngineCounters
from tests.native.checks import check_index
from tests.oracle import group_of, num_alike
from tests.text import int32, merged, speak

PROMPT = list(range(20))


class Rows:
    """Requests one after the other, each of which says its text in one step and ends."""

    def __init__(self, index, history):
        self.index, self.history, self.counters = index, history, EngineCounters()
        self.groups = Groups(index, history, self.counters)

    def add(self, prompt, group=None, num_group_tokens=None, sample=None):
        return self.groups.add(int32(*prompt), group, num_group_tokens, sample)

    def say(self, sequence, row):
        no = int32(0)
        return self.index.index_and_draft(int32(sequence.handle), int32(*row)[None], no, int32(len(row)), no)

    def end(self, sequence, row):
        self.say(sequence, row)
        self.groups.park(sequence, is_aborted=False)
        return sequence

    def index_all(self):
        while self.groups.has_waiting or self.index.has_unindexed:
            self.index.catch_up()
            self.groups.hand_on_next_text()


@pytest.fixture
def rows():
    return Rows(SuffixIndex(num_speculative_tokens=4), History(4, 1 << 20))


OF_SAMPLE = {"group": "group", "num_group_tokens": len(PROMPT), "sample": "sample"}


def test_what_others_bring_to_a_group_that_stays_is_indexed_when_it_is_asked_again(rows):
    """Each text once."""
    for number in range(3):
        rows.history.add(group_key("group"), int32(30 + number))
    runs = rows.end(rows.add(PROMPT, **OF_SAMPLE), [*PROMPT, 40])
    rows.index_all()
    assert rows.index.stats().num_tokens == 20 + 4 and rows.counters.num_resumed == 0
    rows.history.add(group_key("group"), int32(50, 51))
    assert rows.add([*PROMPT, 40, 7], **OF_SAMPLE) is runs and rows.counters.num_resumed == 1
    rows.index_all()
    assert rows.index.stats().num_tokens == 20 + 4 + 2


def test_a_group_without_room_gets_its_history_when_there_is_some(rows, monkeypatch):
    for token in (30, 31, 32):
        rows.history.add(group_key("group"), int32(token))
    full = BudgetExceeded("full")
    with monkeypatch.context() as patch:
        patch.setattr(rows.index, "open_sequence", Mock(side_effect=full))
        assert rows.add(PROMPT, group="group") is None
    added = Mock(side_effect=[None, full, None])
    monkeypatch.setattr(rows.index, "add_text", added)
    sequence = rows.add(PROMPT, group="group")
    rows.index_all()
    assert [call.args[1].tolist() for call in added.call_args_list] == [[32], [31], [30]]
    rows.end(sequence, [*PROMPT, 40])
    added.side_effect = None
    rows.add(PROMPT, group="group")
    rows.index_all()
    assert [call.args[1].tolist() for call in added.call_args_list[3:]] == [[31]]


def test_a_text_that_goes_on_is_kept_once_and_what_a_branch_leaves_is_handed_on(rows):
    """With a name and without."""
    for number, sample in enumerate((None, "sample")):
        row, key = [*PROMPT, number, 30, 31], group_key(number)
        first = rows.end(rows.add(PROMPT, number, 20, sample), row)
        assert rows.end(rows.add([*row, 5], number, 20, sample), [*row, 5, 32]) is first
        assert [text.tolist() for text in rows.history.get(key)] == [[number, 30, 31, 5, 32]]
        list(rows.history.take_new())
        assert (rows.add([*row, 6], number, 20, sample) is first) == (sample is not None)
        taken = merged(*rows.history.take_new()).get(key)
        assert [text.tolist() for text in taken] == [[number, 30, 31, 5, 32]] * (sample is not None)


def test_a_group_stays_whose_texts_are_all_kept(rows):
    """However short they are, in a new training step."""
    first = rows.end(rows.add(PROMPT, **OF_SAMPLE), [*PROMPT, 30])
    rows.history.training_step += 1
    assert rows.add([*PROMPT, 50], "group", len(PROMPT), "another").group is first.group


@pytest.mark.parametrize("names", [{}, OF_SAMPLE], ids=["without a name", "of a sample"])
def test_of_too_many_places_the_one_that_waits_longest_is_lost(rows, monkeypatch, names):
    monkeypatch.setattr(groups_module, "MAX_PARKED", 2)
    members = [rows.end(rows.add(PROMPT, **names), [*PROMPT, 30 + i]) for i in range(3)]
    with pytest.raises(InvalidArgument):
        rows.index.text(members[0].handle)
    assert [rows.add([*PROMPT, 30 + i], **names) for i in (1, 2)] == members[1:]


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_is_indexed_leaves_room_for_what_runs(has_ended):
    index = SuffixIndex(num_speculative_tokens=4, max_bytes=1 << 20)
    rows = Rows(index, History(400, 1 << 20))
    rng = np.random.default_rng(0)
    for _ in range(400):
        rows.history.add(group_key("group"), rng.integers(0, 500, 100).astype(np.int32))
    sequence = rows.add(PROMPT, group="group")
    rows.index_all()
    full = index.stats()
    assert full.num_texts_left_out > 100 and full.num_bytes < (1 << 20) * 0.9
    rows.say(sequence, [*PROMPT, *rng.integers(0, 500, 300).tolist()])
    rows.index_all()
    assert index.stats().num_tokens == full.num_tokens + 300, "nothing had to be forgotten for it"
    sequence.has_ended = has_ended
    rows.groups.park(sequence, is_aborted=False)
    assert index.stats().num_groups == 0, "to be indexed again with what was left out"
    assert rows.add(PROMPT, group="group") is not sequence


class WatchedIndex(SuffixIndex):
    """It notes which groups have left it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.left = []

    def given_up(self):
        given_up = super().given_up()
        self.left += given_up
        return given_up

    def close_group(self, group):
        super().close_group(group)
        self.left.append(group)


@pytest.mark.parametrize("is_told_early", [True, False])
def test_a_sample_goes_on_where_it_was_until_it_has_ended(is_told_early):
    """Its turns are requests; the prompt after an abort may lack the last tokens. The end is told while a
    request runs, or after it."""
    text = speak(np.random.default_rng(0), 400)
    drafter = Drafter(SpecConfig(batch_threshold=8, history=4))

    def num_resumed_after(turn, begin, end):
        drafter.add(turn, text[:begin].copy(), 600, "g", 50, "s")
        drafter.draft([turn], [end - begin], text[None], int32(end))
        ended = {"second": ["another"], "last": ["s"] * is_told_early}
        drafter.end_samples(ended.get(turn, ()))
        drafter.remove(turn, is_aborted=turn == "aborted")
        return drafter.counters.num_resumed

    assert num_resumed_after("aborted", 60, 200) == 0
    assert num_resumed_after("second", 190, 250) == 1
    assert num_resumed_after("last", 250, 300) == 2
    if not is_told_early:
        drafter.end_samples(["s"])
    assert num_resumed_after("of another", 300, 350) == 2
    check_index(drafter.index)
    assert [each.tolist() for each in drafter.history.get(group_key("g"))] == [text[50:350].tolist()]


def test_what_was_interrupted_goes_on_where_it_was_beside_an_earlier_answer_like_it():
    """An agent asks the same again; the second answer is like the first as far as it has come."""
    text = speak(np.random.default_rng(0), 200)
    drafter = Drafter(SpecConfig(batch_threshold=8, history=4))
    for name, begin, end in (("answered", 50, 120), ("interrupted", 50, 80), ("resumed", 80, 120)):
        drafter.add(name, text[:begin].copy(), 600, "g", 50, "s")
        drafter.draft([name], [end - begin], text[None], int32(end))
        drafter.remove(name, is_aborted=name == "interrupted")
    assert drafter.counters.num_resumed == 1
    assert drafter.index.stats().num_tokens == 50 + 70 + 70


def test_a_group_stays_for_what_was_interrupted_in_it():
    """After a weight sync nothing runs in it, most of its text is too old, and another sample comes first."""
    random, prompt = np.random.default_rng(0), np.arange(50, dtype=np.int32)
    drafter = Drafter(SpecConfig(batch_threshold=8, history=1))

    def serve(name, said, num_before=0, is_aborted=False):
        text = np.concatenate([prompt, said])
        drafter.add(name, text[: 50 + num_before].copy(), 600, "g", 50, name[0])
        drafter.draft([name], [len(said) - num_before], text[None], int32(len(text)))
        drafter.remove(name, is_aborted=is_aborted)

    texts = [random.integers(0, 9_000, 60, dtype=np.int32) for _ in range(5)]
    for name, text in zip("abc", texts, strict=False):
        serve(name, text)
    drafter.end_samples("abc")
    serve("s", texts[3][:30], is_aborted=True)
    drafter.note_new_weights()
    serve("n", texts[4])
    serve("s again", texts[3], num_before=30)
    assert drafter.counters.num_resumed == 1


@dataclasses.dataclass(eq=False)
class PackedText:
    """What a sample said after a prompt."""

    prompt: object
    sample: object
    step: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)


class PackedOracle:
    """The packed texts of prompts: of each its samples, by the training step in which they spoke last."""

    def __init__(self, num_samples, max_bytes):
        self.num_samples, self.max_bytes, self.step = num_samples, max_bytes, 0
        self.num_dropped = 0
        self.prompts: dict[object, list[list[PackedText]]] = {}  # that which has changed last is the last

    def texts(self, prompt):
        return [text for sample in self.prompts.get(prompt, ()) for text in sample]

    @property
    def num_bytes(self):
        texts = [text for prompt in self.prompts for text in self.texts(prompt)]
        return 200 * len(self.prompts) + sum(200 + 4 * len(text.tokens) for text in texts)

    def keep(self, text, tokens):
        """It says this now, and takes the place of what its sample said that this begins with."""
        if not tokens or 400 + 4 * len(tokens) > self.max_bytes:
            return
        text.tokens = tokens
        samples, own = self.prompts.pop(text.prompt, []), []
        for sample in [each for each in samples if each[0].sample == text.sample]:
            samples.remove(sample)
            own = [e for e in sample if e is not text and e.tokens != tokens[: len(e.tokens)]]
        samples.append([*own, text])
        samples.sort(key=lambda sample: max(each.step for each in sample))
        self.prompts[text.prompt] = samples[-self.num_samples :]
        while self.num_bytes > self.max_bytes:
            most = max(self.prompts, key=lambda prompt: len(self.prompts[prompt]))
            self.num_dropped += 1
            if left := self.prompts.pop(most)[1:]:
                self.prompts[most] = left


@dataclasses.dataclass(eq=False)
class Chain:
    """Requests of a sample of which each goes on after the one before; `place`: where, in the index."""

    place: object
    key: tuple
    sample: object
    prompt: list[int]
    said: list[int] = dataclasses.field(default_factory=list)
    text: PackedText | None = None
    is_aborted: bool = False

    def num_shared(self, prompt):
        """Of what it said; -1: its prompt is another one."""
        num = len(self.prompt)
        return num_alike(prompt[num:], self.said) if prompt[:num] == self.prompt else -1

    def goes_on_whole(self, prompt):
        """Whether the prompt repeats all that it said; after an abort its sender may lack the end."""
        num_known = len(prompt) - len(self.prompt) if self.is_aborted else len(self.said)
        return self.num_shared(prompt) == min(num_known, len(self.said))


@dataclasses.dataclass
class Indexed:
    """A group of the index, when it was asked for, its packed texts, and all rows that it has."""

    key: tuple
    prompt: list
    step: int
    texts: list = dataclasses.field(default_factory=list)
    rows: set = dataclasses.field(default_factory=set)

    def is_stale(self, packed):
        nums = [(len(text.tokens), text in packed.texts(text.prompt)) for text in self.texts]
        num_old = sum(num for num, is_kept in nums if not is_kept)
        return self.step != packed.step and 4 * num_old > sum(num for num, _ in nums)


NAMES = st.sampled_from([None, "a", "b"])
SAID = st.lists(st.integers(0, 2), max_size=9) | st.lists(st.integers(0, 90), max_size=9)


class GroupsMachine(RuleBasedStateMachine):
    """Turns, branches, retries, other prompts, texts from elsewhere; groups are packed, and come back."""

    @initialize(
        num_samples=st.integers(1, 3),
        packed_bytes=st.sampled_from([1 << 20, 2500, 480]),
        index_bytes=st.sampled_from([0, 0, 142_000]),
    )
    def make(self, num_samples, packed_bytes, index_bytes):
        self.has_budget = index_bytes > 0
        self.index = WatchedIndex(num_speculative_tokens=2, max_bytes=index_bytes)
        self.rows = Rows(self.index, History(num_samples, packed_bytes))
        self.packed = PackedOracle(num_samples, packed_bytes)
        self.indexed = {}  # by handle
        self.running = []  # chains, and the prompts of their requests
        self.parked = []
        self.said = [[]]  # whole rows

    def note_left(self):
        for handle in self.index.left:
            self.indexed.pop(handle, None)
            self.parked = [each for each in self.parked if each.place.group.handle != handle]
        self.index.left.clear()

    def keep(self, chain, tokens, text=None):
        group = chain.place.group
        name = object() if chain.sample is None else sample_key(chain.sample)
        text = text or PackedText(group.history_key, name)
        text.step = self.packed.step
        self.packed.keep(text, tokens)
        if text not in self.indexed[group.handle].texts:
            self.indexed[group.handle].texts.append(text)
        return text

    def expected(self, prompt, key, sample):
        """The chain that the request goes on with."""
        fits = [each for each in self.parked if each.sample == sample and each.num_shared(prompt) >= 0]
        fits = [each for each in fits if each.key == key or each.key[0] == key[0] == "prompt"]
        if sample is None:
            fits = [each for each in fits if each.num_shared(prompt) == len(each.said)]
        # What was interrupted before what was not, and the shortest first.
        fits.sort(key=lambda each: (not each.is_aborted, len(each.said)))
        best = max(fits, key=lambda each: each.num_shared(prompt), default=None)
        return best if best and (best.num_shared(prompt) or best.goes_on_whole(prompt)) else None

    @rule(data=st.data(), group=NAMES, sample=NAMES, num_group_tokens=st.sampled_from([2, 2, 5]))
    def ask(self, data, group, sample, num_group_tokens):
        row = data.draw(st.sampled_from(self.said[-4:]))
        num_repeated = data.draw(st.sampled_from([len(row), max(0, len(row) - 2)]) | st.integers(0, len(row)))
        prompt = [*row[:num_repeated], *data.draw(st.just([]) | SAID)]
        key = ("prompt", tuple(prompt)) if group is None else ("group", group)
        self.rows.groups.end_samples([])  # it learns what has left
        self.note_left()
        chain, num_resumed = self.expected(prompt, key, sample), self.rows.counters.num_resumed
        busy = {each.place.group.handle for each, _ in self.running}
        idle = [handle for handle, at in self.indexed.items() if at.key == key and handle not in busy]
        waiting = {each.place.group.handle for each in self.parked if each.is_aborted and each.sample}
        idle_for_good = [handle for handle in idle if chain is None and handle not in waiting]
        stale = [handle for handle in idle_for_good if self.indexed[handle].is_stale(self.packed)]
        sequence = self.rows.add(prompt, group, num_group_tokens, sample)
        assert self.has_budget or (sequence is not None and self.index.left == stale)
        self.note_left()
        if sequence is None:
            return
        handle = sequence.group.handle
        if chain is None:
            assert sequence not in [each.place for each in (*self.parked, *dict(self.running))]
            at = self.indexed.setdefault(handle, Indexed(key, prompt[:num_group_tokens], self.packed.step))
            if prompt[: len(at.prompt)] != at.prompt:
                at.prompt = prompt[:num_group_tokens]
            at.rows.add(tuple(at.prompt))
            at.step = self.packed.step if handle in idle else at.step
            chain = Chain(sequence, key, sample, sequence.prompt.tolist())
            assert chain.prompt == at.prompt or self.has_budget
        else:
            assert sequence is chain.place
            num_resumed += chain.goes_on_whole(prompt)
            self.parked.remove(chain)
            if not chain.goes_on_whole(prompt):
                self.keep(chain, chain.said[max(0, chain.num_shared(prompt) - 8) :])
        assert self.rows.counters.num_resumed == num_resumed
        at = self.indexed[handle]
        if handle not in busy:
            new = [text for text in self.packed.texts(sequence.group.history_key) if text not in at.texts]
            at.texts += new
            at.rows |= {(*at.prompt, *text.tokens) for text in new}
        self.running.append((chain, prompt))
        if data.draw(st.booleans()):
            self.agrees()
            self.answer(data)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data):
        chain, prompt = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        is_aborted, has_ended = data.draw(st.booleans()), data.draw(st.sampled_from([False, False, True]))
        row, sequence = [*prompt, *data.draw(SAID)], chain.place
        if self.rows.say(sequence, row).num_dropped:
            assert self.has_budget
            self.rows.groups.drop(sequence)
            return
        sequence.has_ended = has_ended
        self.rows.groups.park(sequence, is_aborted=is_aborted)
        self.said.append(row)
        chain.said, chain.is_aborted = row[len(chain.prompt) :], is_aborted
        chain.text = self.keep(chain, chain.said, chain.text)
        self.indexed[sequence.group.handle].rows.add(tuple(row))
        self.parked += [chain] * (not has_ended)
        self.note_left()

    @rule(sample=NAMES)
    def end_sample(self, sample):
        self.rows.groups.end_samples([sample])
        self.parked = [each for each in self.parked if each.sample != sample]

    @rule(group=NAMES, sample=NAMES, later=st.integers(-1, 1), said=SAID)
    def others_bring(self, group, sample, later, said):
        text = PackedText(group_key(group), sample_key(sample), self.packed.step + later)
        self.packed.keep(text, said)
        other = History(1, 1 << 20)
        other.training_step = text.step
        other.add(text.prompt, int32(*said), text.sample)
        for piece in other.take_new():
            self.rows.history.merge(piece)

    @rule()
    def next_training_step(self):
        self.packed.step = self.rows.history.training_step = self.packed.step + 1

    @rule()
    def hand_on_next_text(self):
        self.rows.groups.hand_on_next_text()

    @invariant()
    def agrees(self):
        if not hasattr(self, "rows"):
            return
        if not self.has_budget:
            self.rows.index_all()
            num_states = sum(group_of(at.rows).num_states for at in self.indexed.values())
            assert self.index.stats().num_states == num_states
        check_index(self.index)
        history, packed = self.rows.history, self.packed
        assert (len(history._texts), history.num_bytes) == (len(packed.prompts), packed.num_bytes)
        assert history.take_num_dropped() == packed.num_dropped
        packed.num_dropped = 0
        for prompt in packed.prompts:
            kept = [text.tolist() for text in history.get(prompt)]
            assert kept == [text.tokens for text in packed.texts(prompt)]


TestGroupsMachine = GroupsMachine.TestCase
TestGroupsMachine.settings = settings(max_examples=150, stateful_step_count=40)
