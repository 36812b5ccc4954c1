"""The engine cores behind one vLLM client: one, or one for each data-parallel rank."""

import inspect
from typing import Any

from vllm.v1.engine.core_client import DPLBAsyncMPClient

# vLLM has no public way to the answers of all engine cores.
_CALL, _PARAMETERS = "_call_utility_async", ["self", "method", "args", "engine"]


class EngineCores:
    """Calls each engine core behind an AsyncLLM of vLLM's, and its workers.

    vLLM's client for several engine cores sends a call to all of them and returns the first answer only.

    Raises RuntimeError: the installed vLLM's client has changed.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        client = getattr(engine, "engine_core", None)
        self._client = client if isinstance(client, DPLBAsyncMPClient) else None
        if self._client is not None:
            check_client()

    def __len__(self) -> int:
        return 1 if self._client is None else len(self._client.core_engines)

    async def call(self, core: int, method: str, *args: Any) -> Any:
        """What a method of an engine core (`core`: its data-parallel rank) returns: vLLM's utility call."""
        if self._client is None:
            return await self._engine.engine_core.call_utility_async(method, *args)
        identity = self._client.core_engines[core]  # in the order of the ranks
        return await getattr(self._client, _CALL)(method, *args, engine=identity)

    async def call_workers(self, core: int, method: str, *args: Any) -> list[Any]:
        """What a method of each worker of an engine core returns."""
        if self._client is None:
            return await self._engine.collective_rpc(method, args=args)
        return await self.call(core, "collective_rpc", method, None, args, None)


def check_client() -> None:
    """Raise a RuntimeError if vLLM's client for several engine cores cannot call each of them as here."""
    call = getattr(DPLBAsyncMPClient, _CALL, None)
    found = list(inspect.signature(call).parameters) if call is not None else None
    if found != _PARAMETERS:
        raise RuntimeError(
            f"rollout_spec: {DPLBAsyncMPClient.__name__}.{_CALL} takes {found}, expected {_PARAMETERS}: with "
            "this vLLM set actor_rollout_ref.rollout.data_parallel_size=1"
        )
