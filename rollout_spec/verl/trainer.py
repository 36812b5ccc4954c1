"""What we read from verl's trainer: its kind, the options of rollout.spec, and the rollout servers."""

from typing import Any

import transfer_queue
from omegaconf import OmegaConf

from rollout_spec.config import ConfigError
from rollout_spec.verl.settings import V1_TRAINER_ONLY


def require_v1_trainer() -> None:
    """Raise a ConfigError in any trainer but verl's V1 trainer, whatever its configuration says.

    The V1 trainer joins verl's TransferQueue before it makes replicas. The legacy trainers never do.
    """
    try:
        transfer_queue.get_client()
    except AssertionError:
        way_out = "run verl.trainer.main_ppo with trainer.use_v1=True"
        raise ConfigError(f"this is verl's legacy trainer: {way_out}. {V1_TRAINER_ONLY}") from None


def option(trainer: Any, name: str) -> Any:
    """A field of rollout.spec; None where rollout.spec is not used or has no such field."""
    spec = OmegaConf.select(trainer.config, "rollout.spec")
    return spec.get(name) if OmegaConf.is_dict(spec) else None


def servers(trainer: Any) -> list[Any]:
    """Handles of the rollout servers, one for each replica: SpecHttpServers where rollout.spec is used."""
    return [handle for manager in trainer._rollout_server_managers() for handle in manager.server_handles]


def num_ranks(trainer: Any) -> int:
    """The data-parallel ranks of each rollout server."""
    return OmegaConf.select(trainer.config, "actor_rollout_ref.rollout.data_parallel_size") or 1
