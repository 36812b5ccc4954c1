"""Where a sample's next request goes on: sequences that are parked, found by name or by their text."""

from unittest.mock import Mock

import numpy as np
import pytest

from rollout_spec.drafting import groups as groups_module
from rollout_spec.drafting.groups import Groups
from rollout_spec.drafting.history import History, group_key
from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, UnknownId
from tests.text import int32

PROMPT = list(range(20))


class Rows:
    """Requests one after the other, each of which says its text in one step and ends."""

    def __init__(self, index, history):
        self.index, self.history, self.groups = index, history, Groups(index, history)

    def add(self, prompt, group=None, num_group_tokens=None, sample=None):
        return self.groups.add(int32(*prompt), group, num_group_tokens, sample)

    def say(self, member, row):
        none = int32(0)
        self.index.index_and_draft(int32(member.sequence), int32(*row)[None], none, int32(len(row)), none)

    def end(self, member, row, is_aborted=False):
        self.say(member, row)
        self.groups.park(member, is_aborted=is_aborted)

    def is_open(self, member):
        try:
            self.index.text(member.sequence)
        except UnknownId:
            return False
        return True

    def park(self, row, is_aborted=False, **names):
        member = self.add(PROMPT, **names)
        self.end(member, row, is_aborted)
        return member

    def index_all(self):
        while self.groups.has_waiting or self.index.has_behind:
            self.index.catch_up()
            self.groups.index_next()

    def kept(self, group="group"):
        return [text.tolist() for text in self.history.get(group_key(group))]


@pytest.fixture
def rows():
    with SuffixIndex(num_speculative_tokens=4) as index:
        yield Rows(index, History(4, 1 << 20))


def of_sample(name="sample"):
    return {"group": "group", "num_group_tokens": len(PROMPT), "sample": name}


def test_a_sample_goes_on_in_its_sequence(rows):
    """The history has what it says when it is said, and once."""
    text = [*PROMPT, 30, 31]
    first = rows.park(text, **of_sample())
    assert rows.kept() == [[30, 31]]
    for num_resumed in (1, 2):
        again = rows.add([*text, 40], **of_sample())
        assert again is first and rows.groups.num_resumed == num_resumed
        rows.end(again, [*text, 40])
    rows.groups.end_samples(["sample"])
    assert not rows.is_open(first) and rows.kept() == [[30, 31, 40]]


def test_a_sample_that_ends_while_its_request_runs_keeps_no_place(rows):
    member = rows.add(PROMPT, **of_sample())
    member.has_ended = True
    rows.end(member, [*PROMPT, 30])
    assert not rows.is_open(member) and rows.kept() == [[30]]


def test_samples_of_one_name_in_two_groups_are_two(rows):
    first = rows.park([*PROMPT, 30], group="a", sample=0)
    second = rows.add([7, 8], group="b", sample=0)
    rows.end(second, [7, 8, 40])
    assert rows.is_open(first) and second.group is not first.group
    assert rows.add([7, 8, 40], group="b", sample=0) is second
    rows.end(second, [7, 8, 40])
    rows.groups.end_samples([0])
    assert not rows.is_open(first) and not rows.is_open(second)
    assert rows.kept("a") == [[30]] and rows.kept("b") == [[40]]


def test_an_aborted_request_goes_on_though_its_sender_lacks_its_last_tokens(rows):
    """Of a request that has ended, what another one does not repeat stays a text."""
    text = [*PROMPT, 30, 31, 32]
    ended = rows.park(text, **of_sample("ended"))
    assert rows.add(text[:-2], **of_sample("ended")) is ended and rows.groups.num_resumed == 0
    rows.end(ended, [*text[:-2], 40])
    assert rows.kept() == [[30, 31, 32], [30, 40]]
    aborted = rows.park(text, is_aborted=True, **of_sample("aborted"))
    assert rows.add(text[:-2], **of_sample("aborted")) is aborted and rows.groups.num_resumed == 1


@pytest.mark.parametrize("at_once", [False, True])
def test_branches_and_retries_are_texts_of_their_own(rows, at_once):
    """Calls with one prompt, one after the other or at once; then the rest of a turn that is said again."""
    texts = [[*PROMPT, token, token + 1, token + 2] for token in (30, 40, 50)]
    if at_once:
        members = [rows.add(PROMPT, **of_sample()) for _ in texts]
        for member, text in zip(members, texts, strict=True):
            rows.end(member, text)
    else:
        members = [rows.park(text, **of_sample()) for text in texts]
    assert rows.groups.num_resumed == 0 and len({member.sequence for member in members}) == 3
    branch = rows.add([*texts[1][:-1], 60], **of_sample())
    assert branch is members[1] and rows.groups.num_resumed == 0
    rows.end(branch, [*texts[1][:-1], 60, 61])
    assert rows.kept() == [*(texts[i][20:] for i in (0, 2, 1)), [40, 41, 60, 61]]
    assert rows.add([*texts[2], 7], **of_sample()) is members[2] and rows.groups.num_resumed == 1


def test_what_a_template_takes_out_of_a_prompt_stays_a_text(rows):
    thought, answer, asked = [30, 31, 32], [33, 34], [40, 41]
    rows.park([*PROMPT, *thought, *answer], **of_sample())
    prompt = [*PROMPT, *answer, *asked]
    second = rows.add(prompt, **of_sample())
    rows.end(second, [*prompt, 50])
    third = rows.add([*prompt, 50, 7], **of_sample())
    assert third is second and rows.groups.num_resumed == 1
    rows.end(third, [*prompt, 50, 7, 8])
    assert rows.kept() == [[*thought, *answer], [*answer, *asked, 50, 7, 8]]


def test_a_group_gets_another_prompt(rows):
    """A date has changed, or a sample asks something beside: what runs stays after its own prompt."""
    first, other = rows.add(PROMPT, **of_sample("a")), [9, *PROMPT[1:]]
    second = rows.add(other, **of_sample("b"))
    rows.end(second, [*other, 40, 41])
    rows.end(first, [*PROMPT, 30, 31])
    rows.index.catch_up()
    assert rows.kept() == [[40, 41], [30, 31]] and first.group is second.group
    assert rows.index.stats().num_tokens == 2 * 20 + 4
    third = rows.add(other, **of_sample("c"))
    rows.say(third, [*other, 40])
    assert rows.index.stats().num_tokens == 2 * 20 + 5, "its prompt is there"
    assert rows.add([*PROMPT, 30, 31, 7], **of_sample("a")) is first
    assert rows.add([*other, 40, 41], **of_sample("b")) is second
    rows.index.validate()


def test_what_others_bring_to_a_group_that_stays_is_indexed_when_it_is_asked_again(rows):
    """Each text once, the latest first."""
    for number in range(3):
        rows.history.add(group_key("group"), int32(30 + number))
    runs = rows.park([*PROMPT, 40], **of_sample())
    rows.index_all()
    assert rows.index.stats().num_tokens == 20 + 4 and rows.groups.num_resumed == 0
    other = History(4, 1 << 20)
    other.add(group_key("group"), int32(50, 51))
    for piece in other.take_new():
        rows.history.merge(piece)
    assert rows.add([*PROMPT, 40, 7], **of_sample()) is runs
    rows.index_all()
    assert rows.index.stats().num_tokens == 20 + 4 + 2


def test_a_group_without_room_gets_its_history_when_there_is_some(rows, monkeypatch):
    for token in (30, 31, 32):
        rows.history.add(group_key("group"), int32(token))
    full = BudgetExceeded("full")
    with monkeypatch.context() as patch:
        patch.setattr(rows.index, "open_sequence", Mock(side_effect=full))
        assert rows.add(PROMPT, group="group") is None
    added = Mock(side_effect=[None, full])
    monkeypatch.setattr(rows.index, "add_text", added)
    member = rows.add(PROMPT, group="group")
    rows.index_all()
    assert [call.args[1].tolist() for call in added.call_args_list] == [[32], [31]]
    assert rows.groups.num_texts_left_out == 1, "beside the one that the index counts"
    rows.end(member, [*PROMPT, 40])
    added.side_effect = None
    rows.add(PROMPT, group="group")
    rows.index_all()
    assert [call.args[1].tolist() for call in added.call_args_list[2:]] == [[31], [30]]


def test_texts_that_are_too_old_leave_an_indexed_group():
    """Not those of this training step, however many."""
    with SuffixIndex(num_speculative_tokens=4) as index:
        rows = Rows(index, History(2, 1 << 20))
        for step in range(3):
            for number in range(4):
                member = rows.add(PROMPT, **of_sample((step, number)))
                rows.index_all()
                rows.end(member, [*PROMPT, 100 * step + 30 + number])
            rows.groups.end_samples([(step, number) for number in range(4)])
            rows.index_all()
            # Of the step before the two that are kept.
            assert index.stats().num_tokens == 20 + 4 + 2 * (step > 0)
            rows.history.step += 1
        assert rows.kept() == [[232], [233]]


def test_without_a_name_the_longest_text_that_a_prompt_begins_with_goes_on(rows):
    """Whether the group's prompt is the request's or has a name; not one of another name."""
    short, long, apart = ([*PROMPT, *range(30, n)] for n in (32, 34, 36))
    of_long, of_short = rows.park(long), rows.park(short)
    of_group = rows.park(apart, group="group")
    assert rows.add([*apart, 50]) is of_long
    assert rows.add(short) is of_short
    assert rows.add([*apart, 50], group="other") not in (of_long, of_short, of_group)
    assert rows.add([*apart, 50], group="group") is of_group
    odd = rows.add([9, 9], group="group")  # another prompt of the group
    rows.end(odd, [9, 9, 50])
    assert rows.add([9, 9, 50], group="group") is odd
    assert rows.groups.num_resumed == 4


def test_a_text_that_is_shorter_than_what_is_compared_first_is_found(rows):
    member = rows.add([1])
    rows.end(member, [1, 2])
    assert rows.add([3, 2, 5]) is not member
    assert rows.add([1, 2, 5]) is member


@pytest.mark.parametrize("names", [{}, of_sample()], ids=["without a name", "of a sample"])
def test_of_too_many_places_the_one_that_waits_longest_is_lost(rows, monkeypatch, names):
    monkeypatch.setattr(groups_module, "MAX_PARKED", 2)
    members = [rows.park([*PROMPT, 30 + i], **names) for i in range(3)]
    assert [rows.is_open(member) for member in members] == [False, True, True]
    assert [rows.add([*PROMPT, 30 + i], **names) for i in (1, 2)] == members[1:]


def test_what_is_parked_in_a_group_that_leaves_a_full_index_is_packed():
    """The sample's next turn begins in the group that is indexed again."""
    with SuffixIndex(num_speculative_tokens=4, max_bytes=1 << 20) as index:
        rows = Rows(index, History(4, 1 << 20))
        first = rows.park([*PROMPT, 30, 31], **of_sample())
        for begin in range(100, 16_100, 400):
            prompt = range(begin, begin + 400)
            last = rows.add(prompt)
            rows.end(last, prompt)
        assert rows.add(prompt) is last
        assert rows.kept() == [[30, 31]]
        again = rows.add([*PROMPT, 30, 31, 7], **of_sample())
        assert again is not first and rows.groups.num_resumed == 1
        rows.index_all()
        rows.end(again, [*PROMPT, 30, 31, 7, 8])
        assert rows.kept() == [[30, 31, 7, 8]]
        rows.groups.end_samples(["sample"])
        rows.index.validate()


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_is_indexed_leaves_room_for_what_runs(has_ended):
    with SuffixIndex(num_speculative_tokens=4, max_bytes=1 << 20) as index:
        rows = Rows(index, History(400, 1 << 20))
        rng = np.random.default_rng(0)
        for _ in range(400):
            rows.history.add(group_key("group"), rng.integers(0, 500, 100).astype(np.int32))
        member = rows.add(PROMPT, group="group")
        rows.index_all()
        full = index.stats()
        assert full.num_texts_left_out > 100 and full.num_bytes < (1 << 20) * 0.9
        row = [*PROMPT, *rng.integers(0, 500, 300).tolist()]
        rows.say(member, row)
        rows.index_all()
        assert index.stats().num_tokens == full.num_tokens + 300, "nothing had to be forgotten for it"
        member.has_ended = has_ended
        rows.groups.park(member, is_aborted=False)
        assert index.stats().num_groups == 0, "to be indexed again with what was left out"
        assert rows.add(PROMPT, group="group") is not member


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_in_a_full_index(seed):
    """Turns, branches, aborted ones, ends, other prompts: what was said is kept, and no call fails."""
    rng = np.random.default_rng(seed)
    with SuffixIndex(num_speculative_tokens=2, max_bytes=170_000 + 20_000 * seed) as index:
        rows = Rows(index, History(6, 1 << 20))
        running, before, num_dropped = [], {}, 0
        for number in range(1500):
            name = (int(rng.integers(0, 8)), int(rng.integers(0, 12)))
            if rng.random() < 0.5 or not running:
                text = list(before.get(name, [name[0], *range(3)]))
                kept = len(text) if rng.random() < 0.6 else int(rng.integers(0, len(text) + 1))
                prompt = [*text[:kept], *rng.integers(0, 40, rng.integers(0, 60)).tolist()]
                sample = None if rng.random() < 0.2 else name
                member = rows.add(prompt, group=name[0], num_group_tokens=4, sample=sample)
                running += [(member, name, prompt)] * (member is not None)
            else:
                member, name, prompt = running.pop(int(rng.integers(0, len(running))))
                row = [*prompt, *rng.integers(0, 40, rng.integers(1, 80)).tolist()]
                none = int32(0)
                step = index.index_and_draft(
                    int32(member.sequence), int32(*row)[None], none, int32(len(row)), none
                )
                if step.num_dropped:
                    num_dropped += 1
                    rows.groups.drop(member)
                    continue
                before[name] = row
                rows.groups.park(member, is_aborted=rng.random() < 0.2)
                assert row[len(member.prompt) :] in rows.kept(name[0])
            if rng.random() < 0.3:
                rows.groups.index_next()
            if rng.random() < 0.2:
                rows.groups.end_samples([name])
            rows.history.step += rng.random() < 0.01
            if number % 20 == 0:
                index.validate()
        for member, *_ in running:
            rows.groups.park(member, is_aborted=False)
        index.validate()
        assert index.stats().num_sequences == 0 < num_dropped
