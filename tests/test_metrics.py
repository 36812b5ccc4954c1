from __future__ import annotations

import pytest

from rollout_spec.metrics import (
    EngineCounters,
    RequestCounters,
    RolloutReport,
    engine_summary,
    rollout_metrics,
)


def test_the_metrics_of_two_servers_by_hand() -> None:
    one = RolloutReport(
        engine=EngineCounters(num_steps=10, num_steps_on=4, num_draft_tokens=20, draft_seconds=0.02,
                              sum_min_survival=1.7, num_steps_off_cost=4, num_steps_off_probe=2,
                              num_guard_stops=1, gate_seconds=2.0,
                              gate_plain_seconds=3.0, gate_expected_seconds=1.0,
                              gate_expected_plain_seconds=1.25),
        requests=[
            RequestCounters(num_decoded_tokens=20, num_decode_steps=10, num_drafts=5, num_draft_tokens=20,
                            num_accepted_tokens=10),
        ],
        num_generated_tokens=21,
        rollout_seconds=3.0,
        num_interrupted=2,
        versions=[4, 5],
    )  # fmt: skip
    two = RolloutReport(
        engine=EngineCounters(num_steps=30, num_steps_on=30, draft_seconds=0.06, num_failed_steps=1),
        requests=[RequestCounters(num_decoded_tokens=10, num_decode_steps=10)],
        num_generated_tokens=11,
        rollout_seconds=2.0,
    )
    assert rollout_metrics([one, two]) == pytest.approx(
        {
            "rollout/spec_rollout_seconds": 3.0,
            "rollout/spec_generated_tokens": 32,
            "rollout/spec_num_interrupted": 2,
            "rollout/spec_first_version": 4,
            "rollout/spec_last_version": 5,
            "rollout/spec_load_imbalance": 21 / 16,
            "rollout/spec_num_drafts": 5,
            "rollout/spec_num_draft_tokens": 20,
            "rollout/spec_num_accepted_tokens": 10,
            "rollout/spec_num_failed_steps": 1,
            "rollout/spec_num_untracked_rows": 0,
            "rollout/spec_tokens_per_step": (32 - 2) / 20,
            "rollout/spec_acceptance_rate": 0.5,
            "rollout/spec_share_on": 34 / 40,
            "rollout/spec_draft_ms": 2.0,
            "rollout/spec_min_survival": 1.7 / 34,
            "rollout/spec_budget": 20 / 34,
            "rollout/spec_achieved_gain": 1.5,
            "rollout/spec_expected_gain": 1.25,
            "rollout/spec_share_off_threshold": 0.0,
            "rollout/spec_share_off_cost": 0.1,
            "rollout/spec_share_off_guard": 0.0,
            "rollout/spec_share_off_probe": 0.05,
            "rollout/spec_num_guard_stops": 1,
        }
    )


def test_an_engines_line_by_hand() -> None:
    engine = EngineCounters(
        num_steps=1000, num_steps_on=800, num_draft_tokens=4000, num_accepted_tokens=3000, draft_seconds=0.25,
        sum_min_survival=160.0, num_steps_off_cost=150, num_steps_off_probe=50, gate_seconds=4.0,
        gate_plain_seconds=5.0, gate_expected_seconds=4.0, gate_expected_plain_seconds=6.0,
    )  # fmt: skip
    assert engine_summary(engine) == (
        "acceptance_rate 0.75, share_on 0.8, draft_ms 0.25, min_survival 0.2, budget 5, "
        "achieved_gain 1.25, expected_gain 1.5, "
        "share_off_threshold 0, share_off_cost 0.15, share_off_guard 0, share_off_probe 0.05, "
        "num_guard_stops 0"
    )


def test_what_a_model_and_the_text_gave_by_hand() -> None:
    engine = EngineCounters(
        num_steps=30, model_seconds=0.06,
        num_draft_tokens=50, num_accepted_tokens=20, num_model_passes=60, num_model_passes_left_out=30,
        num_model_draft_tokens=40, num_model_accepted_tokens=18,
    )  # fmt: skip
    assert engine_summary(engine) == (
        "acceptance_rate 0.4, share_on 0, draft_ms 0, share_off_threshold 0, share_off_cost 0, "
        "share_off_guard 0, share_off_probe 0, num_guard_stops 0, num_model_passes 60, "
        "num_model_passes_left_out 30, model_ms 2, "
        "model_share 0.8, model_acceptance_rate 0.45, text_acceptance_rate 0.2"
    )


def test_the_reference_run_reports_its_rollout_only() -> None:
    report = RolloutReport(engine=None, requests=[], num_generated_tokens=7, rollout_seconds=1.0)
    assert rollout_metrics([report]) == {
        "rollout/spec_rollout_seconds": 1.0,
        "rollout/spec_generated_tokens": 7.0,
        "rollout/spec_num_interrupted": 0.0,
    }


def test_the_reference_run_of_a_model_that_drafts_reports_its_drafts() -> None:
    counts, aborted = RequestCounters(30, 12, 10, 30, 18), RequestCounters(10, 8, 4, 10, 2)
    metrics = rollout_metrics([RolloutReport(None, [counts], 42, 1.0, aborted), RolloutReport()])
    assert metrics == {
        "rollout/spec_rollout_seconds": 1.0,
        "rollout/spec_generated_tokens": 42.0,
        "rollout/spec_num_interrupted": 0.0,
        "rollout/spec_load_imbalance": 2.0,
        "rollout/spec_num_drafts": 14.0,
        "rollout/spec_num_draft_tokens": 40.0,
        "rollout/spec_num_accepted_tokens": 20.0,
        "rollout/spec_tokens_per_step": 2.0,
        "rollout/spec_acceptance_rate": 0.5,
    }


def test_what_a_server_served_in_two_windows_adds_up() -> None:
    counts = RequestCounters(6, 3, 2, 8, 3)
    total = RolloutReport()
    for version in (3, 4, 4):
        engine = EngineCounters(num_steps=5, draft_seconds=0.5)
        total.add(RolloutReport(engine, [counts], 7, 2.0, RequestCounters(1, 1), 1, [version]))
    assert total == RolloutReport(
        EngineCounters(num_steps=15, draft_seconds=1.5),
        [counts] * 3,
        21,
        6.0,
        RequestCounters(3, 3),
        3,
        [3, 4],
    )
    total.add(RolloutReport())
    assert total.engine is not None and total.engine.num_steps == 15


def test_nothing_served_gives_no_ratio() -> None:
    report = RolloutReport(engine=EngineCounters(), requests=[], num_generated_tokens=0, rollout_seconds=0.0)
    assert not any("share" in name or "per_step" in name for name in rollout_metrics([report]))


def test_aborted_requests_count_in_the_sums() -> None:
    finished = RequestCounters(num_decoded_tokens=6, num_decode_steps=3, num_drafts=2, num_draft_tokens=8,
                               num_accepted_tokens=3)  # fmt: skip
    aborted = RequestCounters(num_decoded_tokens=4, num_decode_steps=2, num_drafts=1, num_draft_tokens=2,
                              num_accepted_tokens=2)  # fmt: skip
    metrics = rollout_metrics([RolloutReport(EngineCounters(), [finished], 12, 1.0, aborted)])
    assert metrics["rollout/spec_tokens_per_step"] == 2
    assert metrics["rollout/spec_acceptance_rate"] == 0.5
    assert metrics["rollout/spec_num_drafts"] == 3
