"""300 sessions of agents at a time, whose text is given, in an engine that is made of time."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_spec.config import SpecConfig
from rollout_spec.predict.engine import Cluster, Engine
from rollout_spec.predict.load import requests_of
from rollout_spec.predict.simulate import rollout
from rollout_spec.predict.step_times import StepTimes
from rollout_spec.trace import Rollout
from rollout_spec.verl.sample_calls import number_of_prompt, prompt_digest


def sessions(num_prompts=75, num_samples=4, num_tokens=90):
    """Three turns each. Siblings say parts of one text, of which nine in ten tokens are right."""
    rng, turns = np.random.default_rng(0), np.array([[0, 30], [30, 60], [60, num_tokens]], np.int32)
    for number in range(num_prompts):
        text = rng.integers(0, 50_000, num_tokens + 40 * num_samples, np.int32)
        parts = [text[40 * i :][:num_tokens].copy() for i in range(num_samples)]
        for part in parts:
            part[rng.random(num_tokens) < 0.1] = 50_000
        yield Rollout(str(number), 0, text[::-1][:20].copy(), parts, turns=[turns] * num_samples)


def named(request, group, sample):
    """Every turn has these names."""
    name = request.name.replace(request.sample, sample)
    later = request.next_turn and named(request.next_turn, group, sample)
    return dataclasses.replace(request, name=name, sample=sample, group=group, next_turn=later)


def share_with_a_draft(requests):
    """Of the rows; and how many turns went on where the turn before ended."""
    engine = Engine(SpecConfig(batch_threshold=300), StepTimes([(1, 0.01, 1.0)]), Cluster(1, 300))
    rollout([[engine]], [requests])
    counters = engine.drafter.take_counters()
    return counters.num_drafts / counters.num_row_steps, counters.num_resumed


def test_names_by_first_prompts_draft_as_names_by_rows_do():
    by_row = requests_of(list(sessions()), None)
    balancer, by_prompt = SimpleNamespace(), []
    for request in by_row:
        digest, number = number_of_prompt(
            balancer, request.sample, prompt_digest(request.prompt_token_ids.tolist())
        )
        by_prompt.append(named(request, digest, f"{digest}.{number}"))
    (rows, *resumed), (prompts, *resumed_by_prompt) = map(share_with_a_draft, (by_row, by_prompt))
    print(f"rows with a draft: {rows:.3f} named by rows, {prompts:.3f} by first prompts")
    assert len(by_row) == 300 and resumed == resumed_by_prompt == [2 * 300]
    assert 0.1 < rows == pytest.approx(prompts, abs=0.005)
