"""Entry point of group `verl.plugins`: verl imports this module in every one of its processes."""

from __future__ import annotations

import traceback
from typing import Any

from rollout_spec.patches import when_imported


def _activate() -> None:
    from rollout_spec import hydra_plugin, verl_cpu

    hydra_plugin.install()
    verl_cpu.activate()
    when_imported("verl.workers.rollout.replica", _register_replica)


def _register_replica(module: Any) -> None:
    module.RolloutReplicaRegistry.register("vllm", _load_replica)


def _load_replica() -> Any:
    """Called where replicas are made: in the trainer's process."""
    from rollout_spec import verl_metrics
    from rollout_spec.verl_server import SpecReplica

    verl_metrics.install()
    return SpecReplica


try:
    _activate()
except Exception as error:
    # verl logs an exception of a plugin at DEBUG level and carries on without it.
    traceback.print_exc()
    raise SystemExit(f"rollout_spec: the verl plugin failed: {error}") from error
