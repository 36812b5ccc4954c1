"""Entry point of group `verl.plugins`: verl imports this module in every one of its processes."""

from __future__ import annotations

import traceback


def _activate() -> None:
    from hydra.core.plugins import Plugins

    from rollout_spec import verl_cpu
    from rollout_spec.hydra_plugin import RolloutSpecSearchPath

    Plugins.instance().register(RolloutSpecSearchPath)
    verl_cpu.activate()


try:
    _activate()
except Exception as error:
    # verl logs an exception of a plugin at DEBUG level and carries on without it.
    traceback.print_exc()
    raise SystemExit(f"rollout_spec: the verl plugin failed: {error}") from error
