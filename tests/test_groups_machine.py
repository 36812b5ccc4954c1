"""Groups beside an oracle: each request goes on where it should, and what should be kept is."""

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_spec.drafting.history import History, group_key, sample_key
from rollout_spec.drafting.index import SuffixIndex
from tests.native.checks import check_index
from tests.oracle import group_of, num_alike
from tests.text import Rows, int32


class WatchedIndex(SuffixIndex):
    """It notes which groups have left it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.left = []

    def take_given_up(self):
        self.left += (given_up := super().take_given_up())
        return given_up

    def close_group(self, group):
        super().close_group(group)
        self.left.append(group)


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
    has_ended: bool = False

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
        is_aborted, row, sequence = data.draw(st.booleans()), [*prompt, *data.draw(SAID)], chain.place
        if self.rows.say(sequence, row).dropped:
            assert self.has_budget
            self.rows.groups.drop(sequence)
            return
        self.rows.groups.park(sequence, is_aborted=is_aborted)
        self.said.append(row)
        chain.said, chain.is_aborted = row[len(chain.prompt) :], is_aborted
        chain.text = self.keep(chain, chain.said, chain.text)
        self.indexed[sequence.group.handle].rows.add(tuple(row))
        self.parked += [chain] * (not chain.has_ended)
        self.note_left()

    @rule(sample=NAMES)
    def end_sample(self, sample):
        self.rows.groups.end_samples([sample])
        self.parked = [each for each in self.parked if each.sample != sample]
        for chain, _ in self.running:
            chain.has_ended |= chain.sample == sample

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
