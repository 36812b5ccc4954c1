"""Keeps the samples of a prompt together on one data-parallel rank of an engine."""

from collections.abc import AsyncIterator
from typing import Any

from rollout_spec.homes import Homes
from rollout_spec.patches import Patch
from rollout_spec.vllm.keys import names_of

GROUPED = Patch(
    name="vllm-groups-by-rank",
    reason="vLLM chooses the data-parallel rank with the fewest requests, and so spreads the siblings of a "
    "prompt; used with rollout.spec.routing=group only",
    upstream="vllm/v1/engine/async_llm.py, AsyncLLM.generate",
    until="verl's routers choose ranks, not servers",
)


class GroupedRanks:
    """An AsyncLLM that sends siblings to one of its data-parallel ranks while load allows."""

    homes: Homes
    loads: dict[int, int]  # requests under way, by rank

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        data_parallel_rank: int | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Generate as the AsyncLLM does; `extra_args` name the group.

        A request without one goes to the rank that the caller names, by default to the one with the fewest.
        """
        group, rank = names_of(sampling_params.extra_args).group, data_parallel_rank
        loads = self.loads
        if group is not None:
            rank = self.homes.choose(group, loads)
        elif rank is None:
            rank = min(loads, key=loads.__getitem__)
        loads[rank] += 1
        try:
            generate = super().generate  # type: ignore[misc]
            async for output in generate(
                prompt, sampling_params, request_id, data_parallel_rank=rank, **kwargs
            ):
                yield output
        finally:
            loads[rank] -= 1
