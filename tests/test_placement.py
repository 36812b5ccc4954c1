"""Where requests go: siblings together, and loads within a bound of each other."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec import placement
from rollout_spec.placement import GroupPlacement


def place(own, loads, group):
    chosen = own.choose(group, loads)
    loads[chosen] += 1
    return chosen


@pytest.mark.parametrize("limit", [None, -1, 2.5, True, "16"])
def test_a_wrong_limit_is_refused(limit):
    with pytest.raises(ValueError, match=r"max_imbalance=.*: must be a whole number of at least 0"):
        GroupPlacement(limit)


@pytest.mark.parametrize(("size", "interleaved"), [(8, False), (8, True), (16, False)])
def test_siblings_go_together_up_to_the_bound_and_groups_are_spread(size, interleaved):
    """verl submits all at once; which sample arrives next is chance."""
    own, loads, placed = GroupPlacement(8), dict.fromkeys(range(4), 0), defaultdict(set)
    for request in range(8 * size):
        group = request % 8 if interleaved else request // size
        placed[group].add(place(own, loads, group))
    assert {len(places) == 1 for places in placed.values()} == {size == 8}
    assert max(loads.values()) - min(loads.values()) <= size - 8


def test_a_group_goes_where_it_was_until_it_is_forgotten(monkeypatch):
    monkeypatch.setattr(placement, "MAX_GROUPS", 2)
    own, idle = GroupPlacement(8), {"a": 0, "b": 0}
    assert [own.choose(group, {"a": 0, "b": 1}) for group in (0, 1)] == ["a", "a"]
    assert [own.choose(group, idle) for group in (1, 0, 2)] == ["a", "a", "b"]
    assert own.choose(0, {"a": 1, "b": 0}) == "a", "1 is forgotten, which was used before 0"
    assert [own.choose(group, idle) for group in (2, 3, 0)] == ["b", "a", "b"]
    assert own.choose(0, {"a": 0}) == "a"
    monkeypatch.setattr(placement, "MAX_PLACED_SAMPLES", 2)
    for sample in (1, 2, 1, 3):
        own.choose(0, idle, sample)
    assert {sample for _, sample in own._samples} == {1, 3}, "2 is forgotten, which went last before 1"


@settings(max_examples=40)
@given(
    num_places=st.integers(1, 5),
    limit=st.integers(0, 6),
    events=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=120),
)
def test_no_request_exceeds_the_bound(num_places, limit, events):
    """`events`: a group whose next sample arrives, or (False) the oldest request ends."""
    own, loads, running = GroupPlacement(limit), dict.fromkeys(range(num_places), 0), []
    for group, arrives in events:
        if arrives:
            least = min(loads.values())
            running.append(place(own, loads, group))
            assert loads[running[-1]] <= least + max(1, limit)
        elif running:
            loads[running.pop(0)] -= 1
