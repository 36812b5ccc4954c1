"""What is read from verl's trainer: the options of rollout.spec, and the rollout servers."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf


def option(trainer: Any, name: str) -> Any:
    """A field of rollout.spec; None where rollout.spec is not used or has no such field."""
    spec = OmegaConf.select(trainer.config, "rollout.spec")
    return spec.get(name) if OmegaConf.is_dict(spec) else None


def servers(trainer: Any) -> list[Any]:
    """Handles of the rollout servers, SpecHttpServers where rollout.spec is used; one for each replica."""
    return [handle for manager in trainer._rollout_server_managers() for handle in manager.server_handles]


def num_ranks(trainer: Any) -> int:
    """The data-parallel ranks of each rollout server."""
    return OmegaConf.select(trainer.config, "actor_rollout_ref.rollout.data_parallel_size") or 1
