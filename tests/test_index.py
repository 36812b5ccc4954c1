"""The Python side of the native index: errors name their argument and change nothing, memory comes back."""

import functools
import re
import subprocess
import sys

import numpy as np
import pytest

from rollout_spec.config import SpecConfig
from rollout_spec.drafting import index as index_module
from rollout_spec.drafting.drafts import ModelDrafts
from rollout_spec.drafting.index import SuffixIndex, make_index
from rollout_spec.drafting.native import BudgetExceeded, InvalidArgument, OutOfMemory
from rollout_spec.drafting.native import lib as native_lib
from tests.native.checks import check_index
from tests.text import int32


@pytest.fixture
def index():
    return SuffixIndex(num_speculative_tokens=4)


@pytest.fixture
def arguments(index):
    """A valid call of step: two sequences after the prompt 5 6 7, not in the order of their rows."""
    group = index.open_group(int32(5, 6, 7))
    return {
        "sequences": int32(index.open_sequence(group), index.open_sequence(group)),
        "token_ids": np.array([[0, 0, 0, 0, 0, 0], [5, 6, 7, 5, 6, 7], [5, 6, 7, 5, 9, 9]], np.int32),
        "rows": int32(2, 1),
        "levels": int32(4, 5),
        "max_draft_tokens": int32(4, 4),
    }


ints, singles = (functools.partial(np.zeros, dtype=kind) for kind in (np.int32, np.float32))


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
    assert result.num_draft_tokens.tolist() == [0, 4] and result.dropped == [0]
    assert result.draft_tokens[1].tolist() == [7, 5, 6, 7]
    check_index(index)
    assert index.stats()[1:2] + index.stats()[3:4] == (1, 3 + 2)
    with pytest.raises(InvalidArgument, match=r"^sequences\[0\]=1: unknown"):
        index.index_and_draft(**arguments)
    assert index.open_sequence(0) == 1


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        (r"sequences\[1\]=7: unknown", int32(1, 7), InvalidArgument),
        ("sequences", int32(0, -1), InvalidArgument),
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
            (message, ModelDrafts(ints(tokens), singles(log_odds)), InvalidArgument)
            for tokens, log_odds, message in (
                (6, 6, r"model_drafts: has the shapes \(6"),
                ((3, 2), (3, 1), r"model_drafts: has the shapes \(3, 2\) and \(3, 1"),
                ((3, 5), (3, 5), "num_model_tokens=5: must be between 0 and 4"),
                ((2, 2), (2, 2), r"model_drafts: .* with row 2"),
            )
        ),
    ],
)
def test_step_errors_name_the_argument_and_change_nothing(index, arguments, name, value, error):
    before, argument = index.stats(), re.match(r"\w+", name)[0].replace("num_model_tokens", "model_drafts")
    with pytest.raises(error, match=rf"^{name}\b"):
        index.index_and_draft(**{**arguments, argument: value})
    assert index.stats() == before
    check_index(index)
    no_model = ModelDrafts(ints((3, 0)), singles((3, 0)))
    assert index.index_and_draft(**arguments, model_drafts=no_model).draft_tokens.tolist() == DRAFTS


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_speculative_tokens": 0}, InvalidArgument),
        ({"num_speculative_tokens": 65}, InvalidArgument),
        ({"num_speculative_tokens": 4, "max_bytes": -1}, OverflowError),
    ],
)
def test_options_out_of_range(options, error):
    with pytest.raises(error):
        SuffixIndex(**options)


def test_texts_longer_than_a_state_can_say(index):
    longest = 2**24 - 1
    text = np.zeros((1, longest + 1), np.int32)
    with pytest.raises(InvalidArgument, match=f"^prompt_token_ids: {longest + 1} tokens: out of range"):
        index.open_group(text[0])
    with pytest.raises(InvalidArgument, match=f"^token_ids: {longest + 1} tokens: out of range"):
        index.add_to_corpus(text[0])
    sequence = index.open_sequence(index.open_group(int32()))
    result = index.index_and_draft(int32(sequence), text, int32(0), int32(longest + 1), int32(4))
    assert result.dropped == [0]


@pytest.mark.parametrize(
    ("call", "given", "error", "message"),
    [
        ("open_group", [int32(1, -2)], InvalidArgument, r"prompt_token_ids\[1\]=-2"),
        ("open_group", [[1, 2]], InvalidArgument, "prompt_token_ids"),
        ("add_text", [0, int32(1, -2)], InvalidArgument, r"token_ids\[1\]=-2"),
        ("add_text", [1, int32(1)], InvalidArgument, "group=1"),
        ("open_sequence", [1], InvalidArgument, "group=1"),
        ("close_group", [1], InvalidArgument, "group=1"),
        ("close_group", [0], InvalidArgument, "group=0: 2 of its sequences run"),
        ("close_sequence", [3], InvalidArgument, "sequence=3"),
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


def test_a_full_index_says_so():
    refused = pytest.raises(BudgetExceeded, match=r"^max_bytes=1048576: reached")
    index = make_index(SpecConfig(max_index_mb=1))
    with refused:
        index.open_group(np.zeros(1 << 19, np.int32))
    with pytest.raises(BudgetExceeded, match=r"^max_bytes=1"):
        SuffixIndex(num_speculative_tokens=4, max_bytes=1)


def test_a_module_of_an_older_version_is_told_from_a_broken_one():
    older = "types.SimpleNamespace(ffi=None, lib=types.SimpleNamespace(rs_abi_version=lambda: 4))"
    module = "sys.modules['rollout_spec.drafting._native']"
    script = f"import sys, types; {module} = {older}; import rollout_spec.drafting.index"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "was built from version 4 of its interface, this package needs" in run.stderr.splitlines()[-1]


def test_what_is_parked_gives_way_to_what_runs_and_is_indexed_when_it_runs_again():
    rows = np.random.default_rng(0).integers(0, 500, (2, 12_000)).astype(np.int32)
    rows[1, :2] = rows[0, :2]
    index = SuffixIndex(num_speculative_tokens=4, max_bytes=1 << 20)
    group, nothing = index.open_group(rows[0, :2]), int32(0)
    first, second = index.open_sequence(group), index.open_sequence(group)
    index.index_and_draft(int32(first), rows, int32(0), int32(4_000), nothing)
    index.park_sequence(first)
    for level in range(100, 11_000, 100):
        step = index.index_and_draft(int32(second), rows, int32(1), int32(level), nothing)
    assert not step.dropped and index.stats().num_tokens == level
    check_index(index)
    assert not index.has_unindexed
    index.resume_sequence(first)
    assert index.has_unindexed and index.text(first).tolist() == rows[0, 2:4_000].tolist()
    for sequence in (first, second):
        index.park_sequence(sequence)
    assert index.take_given_up() == [group], "it lacks a text, and is idle"
