"""Siblings on one data-parallel rank of an engine, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec.verl import routing
from rollout_spec.verl.routing import Ranks


class Engine:
    """An AsyncLLM as far as it tells ranks apart."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.may_end = asyncio.Event()

    async def generate(self, *_: Any, data_parallel_rank: int, priority: int) -> AsyncIterator[str]:
        self.ranks.append(data_parallel_rank)
        yield "first"
        await self.may_end.wait()
        yield "last"


def test_siblings_go_to_one_rank_while_load_allows() -> None:
    asyncio.run(check_ranks())


def test_a_rank_that_the_caller_names_is_for_a_request_without_a_group() -> None:
    asyncio.run(check_named_ranks())


async def check_named_ranks() -> None:
    """verl names one after 0.9.1, so that a sample's turns find their prefix."""
    engine = Engine()
    engine.may_end.set()
    ranks = Ranks(engine.generate, 2, routing.Homes(3))
    for group, named in ((None, 1), ("a", 1), (None, None)):
        params = SimpleNamespace(extra_args={"rollout_spec_group": group})
        async for _ in ranks.generate([1], params, "r", data_parallel_rank=named, priority=0):
            pass
    assert engine.ranks == [1, 0, 0]
    assert set(ranks._loads.values()) == {0}


async def check_ranks() -> None:
    engine = Engine()
    ranks = Ranks(engine.generate, 2, routing.Homes(3))

    async def request(group: str | None) -> list[str]:
        extra_args = {} if group is None else {"rollout_spec_group": group}
        params = SimpleNamespace(extra_args=extra_args)
        outputs = ranks.generate(prompt=[1], sampling_params=params, request_id="r", priority=0)
        return [output async for output in outputs]

    running = [asyncio.create_task(request(group)) for group in ("a", "b", "a", "a", "a", "a", None)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # The fifth of a group would make 4 against 1 request: the group splits; then the rest goes where it fits.
    assert engine.ranks == [0, 1, 0, 0, 0, 1, 1]
    running[0].cancel()
    engine.may_end.set()
    done = await asyncio.gather(*running, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert done[1:] == [["first", "last"]] * 6
    assert set(ranks._loads.values()) == {0}


@pytest.mark.parametrize("group", [["a"], {"a": 1}, "\ud800", b"a"])
def test_a_group_that_cannot_be_read_is_none(group: Any) -> None:
    """A caller may send anything: it costs the request its siblings, not the engine."""

    async def request() -> list[str]:
        engine = Engine()
        engine.may_end.set()
        params = SimpleNamespace(extra_args={"rollout_spec_group": group})
        outputs = Ranks(engine.generate, 2, routing.Homes(3)).generate([1], params, "r", priority=0)
        return [output async for output in outputs]

    assert asyncio.run(request()) == ["first", "last"]
