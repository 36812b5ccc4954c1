"""The Python side of the native index: errors name their argument and change nothing, memory comes back."""

import re
import subprocess
import sys

import numpy as np
import pytest

from rollout_spec.config import SpecConfig
from rollout_spec.drafting import index as index_module
from rollout_spec.drafting.drafts import ModelDrafts
from rollout_spec.drafting.index import SuffixIndex, make_index
from rollout_spec.drafting.native import BudgetExceeded, InvalidArgument, OutOfMemory, UnknownId
from rollout_spec.drafting.native import lib as native_lib
from tests.text import int32


@pytest.fixture
def index():
    with SuffixIndex(num_speculative_tokens=4) as made:
        yield made


@pytest.fixture
def arguments(index):
    """A valid call of step: two sequences after the prompt 5 6 7, not in the order of their rows."""
    group = index.open_group(int32(5, 6, 7))
    sequences = int32(index.open_sequence(group), index.open_sequence(group))
    return {
        "sequences": sequences,
        "token_ids": np.array([[0, 0, 0, 0, 0, 0], [5, 6, 7, 5, 6, 7], [5, 6, 7, 5, 9, 9]], np.int32),
        "rows": int32(2, 1),
        "levels": int32(4, 5),
        "max_draft_tokens": int32(4, 4),
    }


def ints(*shape):
    return np.zeros(shape, np.int32)


def singles(*shape):
    return np.zeros(shape, np.float32)


def test_a_models_log_odds_count(index, arguments):
    """In ranges of one; beyond the last they all are alike, and so is what is no number with the least."""

    def survival(log_odds):
        model = ModelDrafts(np.full((3, 1), 98, np.int32), np.full((3, 1), log_odds, np.float32))
        result = index.index_and_draft(**arguments, model_drafts=model)
        return float(result.survivals[0, 0]), int(result.draft_tokens[0, 0])

    by_range = [survival(log_odds) for log_odds in range(-4, 8)]
    sure = [s for s, token in by_range if token == 98]
    assert sure == sorted(sure) and len(set(sure)) > 3
    assert survival(-3.01) == survival(-4) == survival(float("-inf")) == survival(float("nan"))
    assert survival(1.99) == survival(1) and survival(7) == survival(99) == survival(float("inf"))


def test_a_models_second_token_is_trusted_apart_from_its_first(index):
    """The first is right in every step, the second never."""
    sequences, text = int32(index.open_sequence(index.open_group(int32()))), np.arange(202, dtype=np.int32)
    for level in range(0, 201, 2):
        model = ModelDrafts(int32(level, 999)[None], np.full((1, 2), 1, np.float32))
        row = sequences, text[None], int32(0), int32(level), int32(2)
        step = index.index_and_draft(*row, model_drafts=model)
    first, both = step.survivals[0, :2]
    assert first > 0.9 and both < 0.3 * first


def test_a_row_that_is_another_text_now_says_nothing_of_what_was_predicted():
    def survivals(num_draft_tokens):
        with SuffixIndex(num_speculative_tokens=4) as index:
            sequences = int32(index.open_sequence(index.open_group(int32(5, 6, 7))))
            rows = ([5, 6, 7, 5, 6, 7, 5], num_draft_tokens), ([5, 6, 7, 8, 8], 0), ([5, 6, 7, 8, 8, 5], 4)
            for row, num in rows:
                text, level = np.array([row], np.int32), int32(len(row))
                step = index.index_and_draft(sequences, text, int32(0), level, int32(num))
            return step.survivals.tolist()

    assert survivals(4) == survivals(0) != [[0.0] * 4]


def test_what_was_indexed_before_a_cut_counts_once(index):
    sequences, one = int32(index.open_sequence(index.open_group(int32()))), np.ones(1, np.int32)
    for row in ([5, 6, 7, 5, 6, 7, 8], [5, 6, 7, 5, 6, 9], [5, 6, 7, 5, 6, 9, 5]):
        index.index_and_draft(sequences, np.array([row], np.int32), int32(0), int32(len(row)), one)
    assert index.stats().num_tokens == 7 + 2


DRAFTS = [[6, 7, 5, 6], [7, 5, 6, 7]]  # of `arguments`


def test_arrays_may_be_changed_in_place_or_exchanged(index, arguments):
    arguments["levels"][:] = 3, 3
    assert index.index_and_draft(**arguments).num_draft_tokens.tolist() == [0, 0]
    arguments["levels"][:] = 4, 5
    wide = np.full((3, 50), -1, np.int32)
    wide[:, 10:16] = arguments["token_ids"]
    for name, value in (("levels", int32(4, 5)), ("rows", int32(2, 1)), ("token_ids", wide[:, 10:16])):
        arguments[name] = value
        assert index.index_and_draft(**arguments).draft_tokens.tolist() == DRAFTS
    arguments["max_draft_tokens"] = int32(4, 1)
    assert index.index_and_draft(**arguments).num_draft_tokens.tolist() == [4, 1]
    arguments["sequences"] = arguments["sequences"][:1].copy()
    with pytest.raises(InvalidArgument, match=r"^rows: has 2 entries, sequences has 1"):
        index.index_and_draft(**arguments)
    arguments |= {name: arguments[name][:1].copy() for name in ("rows", "levels", "max_draft_tokens")}
    assert index.index_and_draft(**arguments).num_draft_tokens.tolist() == [4]


def test_no_matrix_is_none(index, arguments):
    """Not the one of an earlier step either, which may be gone."""
    for step in (lambda: None, lambda: index.index_and_draft(**arguments)):
        step()
        with pytest.raises(InvalidArgument, match=r"^token_ids: must be a two-dimensional int32 array"):
            index.index_and_draft(**arguments | {"token_ids": None})


@pytest.mark.parametrize("level", [2, 7], ids=["below the prompt", "more than there are columns"])
def test_a_row_that_is_no_text_is_dropped_and_the_other_drafts(index, arguments, level):
    result = index.index_and_draft(**arguments | {"levels": int32(level, 5)})
    assert result.num_draft_tokens.tolist() == [-1, 4] and result.num_dropped == 1
    assert result.draft_tokens[1].tolist() == [7, 5, 6, 7]
    index.validate()
    assert index.stats()[1:2] + index.stats()[3:4] == (1, 3 + 2)
    with pytest.raises(UnknownId, match=r"^sequences\[0\]=1: unknown"):
        index.index_and_draft(**arguments)
    assert index.open_sequence(0) == 1


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        (r"sequences\[1\]=7: unknown", int32(1, 7), UnknownId),
        ("sequences", int32(0, -1), UnknownId),
        ("sequences", int32(1, 1), InvalidArgument),
        ("sequences", np.array([0, 1]), InvalidArgument),
        ("sequences", [0, 1], InvalidArgument),
        ("sequences", int32(0, 0, 1, 1)[::2], InvalidArgument),
        (r"rows\[1\]=3: token_ids has 3 rows", int32(2, 3), InvalidArgument),
        ("rows", int32(-1, 1), InvalidArgument),
        ("rows", int32(1), InvalidArgument),
        ("levels", int32(4, 5, 6), InvalidArgument),
        (r"max_draft_tokens\[1\]=-1: must not be negative", int32(4, -1), InvalidArgument),
        ("max_draft_tokens", np.array([4.0, 4.0]), InvalidArgument),
        *(("min_survival", wrong, InvalidArgument) for wrong in (-0.1, float("nan"))),
        ("token_ids", np.zeros((3, 6), np.int64), InvalidArgument),
        ("token_ids", np.zeros(18, np.int32), InvalidArgument),
        ("token_ids", np.zeros((6, 3), np.int32).T, InvalidArgument),
        ("token_ids", np.zeros((3, 6), np.int32)[::-1], InvalidArgument),
        *(
            (rf"model_drafts\.{message}", ModelDrafts(tokens, log_odds), InvalidArgument)
            for tokens, log_odds, message in (
                (np.zeros((3, 2)), singles(3, 2), "tokens: must be a two-dimensional int32 array"),
                (np.zeros(6, np.int32), singles(6), "tokens: must be a two-dimensional int32 array"),
                ([[1]] * 3, singles(3, 1), "tokens: must be a two-dimensional int32 array"),
                (ints(3, 2), np.zeros((3, 2)), "log_odds: must be a two-dimensional float32 array"),
                (ints(3, 2), singles(3, 1), r"log_odds: has the shape \(3, 1\), tokens"),
                (ints(3, 5), singles(3, 5), "tokens: has 5 columns, must have at most 4"),
                (ints(2, 2), singles(2, 2), "tokens: has 2 rows, none for row 2"),
            )
        ),
    ],
)
def test_step_errors_name_the_argument_and_change_nothing(index, arguments, name, value, error):
    before = index.stats()
    with pytest.raises(error, match=rf"^{name}\b"):
        index.index_and_draft(**{**arguments, re.match(r"\w+", name)[0]: value})
    assert index.stats() == before
    index.validate()
    no_model = ModelDrafts(ints(3, 0), singles(3, 0))
    assert index.index_and_draft(**arguments, model_drafts=no_model).draft_tokens.tolist() == DRAFTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_speculative_tokens", value) for value in (0, 65, 2.0, 2**40)),
        *(("max_bytes", value) for value in (-1, 2**64)),
    ],
)
def test_options_out_of_range(name, value):
    with pytest.raises(InvalidArgument, match=f"^{name}="):
        SuffixIndex(**{"num_speculative_tokens": 4, name: value})


def test_texts_longer_than_a_state_can_say(index):
    longest = 2**24 - 1
    text = np.zeros((1, longest + 1), np.int32)
    with pytest.raises(InvalidArgument, match=f"^prompt_token_ids: {longest + 1} tokens: out of range"):
        index.open_group(text[0])
    with pytest.raises(InvalidArgument, match=f"^token_ids: {longest + 1} tokens: out of range"):
        index.add_to_corpus(text[0])
    sequence = index.open_sequence(index.open_group(int32()))
    result = index.index_and_draft(int32(sequence), text, int32(0), int32(longest + 1), int32(4))
    assert result.num_draft_tokens.tolist() == [-1]


@pytest.mark.parametrize(
    ("call", "given", "error", "message"),
    [
        ("open_group", [int32(1, -2)], InvalidArgument, r"prompt_token_ids\[1\]=-2"),
        ("open_group", [[1, 2]], InvalidArgument, "prompt_token_ids"),
        ("add_text", [0, int32(1, -2)], InvalidArgument, r"token_ids\[1\]=-2"),
        ("add_text", [1, int32(1)], UnknownId, "group=1"),
        ("open_sequence", [1], UnknownId, "group=1"),
        ("open_sequence", ["0"], InvalidArgument, "group="),
        ("close_group", [1], UnknownId, "group=1"),
        ("close_group", ["0"], InvalidArgument, "group="),
        ("close_group", [0], InvalidArgument, "group=0: 2 of its sequences run"),
        ("close_sequence", [3], UnknownId, "sequence=3"),
    ],
)
@pytest.mark.usefixtures("arguments")
def test_group_and_sequence_errors(index, call, given, error, message):
    before = index.stats()
    with pytest.raises(error, match=f"^{message}"):
        getattr(index, call)(*given)
    assert index.stats() == before


def test_out_of_memory_has_its_own_exception(index, monkeypatch):
    class FullMemory:
        def rs_group_open(self, *_):
            index._error.message = b"out of memory"
            return native_lib.RS_ENOMEM

        def __getattr__(self, name):
            return getattr(native_lib, name)

    monkeypatch.setattr(index_module, "lib", FullMemory())
    with pytest.raises(OutOfMemory, match="out of memory"):
        index.open_group(int32(1))


def test_the_index_of_a_configuration_has_its_options():
    prompt = np.tile(int32(1, 2, 3, 4), 3)
    with make_index(SpecConfig(num_speculative_tokens=3)) as index:
        sequence = int32(index.open_sequence(index.open_group(prompt)))
        result = index.index_and_draft(sequence, prompt[None], int32(0), int32(len(prompt)), int32(64))
        assert result.num_draft_tokens.tolist() == [3]
    with (
        make_index(SpecConfig(max_index_mb=1)) as index,
        pytest.raises(BudgetExceeded, match=r"^max_bytes=1048576: reached"),
    ):
        index.open_group(np.zeros(1 << 19, np.int32))
    with pytest.raises(BudgetExceeded, match=r"^max_bytes=1"):
        SuffixIndex(num_speculative_tokens=4, max_bytes=1)


def test_a_closed_index_refuses_every_call(index):
    group = index.open_group(int32(1))
    index.close()
    index.close()
    for call in (index.stats, index.validate, lambda: index.open_sequence(group)):
        with pytest.raises(InvalidArgument, match=r"^index: is closed"):
            call()


def test_a_module_of_an_older_version_is_told_from_a_broken_one():
    """It lacks what later versions have."""
    older = "types.SimpleNamespace(ffi=None, lib=types.SimpleNamespace(rs_abi_version=lambda: 4))"
    module = "sys.modules['rollout_spec.drafting._native']"
    script = f"import sys, types; {module} = {older}; import rollout_spec.drafting.index"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "was built from version 4 of its interface, this package needs" in run.stderr.splitlines()[-1]


def test_an_unindexed_row_drafts_nothing(index):
    text, row = np.tile(int32(1, 2, 3), 40), int32(0)
    sequence = int32(index.open_sequence(index.open_group(int32())))
    for level, max_tokens, num_unindexed, num in ((20, 0, 0, 1), (120, 0, 1, 0), (120, 100, 0, 1)):
        step = index.index_and_draft(sequence, text[None], row, int32(level), int32(1), max_tokens=max_tokens)
        assert (step.num_unindexed, step.num_draft_tokens.tolist()) == (num_unindexed, [num])


def test_what_is_unindexed_when_its_sequence_closes_is_still_indexed(index):
    sequence, text = index.open_sequence(index.open_group(int32(1, 2))), np.arange(1, 200, dtype=np.int32)
    nothing = int32(0)
    index.index_and_draft(int32(sequence), text[None], nothing, int32(199), nothing, max_tokens=2)
    assert index.stats().num_tokens == 2
    index.close_sequence(sequence)
    with pytest.raises(UnknownId):
        index.text(sequence)
    index.catch_up()
    assert index.stats().num_tokens == 199


def test_short_rows_are_indexed_before_long_ones_and_these_before_texts(index):
    """In whatever order they came; a group's prompt before what begins after it."""
    prompt, text = int32(1, 2), np.arange(1, 400, dtype=np.int32)
    groups = [index.open_group(prompt) for _ in range(3)]
    index.catch_up()
    index.add_text(groups[0], text[:100])
    sequences = int32(*(index.open_sequence(group) for group in groups[1:]))
    rows, levels = int32(0, 0), int32(399, 150)
    step = index.index_and_draft(sequences, text[None], rows, levels, int32(1, 1), max_tokens=148)
    assert (step.num_unindexed, index.stats().num_tokens) == (1, 6 + 148)
    step = index.index_and_draft(sequences, text[None], rows, levels, int32(1, 1), max_tokens=397)
    assert (step.num_unindexed, index.stats().num_tokens_unindexed) == (0, 100)


def test_what_is_parked_gives_way_to_what_runs_and_is_indexed_when_it_runs_again():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 500, (2, 12_000)).astype(np.int32)
    rows[1, :2] = rows[0, :2]
    with SuffixIndex(num_speculative_tokens=4, max_bytes=1 << 20) as index:
        group, nothing = index.open_group(rows[0, :2]), int32(0)
        first, second = index.open_sequence(group), index.open_sequence(group)
        index.index_and_draft(int32(first), rows, int32(0), int32(4_000), nothing)
        index.park_sequence(first)
        for level in range(100, 11_000, 100):
            step = index.index_and_draft(int32(second), rows, int32(1), int32(level), nothing)
        assert step.num_dropped == 0 and index.stats().num_tokens == level
        index.validate()
        assert not index.has_unindexed
        index.resume_sequence(first)
        assert index.has_unindexed and index.text(first).tolist() == rows[0, 2:4_000].tolist()
        for sequence in (first, second):
            index.park_sequence(sequence)
        assert index.given_up() == [group], "it lacks a text, and is idle"
