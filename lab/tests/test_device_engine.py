"""A simulated device's engine: by hand what its KV cache holds, and what a model that drafts in it costs."""

import dataclasses

import numpy as np
import pytest

from rollout_spec.config import SpecConfig
from rollout_spec.predict.engine import Cluster, step_together
from rollout_spec.predict.load import requests_of
from rollout_spec.predict.simulate import rollout
from rollout_spec.predict.step_times import StepTimes
from rollout_spec.trace import Proposals
from rollout_spec_lab.roofline.engine import Cache, CachedEngine, ModelEngine, SimulatedModel
from tests.test_simulate import BY_HAND, FLAT, OFF, noise, of_group, rollouts

MODEL = SimulatedModel(2, StepTimes.parse("1:0.125"))


def cached(num_tokens, max_num_seqs, config=OFF, times=FLAT, row_tokens=0.0):
    cache = Cache(num_tokens, lambda num_draft_tokens: row_tokens)
    return CachedEngine(config, times, Cluster(1, max_num_seqs), cache)


def served(requests, engine):
    rollout([[engine]], [requests])
    assert not engine.has_work
    return engine.total


def right_model(response, num_tokens):
    """The drafts of one that is always right."""
    ahead = np.append(response, np.full(num_tokens, -1, np.int32))
    tokens = np.lib.stride_tricks.sliding_window_view(ahead, num_tokens)[: len(response)]
    return Proposals(tokens, np.full(tokens.shape, 9, np.float32))


def modelled():
    """One request of 5 + 6 tokens that nothing but its model knows."""
    [rollout] = noise(1, 1, 6)
    proposals = [right_model(response, MODEL.num_tokens) for response in rollout.responses]
    prompt = rollout.prompt_token_ids[:5]
    return requests_of([dataclasses.replace(rollout, prompt_token_ids=prompt, proposals=proposals)], None)


def drafted(config):
    cache = Cache(100, lambda num_draft_tokens: 0.0)
    engine = ModelEngine(config, BY_HAND, Cluster(1, 1), cache, MODEL)
    return served(modelled(), engine)


def test_a_model_alone_drafts_in_every_step_by_hand():
    run = drafted(OFF)
    # The prompt and the row; then the row with two draft tokens, and with the one that there is room for.
    assert run.seconds == (5 + 1) + 3 + 2 + 3 * 2 * 0.125
    assert (run.num_steps, run.num_draft_tokens, run.num_accepted_tokens) == (3, 3, 3)


def test_a_model_beside_the_index_makes_its_first_pass_while_the_gate_is_closed():
    closed = drafted(SpecConfig(batch_threshold=0))
    assert closed.seconds == (5 + 6) + 6 * 0.125
    assert (closed.num_steps, closed.num_draft_tokens) == (6, 0)
    opened = drafted(SpecConfig(batch_threshold=1))
    # The gate says in a step that it is open, and the model drafts in the next.
    assert (opened.num_steps, opened.num_draft_tokens) == (4, 2)
    assert opened.seconds == (5 + 1) + 1 + 3 + 1 + (1 + 3 * 2) * 0.125


def test_a_full_cache_sends_the_newest_request_back_to_the_queue():
    """Two rows of 5 tokens fit, with a token each, and of 6, but not of 7."""
    full, roomy, tiny = cached(14, 2, times=BY_HAND), cached(1000, 2, times=BY_HAND), cached(3, 4)
    run = served(of_group(5, 4, 3), full)
    # Alone the first row ends; the second comes back with 5 + 2 tokens, of which the prompt is cached.
    assert run.seconds == (5 + 2) + 2 + 1 + 1 + (2 + 1)
    assert (run.num_tokens, full.num_preemptions) == (7, 1)
    run = served(of_group(5, 4, 3), tiny)  # one row has more tokens: it runs alone
    assert (run.num_tokens, run.num_steps) == (7, 7)
    assert served(of_group(5, 4, 3), roomy).seconds == (5 + 2) + 2 + 2 + 1
    assert roomy.num_preemptions == 0


@pytest.mark.parametrize(("row_tokens", "num_steps"), [(3, 4), (4, 5), (9, 7)])
def test_fewer_requests_run_where_each_keeps_states(row_tokens, num_steps):
    """Beside its tokens each row takes some of the cache: both run, the second goes back, or waits."""
    run = served(of_group(5, 4, 3), cached(22, 2, row_tokens=row_tokens))
    assert (run.num_tokens, run.num_steps) == (7, num_steps)


def test_the_newest_request_goes_back_wherever_its_row_is():
    """The first ends at once, and the last row takes its place."""
    requests = of_group(5, 1, 6, 9)
    engine = cached(18, 3)
    engine.enqueue(requests)
    while engine.num_preemptions == 0:
        step_together([engine])
    assert (engine._queue[0], engine._nums_done) == (requests[2], {requests[2].name: 4})
    assert engine.total.num_tokens == 1 + 4 + 4 + 1


@pytest.mark.parametrize("threshold", [64, "auto"])
def test_requests_that_come_back_are_drafted_for_and_lose_nothing(threshold):
    requests = requests_of(rollouts(), None)
    engine = cached(1500, 16, SpecConfig(batch_threshold=threshold))
    run = served(requests, engine)
    assert run.num_tokens == sum(len(request.response) for request in requests)
    assert engine.num_preemptions > 10
    assert run.num_accepted_tokens > 0.2 * run.num_tokens
