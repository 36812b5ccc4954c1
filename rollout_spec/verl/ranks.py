"""The siblings of a prompt on one data-parallel rank of a rollout server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from rollout_spec.verl.homes import Homes
from rollout_spec.vllm.keys import GROUP_KEY


class RankedEngine:
    """An AsyncLLM that sends siblings to one data-parallel rank while load allows; in all else as it is.

    vLLM itself gives a request to the rank with the fewest, so that siblings are spread.

    Args:
        engine: vLLM's AsyncLLM. All its requests come through here.
        num_ranks: its data-parallel ranks.
        homes: where each group goes.
    """

    def __init__(self, engine: Any, num_ranks: int, homes: Homes) -> None:
        self._engine = engine
        self._homes = homes
        self._loads = dict.fromkeys(range(num_ranks), 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """As the AsyncLLM's; `extra_args` name the group, and a request that does not has no siblings."""
        group = (sampling_params.extra_args or {}).get(GROUP_KEY)
        loads = self._loads
        rank = min(loads, key=loads.__getitem__) if group is None else self._homes.choose(group, loads)
        self._loads[rank] += 1
        try:
            outputs = self._engine.generate(
                sampling_params=sampling_params, data_parallel_rank=rank, **kwargs
            )
            async for output in outputs:
                yield output
        finally:
            self._loads[rank] -= 1
