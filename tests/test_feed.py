"""What a rollout server has finished reaches the others of its prompt, with Ray's own actors and objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from omegaconf import OmegaConf

from rollout_spec.verl import feed as verl_feed
from rollout_spec.verl.feed import Feed, Finished, connect_servers

PERIOD_S = 0.1

pytestmark = pytest.mark.slow


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
