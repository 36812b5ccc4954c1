"""Keeps the samples of a prompt together: on one rollout server (`router`), on one data-parallel rank of it.

`rollout-spec simulate` places requests by `Homes` too, so importing this module needs Python only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from typing import Any, TypeVar

MAX_GROUPS = 10_000

Place = TypeVar("Place", bound=Hashable)


class Homes:
    """Keeps the requests of a group together while load allows.

    A request goes to the place that has served most of its siblings, unless that place has `max_imbalance`
    more requests in flight than the least loaded one; then to the place with the next most siblings, and if
    none is left, to the least loaded one. So a large group splits into parts of about `max_imbalance`. A
    prompt that returns in a later epoch goes where it was, because its history is there.

    Args:
        max_imbalance: in requests, at least 0.

    Raises:
        ValueError: `max_imbalance` is not a whole number of at least 0.
    """

    def __init__(self, max_imbalance: Any) -> None:
        if type(max_imbalance) is not int or max_imbalance < 0:
            raise ValueError(f"max_imbalance={max_imbalance!r}: must be a whole number of at least 0")
        self._max_imbalance = max_imbalance
        # How many requests each place has served of each group; the group used last stands at the end.
        self._homes: OrderedDict[Hashable, Counter[Any]] = OrderedDict()
        self._num_groups: Counter[Any] = Counter()

    def choose(self, group: Hashable, loads: Mapping[Place, int]) -> Place:
        """Where a request of the group goes, by the requests in flight at each place (`loads`)."""
        homes = self._homes.setdefault(group, Counter())
        self._homes.move_to_end(group)
        if len(self._homes) > MAX_GROUPS:
            self._num_groups.subtract(self._homes.popitem(last=False)[1].keys())
        least = min(loads.values())
        near = [
            place
            for place, _ in homes.most_common()
            if place in loads and (loads[place] == least or loads[place] - least < self._max_imbalance)
        ]
        # Among equally loaded places, the one with the fewest groups.
        place = near[0] if near else min(loads, key=lambda each: (loads[each], self._num_groups[each]))
        if place not in homes:
            self._num_groups[place] += 1
        homes[place] += 1
        return place


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
        from rollout_spec.vllm.keys import names_of  # it imports torch

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
