"""Sends the siblings of a prompt to one rollout server, and to one rank of its engine, while load allows."""

from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollout_spec.placement import GroupPlacement
from rollout_spec.vllm.keys import read_names

# In verl's branches it may be the class of a Ray actor, which has no subclasses.
_actor = getattr(GlobalRequestLoadBalancer, "__ray_metadata__", None)
_Balancer: Any = GlobalRequestLoadBalancer if _actor is None else _actor.modified_class


class GroupRouter(_Balancer):
    """verl's balancer, with affinity between the requests of one prompt.

    A request that continues (same request id) stays where it is. Where a first one goes, `GroupPlacement`
    says; its `max_imbalance` is in `config`, which is what `router_config_path` holds:
    `rollout.spec.max_imbalance`.
    """

    def __init__(self, servers: dict[str, Any], config: Mapping[str, Any]) -> None:
        super().__init__(servers)
        self._placement = GroupPlacement(config.get("max_imbalance"))

    def require_acquire_fields(self) -> list[str]:
        return ["sampling_params"]

    def acquire_server(
        self, request_id: str, sampling_params: Any = None, prompt_ids: Any = None, **_: Any
    ) -> tuple[str, Any]:
        """Choose a server. `sampling_params` name the group, and where verl gives none, its prompt does; a
        request without a group is placed as verl does."""
        group: Any = read_names((sampling_params or {}).get("extra_args")).group
        if sampling_params is None and prompt_ids:
            group = hash(array("q", prompt_ids).tobytes())
        if group is not None and request_id not in self._request_id_to_server and self._inflight_requests:
            # What verl takes for the server of an earlier request of this id.
            self._request_id_to_server[request_id] = self._placement.choose(group, self._inflight_requests)
        return super().acquire_server(request_id)


class RankRouter:
    """Sends siblings to one data-parallel rank of an engine while load allows.

    vLLM itself would choose the rank with the fewest requests, and so spread the siblings. All requests of
    its AsyncLLM come through here.
    """

    def __init__(
        self, generate: Callable[..., AsyncIterator[Any]], num_ranks: int, placement: GroupPlacement
    ) -> None:
        self._generate = generate
        self._placement = placement
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
        """Generate as the AsyncLLM does; `extra_args` name the group and the sample.

        A request without a group goes to the rank that the caller names, by default to the emptiest one.
        """
        names, rank = read_names(sampling_params.extra_args), data_parallel_rank
        loads = self._loads
        if names.group is not None:
            rank = self._placement.choose(names.group, loads, names.sample)
        elif rank is None:
            rank = min(loads, key=loads.__getitem__)
        loads[rank] += 1
        try:
            outputs = self._generate(prompt, sampling_params, request_id, data_parallel_rank=rank, **kwargs)
            async for output in outputs:
                yield output
        finally:
            loads[rank] -= 1
