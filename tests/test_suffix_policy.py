"""Mode suffix_policy: the better of a request's own tree and the one that it shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.config import SpecConfig
from rollout_spec.drafter import Drafter
from rollout_spec.index import SuffixIndex
from rollout_spec.native import BudgetExceeded, InvalidArgument, UnknownId
from rollout_spec.price import make_index
from rollout_spec.suffix_policy import TwoTreeIndex
from tests.oracle import GroupOracle, Options

K = 4
TOKENS = st.lists(st.integers(0, 2), max_size=12)


def int32(*values):
    return np.array(values, np.int32)


def config(**options):
    return SpecConfig(**{"mode": "suffix_policy", "num_speculative_tokens": K, "min_match_len": 1} | options)


def planted_with(start, text, options):
    tree, grown = GroupOracle(start, options), start
    for token in text[len(start) :]:
        grown = tree.extend(grown, token)
    return tree


@given(
    prompt=TOKENS,
    texts=st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=3),
    pace=st.integers(1, 5),
    may_draft=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=14, max_size=14),
    restart=st.integers(0, 8),
    max_spec_factor=st.sampled_from([1.0, 4.0]),
    min_token_prob=st.sampled_from([0.1, 0.4]),
)
def test_drafts_are_the_better_of_two_oracles(
    prompt, texts, pace, may_draft, restart, max_spec_factor, min_token_prob
):
    """Each sequence after the prompt or, with a prompt of its own, at the root. Who may draft changes with
    every step, and in one all begin anew."""
    options = {"max_spec_factor": max_spec_factor, "min_token_prob": min_token_prob}
    of_oracle = Options(num_speculative_tokens=K, mode="suffix_policy", min_match_len=1, **options)
    shared = GroupOracle(prompt, of_oracle)
    own: list[GroupOracle | None] = [None for _ in texts]
    known = [tuple(prompt) if after_prompt else () for _, after_prompt in texts]
    whole = [before + tuple(text) for before, (text, _) in zip(known, texts, strict=True)]
    token_ids = np.zeros((len(texts), 40), np.int32)
    for row, text in zip(token_ids, whole, strict=True):
        row[: len(text)] = text
    starts = list(known)
    with make_index(config(**options)) as index:
        assert isinstance(index, TwoTreeIndex)
        group = index.open_group(int32(*prompt))
        sequences = int32(*(index.open_sequence(group, after_prompt=after) for _, after in texts))
        rows = np.arange(len(texts), dtype=np.int32)
        for step in range(12 // pace + 2):
            budgets = int32(*(K * may for may in may_draft[step][: len(texts)]))
            for i, text in enumerate(whole):
                if step == restart and len(known[i]) > len(starts[i]) + pace:
                    known[i] = starts[i]
                for token in text[len(known[i]) : len(known[i]) + pace]:
                    if (tree := own[i]) is not None:
                        tree.extend(known[i], token)
                    known[i] = shared.extend(known[i], token)
                if budgets[i] and own[i] is None:
                    own[i] = planted_with(starts[i], known[i], of_oracle)
            levels = int32(*map(len, known))
            result = index.step(sequences, token_ids, rows, levels, budgets, min_token_prob)
            drafts = [
                row[:n].tolist() for row, n in zip(result.draft_tokens, result.num_draft_tokens, strict=True)
            ]
            leading, end = index.leading_tokens(result.num_draft_tokens), 0
            for i, draft in enumerate(drafts):
                assert leading[end : (end := end + len(draft))] == draft
                trees = [tree for tree in (own[i], shared) if tree is not None]
                candidates = [tree.draft(known[i], int(budgets[i]), min_token_prob)[1] for tree in trees]
                scores = [sum(candidate.survivals) for candidate in candidates]
                # The first of the best; where sums of float32 may differ from these, either.
                assert draft in [
                    candidate.tokens
                    for candidate, score in zip(candidates, scores, strict=True)
                    if score > max(scores) - 1e-5
                ]
                if scores[0] == scores[-1] or abs(scores[0] - scores[-1]) > 1e-5:
                    assert draft == candidates[scores.index(max(scores))].tokens
            index.validate()


def test_own_text_is_believed_where_the_group_is_of_two_minds():
    """1 2 has gone on with 3 in this response, with 4 and 5 in its siblings."""
    texts = [(7, 1, 2, 3, 8, 1, 2), (6, 1, 2, 4, 6, 6, 6), (9, 1, 2, 5, 9, 9, 9)]
    token_ids = np.array(texts, np.int32)
    drafts = {}
    for two_trees in (False, True):
        options = {
            "num_speculative_tokens": 2,
            "min_match_len": 1,
            "max_spec_factor": 1.0,
            "min_token_prob": 0.5,
        }
        made = config(**options) if two_trees else None
        with make_index(made) if made else SuffixIndex(mode="suffix_policy", **options) as index:
            group = index.open_group(int32())
            sequences = int32(*(index.open_sequence(group) for _ in texts))
            result = index.step(sequences, token_ids, int32(0, 1, 2), int32(7, 7, 7), int32(2, 0, 0))
            drafts[two_trees] = result.draft_tokens[0, : result.num_draft_tokens[0]].tolist()
            assert result.num_draft_tokens[1:].tolist() == [0, 0]
    assert drafts == {False: [], True: [3, 8]}


def test_slots_come_back_and_so_do_their_bytes():
    rng = np.random.default_rng(0)
    with make_index(config()) as index:
        sizes = []
        for _ in range(4):
            group = index.open_group(int32(1, 2))
            sequences = int32(*(index.open_sequence(group) for _ in range(150)))
            rows = np.arange(150, dtype=np.int32)
            token_ids = rng.integers(0, 5, (150, 30), dtype=np.int32)
            for level in (10, 30, 20):  # the last begins anew
                index.step(
                    sequences, token_ids, rows, np.full(150, level, np.int32), np.full(150, K, np.int32)
                )
            index.validate()
            for sequence in sequences.tolist():
                index.close_sequence(sequence)
            index.close_group(group)
            sizes.append(index.stats().num_bytes)
            assert index._own.stats().num_groups == 0
        assert sizes[-1] == sizes[1]
        group = index.open_group(int32(1, 2))
        index.open_sequence(group)
        index.clear()
        with pytest.raises(UnknownId):
            index.open_sequence(group)
        assert index.open_sequence(index.open_group(int32())) >= 0
    with pytest.raises(InvalidArgument, match=r"^index: is closed"):
        index.stats()


def test_a_row_without_room_for_a_tree_of_its_own_drafts_from_the_shared_one():
    text = np.tile(np.random.default_rng(0).integers(0, 50_000, (3, 450), dtype=np.int32), 9)
    levels, budgets, rows = int32(460, 4000, 460), int32(K, K, K), int32(0, 1, 2)
    with make_index(config()) as index:
        group = index.open_group(int32())
        sequences = int32(*(index.open_sequence(group) for _ in range(3)))
        index._own = SuffixIndex(num_speculative_tokens=K, mode="suffix_policy", max_bytes=150_000)
        for _ in range(2):
            result = index.step(sequences, text, rows, levels, budgets)
            for row, level in enumerate(levels.tolist()):
                assert result.draft_tokens[row].tolist() == text[row, level : level + K].tolist()
            assert index._own.stats().num_sequences == 2 and index._own_sequences[sequences[1]] < 0
        for sequence in sequences[:2].tolist():
            index.close_sequence(sequence)
        again = index.open_sequence(group)
        index.step(int32(again), text[1:2], int32(0), int32(460), int32(K))
        assert index._own.stats().num_sequences == 2
        index.validate()


def test_a_full_shared_tree_is_an_ordinary_error():
    text = np.random.default_rng(0).integers(0, 50_000, (3, 20_000), dtype=np.int32)
    levels = int32(100, 20_000, 100)
    with make_index(config(max_index_mb=1)) as index:
        group = index.open_group(int32())
        sequences = int32(*(index.open_sequence(group) for _ in range(3)))
        with pytest.raises(BudgetExceeded) as caught:
            index.step(sequences, text, int32(0, 1, 2), levels, int32(K, K, K))
        assert caught.value.row == 1 and index._own.stats().num_sequences == 0
    drafter = Drafter(config(max_index_mb=1, batch_threshold=8))
    for name in "abc":
        drafter.open(name, int32(), 30_000)
    drafts = drafter.step(list("abc"), [1, 1, 1], text, levels)
    assert len(drafts) == 3 and drafter.counters.num_untracked_rows == 1


def test_without_group_sharing_there_is_one_tree():
    assert type(make_index(config(group_sharing=False))) is SuffixIndex
