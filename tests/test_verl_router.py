"""The group router as verl uses it, without Ray; where a group goes: tests/test_placement.py."""

import subprocess
import sys

import pytest
from verl.utils.import_utils import load_class_from_fqn

from rollout_spec.config import SpecConfig
from rollout_spec.verl import hydra_plugin
from rollout_spec.verl.hydra_plugin import check_whole
from rollout_spec.verl.settings import group_router_file
from tests.test_verl_check_config import composed

verls = pytest.importorskip("verl.workers.rollout.router", reason="this verl has no router")
from rollout_spec.verl.router import GroupRouter  # noqa: E402 - only where verl has one

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
from hydra import compose, initialize_config_module
from rollout_spec.verl import entry_point
from rollout_spec.verl.check_config import check_config
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", ["actor_rollout_ref.rollout.name=vllm", "+rollout.spec=sam"])
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
