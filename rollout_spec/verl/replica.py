"""verl's replica, which the trainer's process makes: it chooses the class of its rollout servers."""

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from rollout_spec.verl.server import SpecHttpServer, requested_spec
from rollout_spec.verl.trainer import require_v1_trainer


class SpecReplica(vLLMReplica):
    """verl's replica; where `rollout.spec` is used, its servers are `SpecHttpServer`s (`is_watched`)."""

    is_watched = False

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, *args, **kwargs)
        if requested_spec(config) is not None and not self.is_reward_model and not self.is_teacher_model:
            require_v1_trainer()  # before the engines start, which takes minutes
            self.server_class = ray.remote(SpecHttpServer)
            self.is_watched = True
