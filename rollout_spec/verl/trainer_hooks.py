"""Hooks into verl's V1 trainer: rows get names, servers are watched, metrics logged, texts kept."""

import logging
from typing import Any

import ray

from rollout_spec.metrics import rollout_metrics
from rollout_spec.patches import PatchError, when_imported, wrap
from rollout_spec.verl import trainer_history as history
from rollout_spec.verl.changes import TRAINER
from rollout_spec.verl.row_names import RowNames
from rollout_spec.verl.settings import ROLLOUT, value
from rollout_spec.verl.trainer_servers import Watch, servers, watch_servers

logger = logging.getLogger(f"verl.{__name__}")  # which verl shows in its trainer


def install() -> None:
    """Called in the trainer's process, when it asks for its replica class."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    watch_servers()
    when_imported("uni_agent.framework.entry", _name_sessions)
    wrap(PPOTrainer, "fit", TRAINER)(_fit)
    wrap(PPOTrainer, "_compute_metrics", TRAINER)(_compute_metrics)
    wrap(PPOTrainer, "_validate", TRAINER)(_validate)
    wrap(PPOTrainer, "_save_checkpoint", TRAINER)(_save_checkpoint)


def _fit(fit: Any, self: Any, agent_loop_manager: Any, *args: Any, **kwargs: Any) -> None:
    if handles := servers(self):
        _name_rows(agent_loop_manager, RowNames(value(self.config, f"{ROLLOUT}.seed")))
        self.replay_buffer.rollout_spec_watch, self.rollout_spec_is_new = Watch(handles), True
    history.load_history(self)  # not when verl loads the checkpoint: separate engines start after that
    history.share_history(self)  # there is nothing yet; from now on the servers collect
    fit(self, agent_loop_manager, *args, **kwargs)


def _compute_metrics(
    compute: Any, self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    result = compute(self, batch, metrics, *args, **kwargs)
    if reports := ray.get([handle.take_rollout_report.remote() for handle in servers(self)]):
        metrics.update(rollout_metrics(reports))
        _say_uncounted(self, metrics)
    history.share_history(self)
    return result


def _validate(validate: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Validate as verl does; the servers do not count its requests towards a step."""
    handles = servers(self)
    ray.get([handle.begin_validation.remote() for handle in handles])
    try:
        return validate(self, *args, **kwargs)
    finally:
        ray.get([handle.end_validation.remote() for handle in handles])


def _save_checkpoint(save: Any, self: Any) -> None:
    history.save_history(self)  # first, because verl's last act is to declare the checkpoint complete
    save(self)
    history.remove_orphans(self)


def _name_sessions(_: Any) -> None:
    """uni-agent is here; one that does not fit costs the rows' names."""
    try:
        from rollout_spec.verl import uni_agent

        uni_agent.install()
    except (PatchError, ImportError, AttributeError) as error:
        logger.warning("rollout_spec: uni-agent's sessions are named by their first prompts: %s", error)


def _name_rows(manager: Any, names: RowNames) -> None:
    """Let an agent loop manager of any class get batches whose rows have names."""
    generate = manager.generate_sequences
    manager.generate_sequences = lambda prompts, *args, **more: generate(names.add_to(prompts), *args, **more)


def _say_uncounted(trainer: Any, metrics: dict[str, Any]) -> None:
    """After the first step, whose responses somebody has made."""
    if vars(trainer).pop("rollout_spec_is_new", False) and not metrics["rollout/spec_generated_tokens"]:
        logger.warning(
            "rollout_spec: verl's rollout servers have seen no request of the first step, so rollout/spec_* "
            "stay empty: the agent loop manager sends its requests past them, as through a proxy"
        )
