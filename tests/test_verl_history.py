"""The history between rollout servers, with Ray's own actors and objects."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import ray

from rollout_spec.history import History, prompt_key
from rollout_spec.verl_history import share

PROMPT = prompt_key(np.array([1, 2, 3], np.int32))


class Server:
    """A rollout server as far as its history goes."""

    def __init__(self) -> None:
        self._history = History(8, 1 << 20)

    async def serve(self, response: list[int]) -> None:
        self._history.add(PROMPT, np.array(response, np.int32))

    async def take_history(self) -> bytes:
        return self._history.take_new()

    async def add_history(self, *contents: bytes) -> None:
        for content in contents:
            self._history.merge(content)

    async def texts(self) -> list[list[int]]:
        return [response.tokens.tolist() for response in self._history.get(PROMPT)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_every_server_learns_once_what_the_others_served() -> None:
    actor = ray.remote(num_cpus=0)(Server)
    servers = [actor.remote() for _ in range(3)]
    for step in (0, 10):
        ray.get([server.serve.remote([step + i]) for i, server in enumerate(servers)])
        share(servers)
    for i, server in enumerate(servers):
        others = [j for j in range(3) if j != i]
        expected = [[i], *([j] for j in others), [10 + i], *([10 + j] for j in others)]
        assert ray.get(server.texts.remote()) == expected


def test_one_server_has_nobody_to_share_with() -> None:
    server = ray.remote(num_cpus=0)(Server).remote()
    ray.get(server.serve.remote([1]))
    share([server])
    assert ray.get(server.texts.remote()) == [[1]]
