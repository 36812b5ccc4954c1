"""What a rollout server has finished reaches the others of its prompt, with Ray's own actors and objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import chain
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
        self._feed, self._taken = Feed(self._take), []
        self._may_receive = asyncio.Event()
        self._may_receive.set()

    async def connect(self, peers: list[Any]) -> None:
        self._feed.connect(peers)

    async def finish(self, *responses: tuple[int, str, list[int]], core: int = 0) -> None:
        for version, group, tokens in responses:
            self._feed.finish(version, group, tokens, core)

    async def receive_siblings(self, version: int, responses: list[Finished]) -> None:
        await self._may_receive.wait()
        with self._feed.serving("served"):
            self._feed.receive(version, responses)

    async def _take(self, version: int, responses: list[Finished]) -> None:
        self._taken.append(
            [(version, each.group, np.frombuffer(each.text, np.int32).tolist()) for each in responses]
        )

    async def hang(self, hangs: bool) -> None:
        self._may_receive.clear() if hangs else self._may_receive.set()

    async def taken(self) -> list[list[tuple[int, str, list[int]]]]:
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
    ray.get(first.finish.remote((3, "served", [1, 2, 3]), (3, "not served", [4])))
    for other in others:
        until(taken_by(other), [[(3, "served", [1, 2, 3])]])


def test_what_was_generated_with_older_weights_is_not_sent(servers: list[Any]) -> None:
    ray.get(servers[0].finish.remote((3, "served", [3]), (4, "served", [4])))
    until(taken_by(servers[1]), [[(4, "served", [4])]])


def test_a_part_is_no_larger_than_its_bytes(servers: list[Any]) -> None:
    responses = [(0, "served", [length] * length) for length in (900, 200, 50)]
    ray.get(servers[0].finish.remote(*responses))
    until(taken_by(servers[1]), [[responses[0], responses[2]]])


def test_what_several_peers_send_is_taken_in_at_once(servers: list[Any]) -> None:
    """An engine stops for that, so it must not be as often as there are peers."""
    *others, last = servers
    sent = [(0, "served", [number]) for number in range(len(others))]
    ray.get([other.finish.remote(response) for other, response in zip(others, sent, strict=True)])
    until(lambda: sorted(chain.from_iterable(taken_by(last)())), sent)
    assert len(taken_by(last)()) < len(others)


@pytest.mark.parametrize(
    ("method", "routing", "num_ranks", "num_peers"),
    [("sam", "default", 1, 3), ("sam", "default", 2, 4), ("sam", "group", 2, 3), ("off", "default", 1, 0)],
)
def test_servers_that_draft_know_one_another(
    servers: list[Any], method: str, routing: str, num_ranks: int, num_peers: int
) -> None:
    ray.get([server.connect.remote([]) for server in servers])
    options = {"actor_rollout_ref": {"rollout": {"data_parallel_size": num_ranks}}}
    trainer = SimpleNamespace(
        config=OmegaConf.create({"rollout": {"spec": {"method": method, "routing": routing}}, **options}),
        _rollout_server_managers=lambda: [SimpleNamespace(server_handles=servers)],
    )
    connect_servers(trainer)
    until(lambda: [ray.get(server.num_peers.remote()) for server in servers], [num_peers] * 4)


def test_a_slow_or_dead_peer_costs_nothing_but_its_text(servers: list[Any]) -> None:
    first, fast, slow, dead = servers
    ray.get(slow.hang.remote(True))
    ray.kill(dead)
    sent = [[(0, "served", [number])] for number in range(5)]
    for number in range(4):
        ray.get(first.finish.remote(*sent[number]), timeout=1)
        until(taken_by(fast), sent[: number + 1])
    until(lambda: ray.get(first.num_peers.remote()), 2)
    ray.get(slow.hang.remote(False))
    until(taken_by(slow), sent[:1])
    ray.get(first.finish.remote(*sent[4]))
    until(taken_by(slow), [sent[0], sent[4]])
