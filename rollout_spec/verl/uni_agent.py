"""Names the sessions of verl's agent framework uni-agent, and says when they end.

The framework knows the row of a session, and hands the session's sampling parameters to every call. A
gateway, a process of its own that makes all calls of a session, knows its end. This module is imported only
where uni-agent is there.
"""

import logging
from collections.abc import Mapping
from typing import Any

import ray
from uni_agent.framework import entry
from uni_agent.framework.framework import OpenAICompatibleAgentFramework
from uni_agent.gateway import gateway

from rollout_spec.patches import PatchError, guard_class, put_before, record
from rollout_spec.verl import sample_calls
from rollout_spec.verl.changes import NAMED_SESSIONS
from rollout_spec.verl.row_names import ROW, with_sample_name

WHERE = entry.__file__
_Fields = Mapping[str, Any]
logger = logging.getLogger(f"verl.{__name__}")


class NamedSessions(OpenAICompatibleAgentFramework):
    """Stands before a class of uni-agent's frameworks."""

    async def _run_session(
        self, *, sample_fields: _Fields, session_index: int, sampling_params: _Fields, **session: Any
    ) -> Any:
        if (row := sample_fields.get(ROW)) is not None:
            sampling_params = with_sample_name(row, session_index, sampling_params)
        return await super()._run_session(
            sample_fields=sample_fields,
            session_index=session_index,
            sampling_params=sampling_params,
            **session,
        )


# Their __init__ is their own because Ray wraps and copies an inherited one, in which super() then fails.
class NamingWorker(entry.AgentFrameworkWorker.__ray_actor_class__):
    """Holds the framework, of uni-agent's class or of the user's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        try:
            put_before(NamedSessions, self.framework, NAMED_SESSIONS)
        except PatchError as error:
            logger.warning("rollout_spec: %s", error)


class NamingGateway(gateway.GatewayActor.__ray_actor_class__):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

    async def finalize_session(self, session_id: str, **tracing: Any) -> Any:
        try:
            return await super().finalize_session(session_id, **tracing)
        finally:
            sample_calls.calls_here.end_request(session_id)

    async def abort_session(self, session_id: str, **tracing: Any) -> None:
        try:
            await super().abort_session(session_id, **tracing)
        finally:
            sample_calls.calls_here.end_request(session_id)


def install() -> None:
    """In the trainer's process, where uni-agent makes its actors. Raises PatchError: it does not fit."""
    guard_class(NAMED_SESSIONS, NamedSessions, OpenAICompatibleAgentFramework)
    guard_class(NAMED_SESSIONS, NamingGateway, gateway.GatewayActor.__ray_actor_class__)
    if not issubclass(entry.AgentFrameworkWorker.__ray_actor_class__, NamingWorker):
        gateway.GatewayActor, entry.AgentFrameworkWorker = ray.remote(NamingGateway), ray.remote(NamingWorker)
    record(NAMED_SESSIONS)
