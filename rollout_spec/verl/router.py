"""A router for verl's rollout servers that sends the siblings of a prompt to one server while load allows."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollout_spec.vllm.keys import GROUP_KEY

MAX_GROUPS = 10_000


class GroupRouter(GlobalRequestLoadBalancer):
    """verl's balancer, with affinity between the requests of one prompt.

    A request that continues (same request id) stays where it is. A first one goes to the server that has had
    most of its siblings, unless that has `max_imbalance` more requests in flight than the least loaded one;
    then to the next such server, and at last to the least loaded, which joins the group's. So a large group
    splits into parts of about `max_imbalance`, not into single requests. A prompt that comes back in a later
    epoch goes where it was, to what that server's drafter remembers of it.

    Args:
        servers: actor handle by server id.
        config: what `router_config_path` holds; `max_imbalance` in requests, at least 0.

    Raises:
        ValueError: `max_imbalance` is missing or not a whole number of at least 0.
    """

    def __init__(self, servers: dict[str, Any], config: Mapping[str, Any]) -> None:
        super().__init__(servers)
        limit = config.get("max_imbalance")
        if type(limit) is not int or limit < 0:
            raise ValueError(f"max_imbalance={limit!r}: must be a whole number of at least 0")
        self._max_imbalance = limit
        # By group, how many of its requests each server has had; the group used last stands at the end.
        self._homes: OrderedDict[str, Counter[str]] = OrderedDict()
        self._num_groups: Counter[str] = Counter()
        self._num_split = 0

    def require_acquire_fields(self) -> list[str]:
        return ["sampling_params"]

    def acquire_server(
        self, request_id: str, sampling_params: Mapping[str, Any] | None = None
    ) -> tuple[str, Any]:
        """As verl's; `sampling_params` name the group, and a request that does not has no siblings."""
        group = ((sampling_params or {}).get("extra_args") or {}).get(GROUP_KEY)
        if group is not None and request_id not in self._request_id_to_server and self._inflight_requests:
            # What verl takes for the server of an earlier request of this id.
            self._request_id_to_server[request_id] = self._choose(group)
        return super().acquire_server(request_id)

    def _choose(self, key: str) -> str:
        homes = self._homes.setdefault(key, Counter())
        self._homes.move_to_end(key)
        if len(self._homes) > MAX_GROUPS:
            self._num_groups.subtract(self._homes.popitem(last=False)[1].keys())
        loads = self._inflight_requests
        least = min(loads.values())
        near = [
            server
            for server, _ in homes.most_common()
            if server in loads and (loads[server] == least or loads[server] - least < self._max_imbalance)
        ]
        # Among equally loaded servers, the one with the fewest groups.
        server = near[0] if near else min(loads, key=lambda each: (loads[each], self._num_groups[each]))
        if server not in homes:
            self._num_split += len(homes) == 1
            self._num_groups[server] += 1
        homes[server] += 1
        return server

    def get_status(self) -> dict:
        return super().get_status() | {"groups": len(self._homes), "split_groups": self._num_split}
