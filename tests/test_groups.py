"""Where a sample's next request goes on: sequences that are parked, found by name or by their text."""

import inspect
from unittest.mock import Mock

import numpy as np
import pytest

from rollout_spec.config import SpecConfig
from rollout_spec.drafting import groups as groups_module
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.history import History, group_key
from rollout_spec.drafting.index import SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, InvalidArgument
from tests.native.checks import check_index
from tests.text import Rows, int32, merged, speak

PROMPT = list(range(20))


@pytest.fixture
def rows():
    return Rows(SuffixIndex(num_speculative_tokens=4), History(4, 1 << 20))


OF_SAMPLE = {"group": "group", "num_group_tokens": len(PROMPT), "sample": "sample"}


def test_every_method_first_forgets_what_the_index_has_given_up():
    kind = groups_module.Groups
    methods = [each for name, each in vars(kind).items() if inspect.isfunction(each) and name[0] != "_"]
    for method in methods:
        index = Mock(take_given_up=Mock(side_effect=InterruptedError))
        others = dict.fromkeys([*inspect.signature(method).parameters][1:], Mock())
        with pytest.raises(InterruptedError):
            method(kind(index, Mock(), Mock()), **others)
        assert len(index.mock_calls) == 1


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
    rows.groups.end_samples([None] * has_ended)
    rows.groups.park(sequence, is_aborted=False)
    assert index.stats().num_groups == 0, "to be indexed again with what was left out"
    assert rows.add(PROMPT, group="group") is not sequence


def serve(drafter, text, begin, end, sample="s", is_aborted=False, ends=()):
    """A request that says a part of a text, whose first 50 tokens are its group's prompt. While it runs other
    samples end, or its own."""
    drafter.add("r", text[:begin].copy(), 600, "g", 50, sample)
    drafter.draft(["r"], [end - begin], text[None], int32(end))
    drafter.end_samples(ends)
    drafter.remove("r", is_aborted=is_aborted)
    return drafter.counters.num_resumed


@pytest.mark.parametrize("is_told_early", [True, False])
def test_a_sample_goes_on_where_it_was_until_it_has_ended(is_told_early):
    """Its turns are requests; the prompt after an abort may lack the last tokens. The end is told while a
    request runs, or after it."""
    text = speak(np.random.default_rng(0), 400)
    drafter = Drafter(SpecConfig(batch_threshold=8, history=4))
    assert serve(drafter, text, 60, 200, is_aborted=True) == 0
    assert serve(drafter, text, 190, 250, ends=["another"]) == 1
    assert serve(drafter, text, 250, 300, ends=["s"] * is_told_early) == 2
    if not is_told_early:
        drafter.end_samples(["s"])
    assert serve(drafter, text, 300, 350) == 2
    check_index(drafter.index)
    assert [each.tolist() for each in drafter.history.get(group_key("g"))] == [text[50:350].tolist()]


@pytest.mark.parametrize(("first", "second", "is_cut"), [(120, 80, True), (80, 120, True), (120, 80, False)])
def test_of_two_answers_alike_what_was_interrupted_goes_on_or_else_the_shorter(first, second, is_cut):
    """An agent asks the same again; the second answer is like the first as far as it has come."""
    text = speak(np.random.default_rng(0), 200)
    drafter = Drafter(SpecConfig(batch_threshold=8, history=4))
    serve(drafter, text, 50, first)
    serve(drafter, text, 50, second, is_aborted=is_cut)
    assert serve(drafter, text, 80, 120) == 1
    assert drafter.index.stats().num_tokens == 50 + (first - 50) + 70


@pytest.mark.parametrize(("sample", "is_aborted"), [("s", True), ("s", False), (None, True)])
def test_a_group_stays_for_what_was_interrupted_in_it(sample, is_aborted):
    """After a weight sync nothing runs in it, most of its text is too old, and another sample comes first.
    One without a name may never come back."""
    random, prompt = np.random.default_rng(0), np.arange(50, dtype=np.int32)
    drafter = Drafter(SpecConfig(batch_threshold=8, history=1))
    texts = [np.append(prompt, random.integers(0, 9_000, 60, dtype=np.int32)) for _ in range(5)]
    for ended, text in zip("abc", texts, strict=False):
        serve(drafter, text, 50, 110, ended)
    drafter.end_samples("abc")
    serve(drafter, texts[3], 50, 80, sample, is_aborted)
    drafter.note_new_weights()
    serve(drafter, texts[4], 50, 110, "another")
    assert serve(drafter, texts[3], 80, 110, sample) == (sample is not None and is_aborted)


def test_a_prompt_that_takes_the_room_of_its_groups_text_gets_a_group_all_the_same():
    rows = Rows(SuffixIndex(num_speculative_tokens=4, max_bytes=1 << 21), History(4, 1 << 20))
    said = list(range(50, 20_000))
    rows.end(rows.add(PROMPT, group="group", num_group_tokens=len(PROMPT)), [*PROMPT, *said])
    rows.index_all()
    prompt = range(1, 150_000)
    sequence = rows.add([*prompt], group="group", num_group_tokens=len(prompt))
    assert sequence is not None
    np.testing.assert_array_equal(sequence.prompt, prompt)
    check_index(rows.index)
