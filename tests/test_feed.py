"""Siblings' responses from other engines: sent by servers, taken in by drafters while the step runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.history import group_key
from rollout_spec.verl import feed as verl_feed
from rollout_spec.verl.feed import Feed, Finished, connect_servers

PROMPT = np.array([7, 8, 9], np.int32)
PERIOD_S = 0.1
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


class Server:
    """A rollout server as far as its feed goes."""

    async def reset(self) -> None:
        verl_feed.PERIOD_S, verl_feed.MAX_BYTES = PERIOD_S, 4000
        self._feed = Feed()
        self._delay_s = 0.0
        self._taken: list[tuple[int, str, list[int]]] = []

    async def connect(self, peers: list[Any]) -> None:
        self._feed.connect(peers)

    async def finish(self, version: int, group: str, tokens: list[int], core: int = 0) -> None:
        self._feed.add(version, group, tokens, core)

    async def add_siblings(self, version: int, responses: list[Finished]) -> None:
        await asyncio.sleep(self._delay_s)
        with self._feed.serving("served"):
            wanted = self._feed.wanted(responses, core=0)
        self._taken += [(version, group, np.frombuffer(text, np.int32).tolist()) for group, text in wanted]

    async def be_slow(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def taken(self) -> list[tuple[int, str, list[int]]]:
        return self._taken

    async def num_peers(self) -> int:
        return len(self._feed._peers)


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield [ray.remote(num_cpus=0)(Server).remote() for _ in range(4)]
    ray.shutdown()


@pytest.fixture
def servers(actors: list[Any]) -> list[Any]:
    """Each knows all others."""
    ray.get([actor.reset.remote() for actor in actors])
    ray.get([actor.connect.remote([each for each in actors if each != actor]) for actor in actors])
    return actors


def until(read: Callable[[], Any], expected: Any, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while (found := read()) != expected and time.monotonic() < end:
        time.sleep(PERIOD_S / 2)
    assert found == expected


def taken_by(handle: Any) -> Callable[[], Any]:
    return lambda: ray.get(handle.taken.remote())


def test_a_finished_response_reaches_the_servers_of_its_prompt(servers: list[Any]) -> None:
    first, *others = servers
    for group in ("served", "not served"):
        ray.get(first.finish.remote(3, group, [1, 2, 3]))
    for other in others:
        until(taken_by(other), [(3, "served", [1, 2, 3])])
    assert taken_by(first)() == []


def test_what_was_generated_with_older_weights_is_not_sent(servers: list[Any]) -> None:
    for version in (3, 4):
        ray.get(servers[0].finish.remote(version, "served", [version]))
    until(taken_by(servers[1]), [(4, "served", [4])])


def test_a_period_sends_no_more_than_its_bytes(servers: list[Any]) -> None:
    for length in (900, 200, 50):
        ray.get(servers[0].finish.remote(0, "served", [length] * length))
    until(taken_by(servers[1]), [(0, "served", [length] * length) for length in (900, 50)])


def test_an_engine_core_gets_what_the_others_of_its_server_have_finished(servers: list[Any]) -> None:
    server = servers[0]
    ray.get(server.connect.remote([server]))
    for core in (0, 1):
        ray.get(server.finish.remote(0, "served", [core], core))
    until(taken_by(server), [(0, "served", [1])])


@pytest.mark.parametrize(("method", "num_ranks", "num_peers"), [("sam", 1, 3), ("sam", 2, 4), ("off", 1, 0)])
def test_servers_that_draft_know_one_another(
    servers: list[Any], method: str, num_ranks: int, num_peers: int
) -> None:
    ray.get([server.connect.remote([]) for server in servers])
    options = {"actor_rollout_ref": {"rollout": {"data_parallel_size": num_ranks}}}
    trainer = SimpleNamespace(
        config=OmegaConf.create({"rollout": {"spec": {"method": method}}, **options}),
        _rollout_server_managers=lambda: [SimpleNamespace(server_handles=servers)],
    )
    connect_servers(trainer)
    until(lambda: [ray.get(server.num_peers.remote()) for server in servers], [num_peers] * 4)


def test_a_slow_or_dead_peer_costs_nothing_but_its_text(servers: list[Any]) -> None:
    first, fast, slow, dead = servers
    ray.get(slow.be_slow.remote(1.0))
    ray.kill(dead)
    sent = []
    for number in range(5):
        sent.append((0, "served", [number]))
        ray.get(first.finish.remote(0, "served", [number]), timeout=1)
        until(taken_by(fast), sent)
    until(lambda: ray.get(first.num_peers.remote()), 2)
    until(taken_by(slow), sent[:1])
    ray.get(first.finish.remote(0, "served", [5]))
    until(taken_by(slow), [sent[0], (0, "served", [5])])
