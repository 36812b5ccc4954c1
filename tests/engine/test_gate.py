"""The automatic gate in a real engine: it finds out what pays, and that it has changed."""

from __future__ import annotations

import time
from typing import Any

from rollout_spec.metrics import EngineCounters
from tests.engine.conftest import proposer_of

LENGTH = 440
PROMPTS = [[5, 6, 7, 8 + i] for i in range(4)]


def run(llm: Any, num_steps: int) -> EngineCounters:
    """Generate for at least so many steps; what the drafter counted."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    counters = EngineCounters()
    while counters.num_steps < num_steps:
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        counters.add(proposer_of(llm).take_counters())
    return counters


def test_drafting_stops_where_verification_turns_slow_and_comes_back(make_engine: Any) -> None:
    llm = make_engine({"batch_threshold": "auto", "num_speculative_tokens": 2})
    seconds = 0.0
    sampler = proposer_of(llm)._runner.rejection_sampler
    sampler.register_forward_pre_hook(lambda *_: time.sleep(seconds))

    before = run(llm, 300)
    assert before.num_drafts > 2 * before.num_steps  # of 4 rows, most draft
    assert before.gate_plain_seconds > 1.2 * before.gate_seconds
    assert before.num_steps_off_probe > 0

    seconds = 0.2
    turning = run(llm, 200)
    # A rollout without drafts is a few hundred steps; the loss was seen in its first 200.
    assert turning.num_drafts < 4 * 200
    slow = run(llm, 200)
    assert slow.num_drafts < 0.1 * slow.num_steps
    assert slow.num_steps_off_cost + slow.num_steps_off_guard > 0.8 * slow.num_steps

    seconds = 0.0
    run(llm, 1200)
    after = run(llm, 200)
    assert after.num_drafts > 2 * after.num_steps
    assert after.num_failed_steps == 0
