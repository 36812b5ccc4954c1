"""What our module for uni-agent stands on, in a checkout of it; tests/test_any_manager.py trains with it."""

import asyncio
import os
from types import SimpleNamespace

import pytest

GIVEN = pytest.mark.skipif("UNI_AGENT" not in os.environ, reason="make test-long UNI_AGENT=DIR")
pytestmark = [pytest.mark.long, GIVEN]


@pytest.mark.parametrize("end", ["finalize_session", "abort_session"])
def test_a_gateway_says_when_a_session_has_ended_also_if_that_fails(end, monkeypatch):
    from rollout_spec.verl import uni_agent

    ended: list[str] = []

    async def fail():
        raise ValueError("it failed")

    monkeypatch.setattr(uni_agent.sample_calls.calls_here, "end_request", ended.append)
    gateway = object.__new__(uni_agent.NamingGateway)
    gateway._sessions = {"a": SimpleNamespace(finalize=fail, abort=fail)}
    with pytest.raises(ValueError, match="it failed"):
        asyncio.run(getattr(gateway, end)("a"))
    assert ended == ["a"]


def test_uni_agents_actors_are_ours():
    """Where a signature that we stand on is another, `install` raises a PatchError that names it."""
    from uni_agent.framework import entry
    from uni_agent.gateway import gateway

    from rollout_spec.verl import uni_agent

    uni_agent.install()
    uni_agent.install()
    assert issubclass(entry.AgentFrameworkWorker.__ray_actor_class__, uni_agent.NamingWorker)
    assert issubclass(gateway.GatewayActor.__ray_actor_class__, uni_agent.NamingGateway)
