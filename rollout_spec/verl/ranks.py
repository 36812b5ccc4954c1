"""Keeps the samples of a prompt together on one data-parallel rank of an engine."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from rollout_spec.homes import Homes
from rollout_spec.vllm.keys import names_of


class RankRouter:
    """Sends siblings to one data-parallel rank of an engine while load allows.

    vLLM itself would choose the rank with the fewest requests, and so spread the siblings. All requests of
    its AsyncLLM come through here.
    """

    def __init__(self, generate: Callable[..., AsyncIterator[Any]], num_ranks: int, homes: Homes) -> None:
        self._generate = generate
        self._homes = homes
        self._loads = dict.fromkeys(range(num_ranks), 0)

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
        loads = self._loads
        if group is not None:
            rank = self._homes.choose(group, loads)
        elif rank is None:
            rank = min(loads, key=loads.__getitem__)
        loads[rank] += 1
        try:
            outputs = self._generate(prompt, sampling_params, request_id, data_parallel_rank=rank, **kwargs)
            async for output in outputs:
                yield output
        finally:
            loads[rank] -= 1
