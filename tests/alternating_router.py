"""For test_training: a router that sends siblings together in every other training step."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollout_spec.verl_router import GroupRouter

NUM_REQUESTS = 16  # of a step


class AlternatingRouter(GroupRouter):
    """verl's own balancing in the first step and every second one after it, GroupRouter's in the others."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        super().__init__(servers, config)
        self._num_requests = 0

    def acquire_server(self, request_id: str, prompt_ids: Any = None) -> tuple[str, Any]:
        step = self._num_requests // NUM_REQUESTS
        self._num_requests += 1
        if step % 2 == 0:
            self._homes.clear()
            return GlobalRequestLoadBalancer.acquire_server(self, request_id)
        return super().acquire_server(request_id, prompt_ids)
