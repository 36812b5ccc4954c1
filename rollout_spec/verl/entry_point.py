"""Entry point of group `verl.plugins`: verl imports this module in every one of its processes."""

import functools
import os
import pkgutil
import sys
import traceback
from typing import Any

from rollout_spec.patches import PatchError, when_imported
from rollout_spec.verl import settings

ASKED_VARIABLE = "ROLLOUT_SPEC_ASKED"  # set by the group `rollout.spec`, in Hydra's job and Ray's processes


def activate() -> None:
    """Load the parts; where that fails, a run that asked for them ends, and any other goes on without."""
    try:
        _load()
    except Exception as error:
        # verl logs an exception of a plugin at DEBUG level and carries on without it.
        traceback.print_exc()
        failure = settings.plugin_failure = f"the verl plugin failed: {error}"
        # This process, or the driver that started it, was given `rollout.spec`.
        if ASKED_VARIABLE in os.environ or any("rollout.spec" in each for each in sys.argv):
            raise SystemExit(f"rollout_spec: {failure}") from error
        print(f"rollout_spec: {failure}; runs without rollout.spec go on as they are", file=sys.stderr)


def _load() -> None:
    from rollout_spec.verl import hydra_plugin

    hydra_plugin.install()
    when_imported("verl.utils.device", hydra_plugin.check_before_ray)
    replicas = "verl.workers.rollout.replica"
    when_imported(replicas, lambda module: module.RolloutReplicaRegistry.register("vllm", _load_replica))
    when_imported("verl.workers.rollout.router", _register_router)
    when_imported("verl.workers.rollout.llm_server", functools.partial(_patch, "client:patch_clients"))
    loops = "verl.experimental.agent_loop.agent_loop"
    when_imported(loops, functools.partial(_patch, "row_names:patch_agent_loops"))


def _register_router(module: Any) -> None:
    """Where routers have names: in verl's branches from before `router_config_path`."""
    if hasattr(module, "LoadBalancerRegistry"):
        from rollout_spec.verl.router import GroupRouter

        module.LoadBalancerRegistry.register(settings.ROUTER_NAME)(GroupRouter)


def _patch(by: str, module: Any) -> None:
    """Let a function of ours patch a module of verl's. Where that fails, requests have no names of ours."""
    try:
        pkgutil.resolve_name(f"rollout_spec.verl.{by}")(module)
    except (PatchError, AttributeError) as error:
        print(f"rollout_spec: {error}", file=sys.stderr)


def _load_replica() -> Any:
    """Called where replicas are made: in the trainer's process."""
    from rollout_spec.verl import trainer_hooks
    from rollout_spec.verl.server import SpecReplica

    trainer_hooks.install()
    return SpecReplica


activate()
