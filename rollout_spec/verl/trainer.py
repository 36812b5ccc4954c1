"""What we ask verl's trainer: its kind, and its rollout servers; and what we ask those of a step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
import transfer_queue

from rollout_spec.config import ConfigError
from rollout_spec.metrics import RolloutReport
from rollout_spec.verl.settings import V1_TRAINER_ONLY, value


def require_v1_trainer() -> None:
    """Raise a ConfigError in any trainer but verl's V1 trainer, whatever its configuration says.

    The V1 trainer joins verl's TransferQueue before it makes replicas. The legacy trainers never do.
    """
    try:
        transfer_queue.get_client()
    except AssertionError:
        way_out = "run verl.trainer.main_ppo with trainer.use_v1=True"
        raise ConfigError(f"this is verl's legacy trainer: {way_out}. {V1_TRAINER_ONLY}") from None


def servers(trainer: Any) -> list[Any]:
    """Handles of the rollout servers, `SpecHttpServer`s, one for each replica; [] without rollout.spec."""
    if value(trainer.config, "rollout.spec.method") is None:
        return []
    return [handle for manager in trainer._rollout_server_managers() for handle in manager.server_handles]


def take_reports(trainer: Any) -> list[RolloutReport]:
    """From each rollout server, the windows that have ended since the last call."""
    return ray.get([handle.take_rollout_report.remote() for handle in servers(trainer)])


@contextlib.contextmanager
def validation(trainer: Any) -> Iterator[None]:
    """Tell every rollout server that a validation begins, and that it has ended."""
    handles = servers(trainer)
    ray.get([handle.begin_validation.remote() for handle in handles])
    try:
        yield
    finally:
        ray.get([handle.end_validation.remote() for handle in handles])
