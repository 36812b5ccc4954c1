"""Metrics: sums of counters over engines and windows, and what is logged of them."""

import pytest

from rollout_spec import metrics
from rollout_spec.metrics import PREFIX, EngineCounters, RequestCounters, RolloutReport


def logged(*reports):
    found = metrics.rollout_metrics(reports)
    assert all(name.startswith(PREFIX) and type(value) is float for name, value in found.items())
    return {name.removeprefix(PREFIX): value for name, value in found.items()}


def test_the_metrics_of_two_servers_by_hand():
    one = RolloutReport(
        engine=EngineCounters(num_steps=10, num_steps_on=4, num_draft_tokens=20, draft_seconds=0.02,
                              num_steps_off_cost=4, num_steps_off_probe=2, num_timed_steps=8,
                              timed_seconds=4.0, error_seconds=0.5, believed_plain_seconds=2.0,
                              num_drafted_steps=4, drafted_seconds=2.0, drafted_as_plain_seconds=3.0,
                              plain_seconds=2.0, believed_of_plain_seconds=4.0),
        requests=RequestCounters(num_decoded_tokens=12, num_decode_steps=6, num_drafts=3, num_draft_tokens=13,
                                 num_accepted_tokens=6),
        num_generated_tokens=21,
        rollout_seconds=3.0,
        # What a stop string ended counts too.
        aborted=RequestCounters(num_decoded_tokens=8, num_decode_steps=4, num_drafts=2, num_draft_tokens=7,
                                num_accepted_tokens=4),
        num_interrupted=2,
    )  # fmt: skip
    engine = EngineCounters(num_steps=30, num_steps_on=30, draft_seconds=0.06, num_failed_steps=1)
    two = RolloutReport(engine, RequestCounters(num_decoded_tokens=10, num_decode_steps=10), 11, 2.0)
    idle = RolloutReport()  # it trains
    assert logged(one, two, idle) == pytest.approx(
        {
            "rollout_seconds": 3.0, "generated_tokens": 32, "num_interrupted": 2, "load_imbalance": 21 / 16,
            "num_drafts": 5, "num_draft_tokens": 20, "num_accepted_tokens": 10, "num_failed_steps": 1,
            "tokens_per_step": (32 - 2) / 20, "acceptance_rate": 0.5, "share_on": 34 / 40, "draft_ms": 2.0,
            "achieved_gain": 0.75,  # 1.5, but plain steps took half of what the gate believes
            "plain_step_ms": 250.0, "drafted_step_ms": 500.0, "gate_error": 0.125,
            "share_off_threshold": 0.0, "share_off_cost": 0.1, "share_off_probe": 0.05,
            **dict.fromkeys(("num_resumed", "num_untracked_rows"), 0),
            **dict.fromkeys(("num_texts_left_out", "num_samples_dropped"), 0),
        }
    )  # fmt: skip


def test_an_engines_line_by_hand():
    engine = EngineCounters(
        num_steps=1000, num_steps_on=800, num_draft_tokens=4000, num_accepted_tokens=3000, draft_seconds=0.25,
        num_steps_off_cost=150, num_steps_off_probe=50, drafted_seconds=4.0, drafted_as_plain_seconds=5.0,
        num_model_passes=60, num_model_passes_left_out=30, num_model_draft_tokens=3000,
        num_model_accepted_tokens=2850,
    )  # fmt: skip
    assert metrics.engine_summary(engine) == (
        "acceptance_rate 0.75, share_on 0.8, draft_ms 0.25, achieved_gain 1.25, "
        "share_off_threshold 0, share_off_cost 0.15, share_off_probe 0.05, num_model_passes 60, "
        "num_model_passes_left_out 30, model_share 0.75, model_acceptance_rate 0.95"
    )


def test_the_reference_run_reports_its_rollout_and_the_drafts_of_a_model():
    plain = {"rollout_seconds": 1.0, "generated_tokens": 42, "num_interrupted": 0}
    assert logged(RolloutReport(num_generated_tokens=42, rollout_seconds=1.0)) == plain
    counts, aborted = RequestCounters(30, 12, 10, 30, 18), RequestCounters(10, 8, 4, 10, 2)
    drafts = {"num_drafts": 14, "num_draft_tokens": 40, "num_accepted_tokens": 20}
    ratios = {"tokens_per_step": 2, "acceptance_rate": 0.5}
    assert logged(RolloutReport(None, counts, 42, 1.0, aborted), RolloutReport()) == plain | drafts | ratios


def test_what_a_server_served_in_two_windows_adds_up():
    counts, total = RequestCounters(6, 3, 2, 8, 3), RolloutReport()
    for _ in range(3):
        engine = EngineCounters(num_steps=5, draft_seconds=0.5)
        total.add(RolloutReport(engine, counts, 7, 2.0, RequestCounters(1, 1), 1))
    total.add(RolloutReport())
    engine = EngineCounters(num_steps=15, draft_seconds=1.5)
    assert total == RolloutReport(engine, RequestCounters(18, 9, 6, 24, 9), 21, 6.0, RequestCounters(3, 3), 3)
