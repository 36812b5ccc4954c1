"""Siblings on one data-parallel rank of an engine, without an engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

from rollout_spec.placement import GroupPlacement
from rollout_spec.verl.router import RankRouter


class Engine:
    """An AsyncLLM as far as it tells ranks apart."""

    def __init__(self):
        self.ranks: list[int] = []
        self.may_end = asyncio.Event()
        self.placed = RankRouter(self.generate, 2, GroupPlacement(8))

    async def generate(self, *_, data_parallel_rank, priority):
        self.ranks.append(data_parallel_rank)
        yield "first"
        await self.may_end.wait()
        yield "last"

    async def request(self, group, named=None, sample=None):
        params = SimpleNamespace(extra_args={"rollout_spec_group": group, "rollout_spec_sample": sample})
        options: Any = {"sampling_params": params, "request_id": "r", "data_parallel_rank": named}
        return [output async for output in self.placed.generate(prompt=[1], priority=0, **options)]


def test_siblings_go_to_one_rank_while_load_allows():
    async def check():
        engine = Engine()
        running = [asyncio.create_task(engine.request(group)) for group in (*"ab", *8 * "a", "a", None)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # A tenth "a" would make 9 requests more than 1: the group splits, and the rest goes where it fits.
        assert engine.ranks == [0, 1, *8 * [0], 1, 1]
        running[0].cancel()
        engine.may_end.set()
        done = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert done[1:] == [["first", "last"]] * 11
        assert set(engine.placed._loads.values()) == {0}

    asyncio.run(check())


def test_a_turn_goes_to_the_rank_of_the_turn_before_it_while_load_allows():
    async def check():
        engine = Engine()
        engine.may_end.set()
        for sample in ("x", *6 * ["y"]):  # where most siblings were
            await engine.request("a", sample=sample)
        engine.placed._loads[0] = 8  # of other groups
        await engine.request("a", sample="z")
        engine.placed._loads[0] = 0
        for sample in "zxz":
            await engine.request("a", sample=sample)
        engine.placed._loads[1] = 8
        await engine.request("a", sample="z")
        assert engine.ranks[7:] == [1, 1, 0, 1, 0]

    asyncio.run(check())


def test_a_rank_that_the_caller_names_is_for_a_request_without_a_group():
    """verl names one after 0.9.1, so that a sample's turns find their prefix. A group may be anything."""

    async def check():
        engine = Engine()
        engine.may_end.set()
        for group, named in ((None, 1), ("a", 1), (None, None), (["a"], 1), ({"a": 1}, 1), ("\ud800", 1)):
            assert await engine.request(group, named) == ["first", "last"]
        assert engine.ranks == [1, 0, 0, 1, 1, 1]

    asyncio.run(check())
