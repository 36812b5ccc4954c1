"""Hooks into verl's V1 trainer: metrics and history at the end of a step, history in its checkpoints."""

import functools
from typing import Any

from rollout_spec.metrics import rollout_metrics
from rollout_spec.patches import Patch, wrap
from rollout_spec.verl.deaths import call_and_watch
from rollout_spec.verl.trainer import take_reports, validation
from rollout_spec.verl.trainer_history import load_history, remove_orphans, save_history, share_history

_PATCH = Patch(
    name="verl-trainer-hooks",
    reason="verl counts drafts for MTP only, and its one class of checkpoint callbacks is the user's own",
    upstream="verl/trainer/ppo/v1/trainer_base.py, PPOTrainer",
    until="verl calls back at the start, at the end of a step, after a validation and before a save",
)
_DEATHS = Patch(
    name="verl-watch-servers",
    reason="a sender of weights waits forever for an engine that has died",
    upstream="verl/checkpoint_engine/base.py, CheckpointEngineManager.update_weights",
    until="verl gives up a weight sync whose receiver is dead",
)


def install() -> None:
    """Called in the trainer's process, when it asks for its replica class."""
    _watch_weight_syncs()
    _wrap_trainer()


def _watch_weight_syncs() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineManager

    @wrap(CheckpointEngineManager, "update_weights", _DEATHS)
    def update_weights(update: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        replicas = [each for each in self.replicas if getattr(each, "is_watched", False)]
        servers = [server for replica in replicas for server in replica.servers]
        call = functools.partial(update, self, *args, **kwargs)
        return call_and_watch(servers, call) if servers else call()


def _wrap_trainer() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    @wrap(PPOTrainer, "_compute_metrics", _PATCH)
    def compute_metrics(
        compute: Any, self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = compute(self, batch, metrics, *args, **kwargs)
        if reports := take_reports(self):
            metrics.update(rollout_metrics(reports))
        share_history(self)
        return result

    @wrap(PPOTrainer, "_validate", _PATCH)
    def validate_apart(validate: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        """Servers do not count its requests towards a step."""
        with validation(self):
            return validate(self, *args, **kwargs)

    @wrap(PPOTrainer, "_save_checkpoint", _PATCH)
    def save_checkpoint(save: Any, self: Any) -> None:
        save_history(self)  # first, because verl's last act is to declare the checkpoint complete
        save(self)
        remove_orphans(self)

    @wrap(PPOTrainer, "fit", _PATCH)
    def fit_with_history(fit: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        load_history(self)  # not when verl loads the checkpoint: separate engines start after that
        share_history(self)  # there is nothing yet; it tells the servers to collect from now on
        fit(self, *args, **kwargs)
