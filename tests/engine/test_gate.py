"""The automatic gate in a real engine: it finds out what pays, and that it has changed."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_spec.metrics import EngineCounters
from tests.engine.conftest import proposer_of
from tests.engine.test_life_cycle import generate, greedy

PROMPTS = [[5, 6, 7, 8 + i] for i in range(4)]
WITHIN = 200  # steps in which drafting must have stopped
STEP_S, DRAFT_TOKEN_S = 0.01, 0.0002  # what a step takes here, and more for each draft token


class Watched:
    """An engine whose steps take what is said here, on any machine, and what each of them drafted."""

    def __init__(self, make_engine: Any) -> None:
        self.llm = make_engine({"batch_threshold": "auto", "num_speculative_tokens": 2}, fresh=True)
        self.proposer = proposer_of(self.llm)
        self.seconds = 0.0  # that any verification takes more
        self.num_drafts: list[int] = []  # of each engine step
        now, num_draft_tokens, propose = 0.0, 0, self.proposer.propose
        self.proposer._drafter._clock = lambda: now

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal now, num_draft_tokens
            now += STEP_S + DRAFT_TOKEN_S * num_draft_tokens + self.seconds * bool(num_draft_tokens)
            drafts = propose(*args, **kwargs)
            num_draft_tokens = sum(map(len, drafts))
            self.num_drafts.append(sum(map(bool, drafts)))
            return drafts

        self.proposer.propose = timed

    def run(self, num_steps: int) -> tuple[list[int], EngineCounters]:
        """Generate for at least so many steps: the drafts of each, and what the drafter counted."""
        begin, counters = len(self.num_drafts), EngineCounters()
        while counters.num_steps < num_steps:
            generate(self.llm, PROMPTS, greedy(440))
            counters.add(self.proposer.take_counters())
        return self.num_drafts[begin:], counters

    def run_until_it_drafts(self) -> EngineCounters:
        """What the first of several runs counted in which most of the four rows drafted."""
        for _ in range(10):
            _, counters = self.run(300)
            if counters.num_drafts > 2 * counters.num_steps:
                return counters
        pytest.fail(f"it does not draft: {counters}")


def test_drafting_stops_where_verification_turns_slow_and_comes_back(make_engine: Any) -> None:
    engine = Watched(make_engine)
    before = engine.run_until_it_drafts()
    assert before.gate_plain_seconds > 1.2 * before.gate_seconds
    assert before.num_steps_off_probe > 0

    engine.seconds = 0.2
    drafts, _ = engine.run(2 * WITHIN)
    # What is left are the few steps in which the gate looks whether it has changed again.
    assert sum(map(bool, drafts[WITHIN:])) < 0.1 * len(drafts[WITHIN:])
    _, slow = engine.run(WITHIN)
    assert slow.num_drafts < 0.1 * slow.num_steps
    assert slow.num_steps_off_cost > 0.8 * slow.num_steps

    engine.seconds = 0.0
    assert engine.run_until_it_drafts().num_failed_steps == 0
