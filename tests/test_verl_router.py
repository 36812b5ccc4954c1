"""The group router as verl uses it, without Ray, and the router of an engine's ranks, without an engine.

Where a group goes: tests/test_placement.py.
"""

import asyncio
import functools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from verl.utils.import_utils import load_class_from_fqn

from rollout_spec.config import SpecConfig
from rollout_spec.placement import GroupPlacement
from rollout_spec.verl import hydra_plugin
from rollout_spec.verl.hydra_plugin import check_whole
from rollout_spec.verl.settings import group_router_file
from tests.configs import composed

verls = pytest.importorskip("verl.workers.rollout.router", reason="this verl has no router")
from rollout_spec.verl.router import GroupRouter, RankRouter  # noqa: E402 - only where verl has one

SHIPPED = verls._load_router_yaml(group_router_file())


def make(num_servers=2):
    return GroupRouter({f"s{i}": f"handle{i}" for i in range(num_servers)}, SHIPPED)


def of(prompt):
    return {"temperature": 1.0, "extra_args": {"rollout_spec_group": str(prompt)}}


def test_verl_finds_and_makes_it():
    assert load_class_from_fqn(SHIPPED["router_class"], "router") is GroupRouter
    assert GroupRouter({"a": 1}, SHIPPED).acquire_server("r", sampling_params=of(1)) == ("a", 1)
    assert make().require_acquire_fields() == ["sampling_params"]


def test_its_bound_is_that_of_the_options_that_the_trainer_has_checked(monkeypatch):
    assert SHIPPED["max_imbalance"] == SpecConfig().max_imbalance == 8, "as the pages say"
    monkeypatch.setattr(hydra_plugin, "checked_spec", hydra_plugin.checked_spec)
    check_whole(_root_=composed("+rollout.spec=sam", "rollout.spec.max_imbalance=0"))
    router = GroupRouter({"a": 1, "b": 2}, verls._load_router_yaml(group_router_file()))
    assert {router.acquire_server(str(number), of(1))[0] for number in range(2)} == {"a", "b"}
    assert make().acquire_server("r", of(1), prompt_ids=[1]), "verl's branches give more"


def test_requests_without_a_group_are_verls():
    """So are those whose group cannot be read: a caller may send anything."""
    router = make(num_servers=4)
    for number, group in enumerate([None, ["a"], {"a": 1}, b"a", "\ud800", None, None, None]):
        router.acquire_server(str(number), {"extra_args": group and {"rollout_spec_group": group}})
    assert set(router.get_status()["servers"].values()) == {2}


def test_siblings_go_together_and_a_request_that_goes_on_stays_and_needs_no_prompt():
    router = make(num_servers=3)
    home = router.acquire_server("r", sampling_params=of(1))[0]
    assert router.acquire_server("sibling", sampling_params=of(1))[0] == home
    assert router.acquire_server("another", sampling_params=of(2))[0] != home
    router.release_server(home, "r")
    assert router.acquire_server("r", sampling_params=of(1))[0] == home
    assert router.acquire_server("without") is not None
    router.clear_sticky_cache()  # of an epoch
    assert router.acquire_server("later", sampling_params=of(1))[0] == home


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


# As verl's branches have it.
BASE = """
class LoadBalancerRegistry:
    known = {}

    @classmethod
    def register(cls, name):
        return lambda balancer: cls.known.setdefault(name, balancer)
"""
BALANCER = """
import ray
from verl.workers.rollout.router.base import LoadBalancerRegistry

@LoadBalancerRegistry.register("global_sticky_inflight")
@ray.remote
class GlobalRequestLoadBalancer:
    def __init__(self, servers, config=None):
        self._servers, self._request_id_to_server = dict(servers), {}
        self._inflight_requests = dict.fromkeys(servers, 0)

    def acquire_server(self, request_id, prompt_ids=None):
        loads = self._inflight_requests
        server = self._request_id_to_server.setdefault(request_id, min(loads, key=loads.get))
        loads[server] += 1
        return server, self._servers[server]

    def release_server(self, server_id, prompt_len=0, request_id=None):
        self._inflight_requests[server_id] -= 1
"""
PROGRAM = """
import sys
import verl, verl.workers.rollout
verl.__path__.append(sys.argv[1])
verl.workers.rollout.__path__.insert(0, sys.argv[1] + "/workers/rollout")
from rollout_spec.verl import entry_point
from rollout_spec.verl.check_config import check_config
from tests.configs import composed
config = composed("+rollout.spec=sam")
check_config(config)
rollout = config.actor_rollout_ref.rollout
from verl.workers.rollout.router import LoadBalancerRegistry
make = LoadBalancerRegistry.known[rollout.router_strategy]
router = make(servers=dict(a=1, b=2), config=rollout.router_config)
asked = [(f"{prompt}-{i}", [prompt] * 9) for prompt in range(2) for i in range(3)]
homes = [router.acquire_server(request, prompt_ids=prompt)[0] for request, prompt in asked]
router.release_server(homes[0], prompt_len=9)
print(rollout.router_config_path, homes)
"""


def test_branches_of_verl_know_it_by_its_name_and_siblings_by_their_prompt(tmp_path):
    package = tmp_path / "workers/rollout/router"
    package.mkdir(parents=True)
    (package / "base.py").write_text(BASE)
    (package / "__init__.py").write_text(BALANCER)
    command = [sys.executable, "-c", PROGRAM, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == f"None {[*'aaabbb']}", done.stderr[-2000:]


class EngineOfTwoRanks:
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


def in_event_loop(test):
    return functools.wraps(test)(lambda: asyncio.run(test()))


@in_event_loop
async def test_siblings_go_to_one_rank_while_load_allows():
    engine = EngineOfTwoRanks()
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


@in_event_loop
async def test_a_turn_goes_to_the_rank_of_the_turn_before_it_while_load_allows():
    engine = EngineOfTwoRanks()
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


@in_event_loop
async def test_a_rank_that_the_caller_names_is_for_a_request_without_a_group():
    """verl names one after 0.9.1, so that a sample's turns find their prefix. A group may be anything."""
    engine = EngineOfTwoRanks()
    engine.may_end.set()
    for group, named in ((None, 1), ("a", 1), (None, None), (["a"], 1), ({"a": 1}, 1), ("\ud800", 1)):
        assert await engine.request(group, named) == ["first", "last"]
    assert engine.ranks == [1, 0, 0, 1, 1, 1]
