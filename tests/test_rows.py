"""Rows of arrays between an engine and the native module: what they take, refuse, and are told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.index import SuffixIndex
from rollout_spec.native import InvalidArgument
from rollout_spec.rows import Heard, Replayed, StepRows
from tests.replays import decoded, policy, rollout


def int32(*values):
    return np.array(values, np.int32)


@given(data=st.data(), num_rows=st.integers(0, 6))
def test_step_rows_take_their_levels_from_the_matrix(data, num_rows):
    numbers = data.draw(st.permutations(range(num_rows + 2)))[:num_rows]
    levels = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 9)
    last_levels = data.draw(st.lists(levels, min_size=num_rows, max_size=num_rows))
    rows = StepRows(int32(*numbers), np.arange(num_rows, dtype=np.int32), int32(*last_levels))
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=num_rows + 2, max_size=num_rows + 2)))
    some = rows.among(kept)
    assert some.sequences.tolist() == [i for i, number in enumerate(numbers) if kept[number]]
    for may_draft in (True, False, True):
        row_levels = data.draw(st.lists(levels, min_size=num_rows + 2, max_size=num_rows + 2))
        for each in (rows, some):
            each.set_levels(int32(*row_levels), may_draft)
            assert each.levels.tolist() == [row_levels[number] for number in each.numbers]
            room = [
                last_levels[i] - level for i, level in zip(each.sequences, each.levels.tolist(), strict=True)
            ]
            expected = [
                max(0, left) if may_draft and level >= 0 else 0
                for left, level in zip(room, each.levels.tolist(), strict=True)
            ]
            assert each.max_draft_tokens.tolist() == expected


def test_step_rows_refuse_arrays_that_do_not_fit():
    for numbers, last_levels, message in (
        (int32(0), int32(9, 9), "numbers: has 1 entries, sequences has 2"),
        (int32(0, 1), int32(9), "last_levels: has 1 entries, sequences has 2"),
        (np.array([0, 1]), int32(9, 9), "numbers: must be a contiguous"),
        (int32(0, -1), int32(9, 9), "numbers: -1 is negative"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            StepRows(numbers, int32(0, 1), last_levels)
    rows = StepRows(int32(0, 2), int32(0, 1), int32(9, 9))
    row_levels = int32(1, 2, 3)
    for _ in range(2):
        for wrong, message in (
            (row_levels[:2], "has 2 entries, too few for row 2"),
            (row_levels[::2], "must be a contiguous"),
            (row_levels.astype(np.int64), "must be a contiguous"),
        ):
            with pytest.raises(InvalidArgument, match=f"^levels: {message}"):
                rows.set_levels(wrong, True)
        rows.set_levels(row_levels, True)
        assert rows.levels.tolist() == [1, 3]
    row_levels[2] = 5  # the same array, changed in place
    rows.set_levels(row_levels, True)
    assert (rows.levels.tolist(), rows.max_draft_tokens.tolist()) == ([1, 5], [8, 4])


@given(
    texts=st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=40), min_size=1, max_size=4),
    known=st.lists(st.integers(0, 12), min_size=0, max_size=20),
    k=st.integers(1, 5),
    factor=st.sampled_from([0.5, 1.0, 4.0]),
    max_steps=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_known_texts_are_decoded_as_in_a_replay(texts, known, k, factor, max_steps):
    """However they become known: all at once, or a few tokens of each at a time."""
    line, config = rollout(texts), policy(factor, k)
    expected = decoded([line], config)
    ends = np.array([2 + len(text) for text in line.responses], np.int32)
    token_ids = np.zeros((len(ends), int(ends.max())), np.int32)
    for row, text in zip(token_ids, line.responses, strict=True):
        row[2 : 2 + len(text)] = text
    counts = np.zeros(5)
    with SuffixIndex(
        num_speculative_tokens=k,
        mode="suffix_policy",
        max_spec_factor=factor,
        min_token_prob=config.least_survival,
    ) as index:
        group = index.open_group(line.prompt_token_ids)
        heard = heard_texts(token_ids, 2)
        sequences = np.array([index.open_sequence(group) for _ in ends], np.int32)
        replayed = Replayed(heard, sequences, heard.ends.copy(), np.zeros((len(ends), 2)))
        heard.ends[:] = np.minimum(3, ends)
        heard.plain[:] = heard.ends  # what the prefill has said
        spent = np.array([7.0, 11.0])
        for number in [0, *known, 10**6]:
            heard.ends[:] = np.minimum(heard.ends + number, ends)
            heard.growing[:] = heard.ends < ends
            heard.spent[:] = spent * (heard.ends - heard.plain)[:, None]
            while True:
                found = index.replay(replayed, max_steps=max_steps, max_plain_tokens=2)
                counts += found
                if not found.num_tokens:
                    break
    assert replayed.levels.tolist() == ends.tolist()
    assert counts[:3].tolist() == [expected.num_steps, expected.num_draft_tokens, (ends - 2).sum()]
    # All is settled for the tokens it was spent on.
    assert replayed.settled == pytest.approx(heard.spent)
    assert counts[3:] == pytest.approx(spent * (ends - 3).sum())


def heard_texts(token_ids, start):
    """Rows of no sequences."""
    n = len(token_ids)
    ends = np.full((3, n), start, np.int32)
    return Heard(np.full(n, -1, np.int32), token_ids, *ends, np.zeros((n, 2), np.int64))


def test_a_replay_of_many_rows():
    """More than an index has buffers for at first."""
    number = 300
    with SuffixIndex(num_speculative_tokens=4, mode="suffix_policy") as index:
        group = index.open_group(np.array([1, 2], np.int32))
        sequences = np.array([index.open_sequence(group) for _ in range(number)], np.int32)
        heard = heard_texts(np.tile(np.array([1, 2, 3, 1, 2, 3, 4], np.int32), (number, 1)), 3)
        heard.ends[:] = 7
        heard.growing[:] = 0
        replayed = Replayed(heard, sequences, np.full(number, 3, np.int32), np.zeros((number, 2)))
        counts = index.replay(replayed, max_steps=9, max_plain_tokens=1)
    assert (replayed.levels == 7).all() and counts.num_row_steps >= number
    assert counts.num_draft_tokens > number


def test_a_replay_refuses_what_does_not_fit():
    tokens, one = np.ones((1, 8), np.int32), np.ones(1, np.int32)
    with SuffixIndex(num_speculative_tokens=4) as index:
        sequence = np.array([index.open_sequence(index.open_group(one))], np.int32)
        replayed = Replayed(heard_texts(tokens, 2), sequence, 2 * one, np.zeros((1, 2)))
        for end in (1, 9):
            replayed.heard.ends[:] = end
            with pytest.raises(InvalidArgument, match="ends"):
                index.replay(replayed, max_steps=1, max_plain_tokens=1)
    with pytest.raises(InvalidArgument, match="levels"):
        Replayed(replayed.heard, sequence, np.ones(2, np.int32), np.zeros((1, 2)))
    with pytest.raises(InvalidArgument, match="settled"):
        Replayed(replayed.heard, sequence, one, np.zeros((1, 3)))
    with pytest.raises(InvalidArgument, match="token_ids"):
        heard_texts(np.ones((1, 8), np.int64), 2)
    tokens.flags.writeable = False
    with pytest.raises(InvalidArgument, match="token_ids: is read-only"):
        heard_texts(tokens, 2)


@pytest.mark.parametrize("seed", range(20))
def test_what_sequences_have_said_is_heard(seed):
    """Whenever it is asked for, in rows that have to be widened for it."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    lengths = rng.integers(3, 40, n)
    tokens = rng.integers(0, 4, (n, 40)).astype(np.int32)
    with SuffixIndex(num_speculative_tokens=4, min_token_prob=0.0) as index:
        group = index.open_group(np.array([1, 2], np.int32))
        sequences = np.array([index.open_sequence(group, keep_text=True) for _ in range(n)], np.int32)
        heard = Heard.nothing()
        for sequence in sequences.tolist():
            heard = heard.with_row(sequence, 2)
        levels = plain = np.full(n, 2, np.int32)
        drafts, spent, num_row_steps = np.zeros(n, np.int32), np.zeros((n, 2), np.int64), 0
        while (levels < lengths).any():
            before = levels
            levels = np.minimum(lengths, before + rng.integers(0, 4, n)).astype(np.int32)
            plain = np.where((levels > before) & (~drafts.any() | (spent[:, 0] == 0)), levels, plain)
            # A closed gate, or rows that may draft and others at their limit.
            drafts = 4 * rng.integers(0, 2, n).astype(np.int32)
            result = index.step(sequences, tokens, np.arange(n, dtype=np.int32), levels, drafts)
            spent += np.stack([drafts > 0, result.num_draft_tokens], axis=1)
            if rng.random() < 0.5:
                continue
            num_row_steps += index.hear(heard)
            assert (heard.ends == levels).all() and (heard.plain == plain).all()
            assert (heard.growing == (drafts > 0)).all()
            assert (heard.spent == spent).all() and num_row_steps == spent[:, 0].sum()
            assert heard.has_drafts == (levels > plain).any()
            for row, text, level in zip(heard.token_ids, tokens, levels, strict=True):
                assert (row[2:level] == text[2:level]).all()
