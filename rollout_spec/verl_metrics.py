"""Adds the rollout servers' reports to the metrics that verl's trainer logs."""

from __future__ import annotations

import functools
from typing import Any

from rollout_spec.metrics import RolloutReport, rollout_metrics
from rollout_spec.patches import Patch, replace_function
from rollout_spec.verl_trainer import option, servers

_METRICS = Patch(
    name="verl-rollout-metrics",
    reason="verl aggregates draft counts for MTP only, per request, and not in its asynchronous modes",
    upstream="verl/trainer/ppo/v1/trainer_base.py, PPOTrainer._compute_metrics",
    until="verl's trainer takes metrics from its rollout servers",
)
_VALIDATE = Patch(
    name="verl-validation-metrics",
    reason="a validation's rollout would be counted into the next training step's",
    upstream="verl/trainer/ppo/v1/trainer_base.py, PPOTrainer._validate",
    until="the patch verl-rollout-metrics goes",
)

_TAKEN = "_rollout_spec_taken_reports"


def install() -> None:
    """Wrap the V1 trainer's metrics. Called in the trainer's process, when it asks for its replica class."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    compute, validate = PPOTrainer._compute_metrics, PPOTrainer._validate

    @functools.wraps(compute)
    def compute_with_rollout(
        self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = compute(self, batch, metrics, *args, **kwargs)
        # A validation comes between a step and its metrics, so it has taken the step's reports already.
        metrics.update(_metrics(self.__dict__.pop(_TAKEN, []) + _take_reports(self)))
        return result

    @functools.wraps(validate)
    def validate_apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _TAKEN, _take_reports(self))
        result = validate(self, *args, **kwargs)
        _take_reports(self)
        return result

    signature = "(self, batch: transfer_queue.metadata.KVBatchMeta, metrics, timing_raw, global_steps, epoch)"
    replace_function(
        PPOTrainer, "_compute_metrics", compute_with_rollout, patch=_METRICS, expected_signature=signature
    )
    replace_function(PPOTrainer, "_validate", validate_apart, patch=_VALIDATE)


def _take_reports(trainer: Any) -> list[RolloutReport]:
    """What every rollout server served since the last call; nothing where rollout.spec is not used."""
    import ray

    if option(trainer, "method") is None:
        return []
    return ray.get([handle.take_rollout_report.remote() for handle in servers(trainer)])


def _metrics(reports: list[RolloutReport]) -> dict[str, float]:
    from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

    metrics = rollout_metrics(reports) if reports else {}
    requests = [request for report in reports for request in report.requests]
    if any(report.engine is not None for report in reports):
        metrics |= compute_spec_decode_metrics(
            [request.num_draft_tokens for request in requests],
            [request.num_accepted_tokens for request in requests],
            [request.num_drafts for request in requests],
        )
    return metrics
