"""A router for verl's rollout servers that sends the siblings of a prompt to one server while load allows."""

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollout_spec.homes import Homes
from rollout_spec.vllm.keys import names_of


class GroupRouter(GlobalRequestLoadBalancer):
    """verl's balancer, with affinity between the requests of one prompt.

    A request that continues (same request id) stays where it is. Where a first one goes, `Homes` says; its
    `max_imbalance` is in `config`, which is what `router_config_path` holds.
    """

    def __init__(self, servers: dict[str, Any], config: Mapping[str, Any]) -> None:
        super().__init__(servers)
        self._homes = Homes(config.get("max_imbalance"))

    def require_acquire_fields(self) -> list[str]:
        return ["sampling_params"]

    def acquire_server(
        self, request_id: str, sampling_params: Mapping[str, Any] | None = None
    ) -> tuple[str, Any]:
        """Choose a server. `sampling_params` name the group; a request without one is placed as verl does."""
        group = names_of((sampling_params or {}).get("extra_args")).group
        if group is not None and request_id not in self._request_id_to_server and self._inflight_requests:
            # What verl takes for the server of an earlier request of this id.
            self._request_id_to_server[request_id] = self._homes.choose(group, self._inflight_requests)
        return super().acquire_server(request_id)
