"""Our names and ends in uni-agent's own framework and gateway, without Ray and engines, from a checkout."""

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu

from rollout_spec.patches import put_before
from rollout_spec.verl.changes import NAMED_SESSIONS
from rollout_spec.verl.samples import ROW, RowNames

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("UNI_AGENT" not in os.environ, reason="make test-long UNI_AGENT=DIR"),
]
N = {"n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1}


class Sessions:
    """A manager of gateways that only looks at what it gets; one session dies."""

    def __init__(self):
        self.given: list[Any] = []

    async def create_session(self, session_id, sampling_params):
        self.given.append(sampling_params)
        return SimpleNamespace(session_id=session_id)

    async def finalize_session(self, session_id): ...

    async def abort_session(self, session_id): ...


def framework(manager, monkeypatch):
    from uni_agent.framework import framework as of_uni_agent

    from rollout_spec.verl import uni_agent

    async def put(*_, **__): ...

    async def runner(**_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(of_uni_agent.tq, "async_kv_put", put)
    monkeypatch.setattr(of_uni_agent, "_materialize_runner", lambda *_: runner)
    task = of_uni_agent._RunnerConfig("any", {}, "inline_async", 0)
    rollout = OmegaConf.create(N | {"seed": 7, "calculate_log_probs": False, "val_kwargs": N})
    found = of_uni_agent.OpenAICompatibleAgentFramework(
        manager, runner_registry={"task": task}, rollout_config=rollout
    )
    put_before(uni_agent.NamedSessions, found, NAMED_SESSIONS)
    return found


@pytest.mark.parametrize("kind", ["train", "val"])
def test_sessions_have_the_names_of_their_rows(kind, monkeypatch):
    tools = {"tools_kwargs": [{"task": "a"}, {"task": "b"}, {"task": "a"}]}
    asked = [[{"role": "user", "content": "do it"}]] * 3
    batch = tu.get_tensordict({"uid": ["x", "y", "z"], "index": [0, 0, 0], "raw_prompt": asked, **tools})
    tu.assign_non_tensor_data(batch, "global_steps", 3)
    if kind == "val":
        tu.assign_non_tensor_data(batch, "validate", True)
    sessions = Sessions()
    batch = RowNames(7).add_to(batch)
    with pytest.raises(RuntimeError, match="All rollouts failed"):
        asyncio.run(framework(sessions, monkeypatch).generate_sequences(batch))
    names = [given["extra_args"]["rollout_spec_key"] for given in sessions.given]
    rows = [json.loads(row) for row in tu.get(batch, ROW)]
    assert sorted(names) == sorted([*row, number] for row in rows for number in range(2))
    assert {name[2] for name in names} == {kind}
    assert len({given["extra_args"]["rollout_spec_group"] for given in sessions.given}) == 2


@pytest.mark.parametrize("end", ["finalize_session", "abort_session"])
def test_a_gateway_says_when_a_session_has_ended(end, monkeypatch):
    from rollout_spec.verl import uni_agent

    ended: list[str] = []

    async def fail():
        raise ValueError("it failed")

    monkeypatch.setattr(uni_agent.client.here, "end_request", ended.append)
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
