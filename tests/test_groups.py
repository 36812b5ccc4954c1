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

    def end(self, member, row):
        self.say(member, row)
        self.groups.park(member, remember=True)

    def is_open(self, member):
        try:
            self.index.text(member.sequence)
        except UnknownId:
            return False
        return True

    def park(self, row, **names):
        member = self.add(PROMPT, **names)
        self.end(member, row)
        return member


@pytest.fixture
def rows():
    with SuffixIndex(num_speculative_tokens=4) as index:
        yield Rows(index, History(4, 1 << 20))


def of_sample(name="sample"):
    return {"group": "group", "num_group_tokens": len(PROMPT), "sample": name}


def test_a_sample_goes_on_in_its_sequence(rows):
    text = [*PROMPT, 30, 31]
    first = rows.park(text, **of_sample())
    for num_resumed in (1, 2):
        again = rows.add([*text, 40], **of_sample())
        assert again is first and rows.groups.num_resumed == num_resumed
        rows.end(again, [*text, 40])
    assert not rows.history.get(group_key("group"))
    rows.groups.end_samples(["sample"])
    assert [one.tolist() for one in rows.history.get(group_key("group"))] == [[30, 31, 40]]


def test_samples_of_one_name_in_two_groups_are_two(rows):
    first = rows.park([*PROMPT, 30], group="a", sample=0)
    second = rows.add([7, 8], group="b", sample=0)
    rows.end(second, [7, 8, 40])
    assert rows.is_open(first) and second.group is not first.group
    assert rows.add([7, 8, 40], group="b", sample=0) is second
    rows.groups.end_samples([0])
    assert [one.tolist() for one in rows.history.get(group_key("a"))] == [[30]]


def test_a_turn_that_has_nothing_of_its_samples_text_does_not_go_on(rows):
    first = rows.park([*PROMPT, 30, 31], **of_sample())
    assert rows.add([*PROMPT, 50, 51], **of_sample()) is first and rows.groups.num_resumed == 0


def test_an_aborted_request_goes_on_though_its_sender_lacks_its_last_tokens(rows):
    first = rows.park([*PROMPT, 30, 31, 32], **of_sample())
    assert rows.add([*PROMPT, 30], **of_sample()) is first and rows.groups.num_resumed == 1


def test_a_group_without_room_at_first_gets_its_history_when_there_is_some(rows, monkeypatch):
    for token in (30, 31, 32):
        rows.history.add(group_key("group"), int32(token))
    full = BudgetExceeded("full")
    with monkeypatch.context() as patch:
        patch.setattr(rows.index, "open_sequence", Mock(side_effect=full))
        assert rows.add(PROMPT, group="group") is None
    added = Mock(side_effect=[None, full])
    monkeypatch.setattr(rows.index, "add_text", added)
    assert rows.add(PROMPT, group="group") is not None
    assert [call.args[1].tolist() for call in added.call_args_list] == [[32], [31]]
    assert rows.groups.num_texts_left_out == 1, "beside the one that the index counts"
    assert rows.add(PROMPT, group="group") is not None and added.call_count == 2


def test_a_sample_whose_prompt_is_another_goes_on_elsewhere(rows):
    """What it has said so far is kept then."""
    first = rows.park([*PROMPT, 30, 31], **of_sample())
    other = rows.add([9, 9, *PROMPT], **of_sample())
    assert other is not first and not other.after_prompt and rows.groups.num_resumed == 0
    assert [one.tolist() for one in rows.history.get(group_key("group"))] == [[30, 31]]
    rows.end(other, [9, 9, *PROMPT, 50])
    assert rows.index.text(other.sequence).tolist() == [9, 9, *PROMPT, 50]
    assert rows.add([9, 9, *PROMPT, 50], **of_sample()) is other, "its text is not what comes after a prompt"


@pytest.mark.parametrize("long_ends_first", [False, True])
def test_of_two_requests_of_a_sample_the_longer_is_kept(rows, long_ends_first):
    long, short = (rows.add(PROMPT, **of_sample()) for _ in range(2))
    texts = [(long, [*PROMPT, 30, 31, 32]), (short, [*PROMPT, 40])]
    for member, text in texts if long_ends_first else texts[::-1]:
        rows.end(member, text)
    assert rows.is_open(long) and not rows.is_open(short)
    assert rows.add([*PROMPT, 30, 31, 32], **of_sample()) is long


def test_without_a_name_the_longest_text_that_a_prompt_begins_with_goes_on(rows):
    """Whether the group's prompt is the request's or has a name; not one of another name."""
    short, long, apart = ([*PROMPT, *range(30, n)] for n in (32, 34, 36))
    of_long, of_short = rows.park(long), rows.park(short)
    of_group = rows.park(apart, group="group")
    assert rows.add([*apart, 50]) is of_long
    assert rows.add(short) is of_short
    assert rows.add([*apart, 50], group="other") not in (of_long, of_short, of_group)
    assert rows.add([*apart, 50], group="group") is of_group
    odd = rows.add([9, 9], group="group")  # which does not begin with the group's prompt
    rows.end(odd, [9, 9, 50])
    assert rows.add([9, 9, 50], group="group") is odd
    assert rows.groups.num_resumed == 4


def test_a_text_that_is_shorter_than_what_is_compared_first_is_found(rows):
    member = rows.add([1])
    rows.end(member, [1, 2])
    assert rows.add([3, 2, 5]) is not member
    assert rows.add([1, 2, 5]) is member


def test_too_many_without_a_name_lose_the_one_that_waits_longest(rows, monkeypatch):
    """One text is parked once."""
    monkeypatch.setattr(groups_module, "MAX_UNNAMED", 2)
    texts = [[*PROMPT, 30 + i] for i in range(3)]
    one, twice = rows.park(texts[0]), [rows.add(PROMPT), rows.add(PROMPT)]
    for member in twice:
        rows.end(member, texts[1])
    assert [rows.is_open(each) for each in (one, *twice)] == [True, False, True]
    last = rows.park(texts[2])
    assert [rows.is_open(each) for each in (one, twice[1], last)] == [False, True, True]
    assert [rows.add(text) for text in texts[1:]] == [twice[1], last]


def test_responses_for_which_an_index_has_no_room_are_counted(monkeypatch):
    monkeypatch.setattr(groups_module, "_HISTORY_SHARE", 0.0)
    with SuffixIndex(num_speculative_tokens=4) as index:
        history = History(4, 1 << 20)
        for name in ("a", "b"):
            for token in (1, 2):
                history.add(group_key(name), np.full(3, token, np.int32))
        rows = Rows(index, history)
        for name in ("a", "b"):
            rows.add(PROMPT, group=name)
        assert rows.groups.num_texts_left_out == 4


def test_what_is_parked_in_a_group_that_leaves_a_full_index_is_remembered():
    with SuffixIndex(num_speculative_tokens=4, max_bytes=1 << 20) as index:
        rows = Rows(index, History(4, 1 << 20))
        first = rows.park([*PROMPT, 30, 31], **of_sample())
        for begin in range(100, 16_100, 400):
            prompt = range(begin, begin + 400)
            last = rows.add(prompt)
            rows.end(last, prompt)
        assert rows.add(prompt) is last
        assert [one.tolist() for one in rows.history.get(group_key("group"))] == [[30, 31]]
        assert rows.add([*PROMPT, 30, 31], **of_sample()) is not first
