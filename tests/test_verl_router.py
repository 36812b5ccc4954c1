"""The policy of the group router, without Ray: where requests go, and how far loads may drift apart."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils.import_utils import load_class_from_fqn

from rollout_spec import homes
from rollout_spec.verl.launch import config_file

verls = pytest.importorskip("verl.workers.rollout.router", reason="this verl has no router")
from rollout_spec.verl.router import GroupRouter  # noqa: E402 - only where verl has one

SHIPPED = verls._load_router_yaml(config_file("rollout_spec_router/group.yaml"))


def make(num_servers: int = 2, **settings: Any) -> GroupRouter:
    return GroupRouter({f"s{i}": f"handle{i}" for i in range(num_servers)}, SHIPPED | settings)


def of(prompt: int) -> dict[str, Any]:
    return {"temperature": 1.0, "extra_args": {"rollout_spec_group": str(prompt)}}


def loads(router: GroupRouter) -> dict[str, int]:
    return router.get_status()["servers"]


def test_verl_finds_and_makes_it():
    assert load_class_from_fqn(SHIPPED["router_class"], "router") is GroupRouter
    assert GroupRouter({"a": 1}, SHIPPED).acquire_server("r", sampling_params=of(1)) == ("a", 1)
    assert make().require_acquire_fields() == ["sampling_params"]


def test_requests_without_a_group_are_verls():
    """So are those whose group cannot be read: a caller may send anything."""
    router = make(num_servers=4)
    for number, group in enumerate([None, ["a"], {"a": 1}, b"a", "\ud800", None, None, None]):
        router.acquire_server(str(number), {"extra_args": group and {"rollout_spec_group": group}})
    assert set(loads(router).values()) == {2}
    assert not router._homes._homes


@pytest.mark.parametrize("limit", [None, -1, 2.5, True, "16"])
def test_a_wrong_limit_is_refused(limit):
    with pytest.raises(ValueError, match=r"max_imbalance=.*: must be a whole number of at least 0"):
        make(max_imbalance=limit)


@pytest.mark.parametrize("interleaved", [False, True])
def test_siblings_go_together_and_prompts_are_spread(interleaved):
    """verl submits all at once; which sample arrives next is chance."""
    router, placed = make(num_servers=4), defaultdict(set)
    arrivals = [(prompt, sample) for prompt in range(8) for sample in range(8)]
    for prompt, sample in sorted(arrivals, key=lambda pair: pair[interleaved]):
        placed[prompt].add(router.acquire_server(f"{prompt}-{sample}", sampling_params=of(prompt))[0])
    assert all(len(servers) == 1 for servers in placed.values())
    assert set(loads(router).values()) == {16}


def test_groups_of_more_than_the_bound_split_as_the_pages_say():
    router, placed = make(num_servers=8), defaultdict(set)
    for request in range(64 * 16):  # prompt by prompt
        prompt = request // 16
        placed[prompt].add(router.acquire_server(str(request), sampling_params=of(prompt))[0])
    assert SHIPPED["max_imbalance"] == 8
    assert not any(len(servers) == 1 for servers in placed.values())
    assert max(loads(router).values()) - min(loads(router).values()) <= 8


def test_a_request_that_goes_on_stays_and_needs_no_prompt():
    router = make()
    home = router.acquire_server("r", sampling_params=of(1))[0]
    router.release_server(home, "r")
    assert router.acquire_server("r", sampling_params=of(1))[0] == home
    assert router.acquire_server("without") is not None


def test_a_prompt_of_an_earlier_epoch_goes_where_it_was():
    router = make(num_servers=3)
    first = router.acquire_server("a", sampling_params=of(1))[0]
    router.acquire_server("b", sampling_params=of(2))
    router.release_server(first)
    router.clear_sticky_cache()
    assert router.acquire_server("later", sampling_params=of(1))[0] == first


def test_servers_come_and_go():
    router = make(num_servers=2)
    home = router.acquire_server("a", sampling_params=of(1))[0]
    router.remove_servers([home])
    other = router.acquire_server("b", sampling_params=of(1))[0]
    assert other != home
    assert router.acquire_server("a", sampling_params=of(1))[0] == other, "its server is gone"
    router.remove_servers([other])
    with pytest.raises(RuntimeError, match="No available servers"):
        router.acquire_server("c", sampling_params=of(1))
    router.add_servers({"new": 1})
    assert router.acquire_server("c", sampling_params=of(1)) == ("new", 1)


def test_old_groups_are_forgotten(monkeypatch):
    monkeypatch.setattr(homes, "MAX_GROUPS", 3)
    router = make()
    for prompt in range(10):
        server, _ = router.acquire_server(str(prompt), sampling_params=of(prompt))
        router.release_server(server)
    assert len(router._homes._homes) == 3
    assert sum(router._homes._num_groups.values()) == 3


@settings(max_examples=40)
@given(
    num_servers=st.integers(1, 5),
    limit=st.integers(0, 6),
    events=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=120),
)
def test_no_request_exceeds_the_bound(num_servers, limit, events):
    """`events`: a prompt whose next sample arrives, or (False) the oldest request ends."""
    router, running = make(num_servers, max_imbalance=limit), []
    for number, (prompt, arrives) in enumerate(events):
        if not arrives:
            if running:
                router.release_server(running.pop(0))
            continue
        before = loads(router)
        server, _ = router.acquire_server(str(number), sampling_params=of(prompt))
        running.append(server)
        assert before[server] + 1 <= min(before.values()) + max(1, limit)
        assert sum(loads(router).values()) == len(running)
