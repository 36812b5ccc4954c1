"""A drafter that takes in siblings' responses from other engines while the step runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.history import group_key

PROMPT = np.array([7, 8, 9], np.int32)
LONG = 512  # tokens that an engine steps through


def drafter_of(**options: Any) -> Drafter:
    return Drafter(SpecConfig(batch_threshold=8, min_token_prob=0.01, **options))


def drafts_along(drafter: Drafter, response: np.ndarray, name: str = "a") -> list[list[int]]:
    """What is drafted while the response to the prompt is generated token by token."""
    token_ids = np.zeros((1, LONG), np.int32)
    token_ids[0, : len(PROMPT)] = PROMPT
    token_ids[0, len(PROMPT) : len(PROMPT) + len(response)] = response
    drafter.open(name, PROMPT, LONG, "group")
    levels = range(len(PROMPT) + 1, len(PROMPT) + len(response) + 1)
    drafts = [drafter.step([name], [1], token_ids, np.array([level], np.int32))[0] for level in levels]
    drafter.close(name)
    return drafts


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.booleans(),
)
def test_a_siblings_response_drafts_as_the_same_text_of_the_history(
    siblings: list[list[int]], response: list[int], is_open: bool
) -> None:
    """Whether its group is open when it comes, or opens then."""
    texts = [np.array(sibling, np.int32) for sibling in siblings]
    remembering, told = drafter_of(history=len(texts)), drafter_of(history=0)
    for text in texts:
        remembering.history.add(group_key("group"), text)
    if is_open:
        told.open("first", PROMPT, LONG, "group")
    # An open group indexes what comes first at first.
    told.add_siblings([("group", text) for text in (texts[::-1] if is_open else texts)])
    answer = np.array(response, np.int32)
    assert drafts_along(told, answer) == drafts_along(remembering, answer)
    assert told.counters.num_sibling_tokens == sum(map(len, texts))
    told.index.validate()


def test_new_weights_drop_the_siblings_responses() -> None:
    response = np.arange(100, 140, dtype=np.int32)
    drafter = drafter_of(history=8)
    drafter.add_siblings([("group", response)])
    drafter.clear()
    assert not any(drafts_along(drafter, response))
    assert [text.tolist() for text in drafter.history.get(group_key("group"))] == [response.tolist()]


def test_siblings_responses_keep_to_the_budget() -> None:
    drafter = drafter_of(history=0, max_index_mb=1)
    rng = np.random.default_rng(1)
    for number in range(40):
        drafter.add_siblings([(f"group {number}", rng.integers(0, 50_000, 4000).astype(np.int32))])
    assert drafter._groups._siblings.num_bytes <= 1 << 17
    drafter.open("a", PROMPT, LONG, "group 39")
    for _ in range(40):
        drafter.add_siblings([("group 39", rng.integers(0, 50_000, 4000).astype(np.int32))])
    drafts_along(drafter, rng.integers(0, 1000, 400).astype(np.int32), name="b")
    assert drafter.index.stats().num_bytes <= 1 << 20
    assert drafter.counters.num_untracked_rows == 0
