"""The rollout servers' reports as metrics for verl's stream."""

from __future__ import annotations

from typing import Any

import ray

from rollout_spec.metrics import RolloutReport, rollout_metrics
from rollout_spec.verl.trainer import option, servers


def take_reports(trainer: Any) -> list[RolloutReport]:
    """What every rollout server served of the versions replaced since the last call, one report each.

    Nothing where rollout.spec is not used.
    """
    if option(trainer, "method") is None:
        return []
    return ray.get([handle.take_rollout_report.remote() for handle in servers(trainer)])


def end_validation(trainer: Any) -> None:
    """Tell every rollout server that a validation has ended."""
    if option(trainer, "method") is not None:
        ray.get([handle.end_validation.remote() for handle in servers(trainer)])


def step_metrics(reports: list[RolloutReport]) -> dict[str, float]:
    """The metrics of one training step: ours, and verl's own of speculative decoding."""
    from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

    metrics = rollout_metrics(reports) if reports else {}
    requests = [request for report in reports for request in report.requests]
    return metrics | compute_spec_decode_metrics(
        [request.num_draft_tokens for request in requests],
        [request.num_accepted_tokens for request in requests],
        [request.num_drafts for request in requests],
    )
