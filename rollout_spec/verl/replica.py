"""verl's replica, which the trainer's process makes: it chooses the class of its rollout servers."""

from typing import Any

import ray
import transfer_queue
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from rollout_spec.config import ConfigError
from rollout_spec.verl.server import SpecHttpServer, requested_spec
from rollout_spec.verl.settings import V1_TRAINER_ONLY


class SpecReplica(vLLMReplica):
    """verl's replica; where `rollout.spec` is used, its servers are `SpecHttpServer`s (`is_watched`)."""

    is_watched = False

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, *args, **kwargs)
        if requested_spec(config) is not None and not self.is_reward_model and not self.is_teacher_model:
            require_v1_trainer()  # before the engines start, which takes minutes
            self.server_class = ray.remote(SpecHttpServer)
            self.is_watched = True


def require_v1_trainer() -> None:
    """Raise a ConfigError in any trainer but verl's V1 trainer, whatever its configuration says.

    The V1 trainer joins verl's TransferQueue before it makes replicas. The legacy trainers never do.
    """
    try:
        transfer_queue.get_client()
    except AssertionError:
        way_out = "run verl.trainer.main_ppo with trainer.use_v1=True"
        raise ConfigError(f"this is verl's legacy trainer: {way_out}. {V1_TRAINER_ONLY}") from None
