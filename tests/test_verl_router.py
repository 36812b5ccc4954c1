"""The group router as verl uses it, without Ray; where a group goes: tests/test_homes.py."""

import pytest
from verl.utils.import_utils import load_class_from_fqn

from rollout_spec.config import SpecConfig
from rollout_spec.verl import plugin_state
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
    monkeypatch.setattr(plugin_state, "spec", plugin_state.spec)
    check_whole(_root_=composed("+rollout.spec=sam", "rollout.spec.max_imbalance=0"))
    config = verls._load_router_yaml(group_router_file())
    router = GroupRouter({"a": 1, "b": 2}, config)
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
