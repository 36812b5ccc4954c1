"""What the gate learns of steps: a fit that is judged by what it expects. The gates are in test_gate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.drafting.gate.step import EndedStep
from rollout_spec.drafting.gate.step_seconds import FIRST_STEPS, MEMORY, ODD_STEPS, STEPS_PER_FIT, StepSeconds


def step(num_verified, num_prompt=0, *, context=0, rows=4, passes=0, drafted=None):
    has_drafts = num_verified > rows if drafted is None else drafted
    work = (num_verified + num_prompt, num_prompt, has_drafts, None)
    return EndedStep(*work, rows, context, rows, num_passes=passes)


def learned(steps, seconds, noise=0.0, pads_drafts=False):
    found, rng = StepSeconds(pads_drafts), np.random.default_rng(0)
    for each in steps:
        found.learn(each, seconds(each) * rng.lognormal(0.0, noise))
    return found


def sizes(num):
    """Steps, half of them without drafts, a third of them with a prompt."""
    rng, steps = np.random.default_rng(1), list[EndedStep]()
    for i, context in enumerate(rng.integers(0, 100_000, num).tolist()):
        num_verified = 4 if i % 2 else int(rng.integers(4, 64))
        steps.append(step(num_verified, int(rng.integers(1, 4000)) * (i % 3 == 0), context=context))
    return steps


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize(
    "seconds",
    [
        lambda s: 0.01 + 1e-5 * max(0, s.num_tokens - 256),  # flat until the device is full
        lambda s: 0.02 + 2e-3 * s.num_tokens,
        lambda s: 0.01 + 0.004 * (s.num_tokens > 32) + 0.004 * (s.num_tokens > 64) + 5e-6 * s.num_tokens,
        lambda s: 0.01 + 1e-7 * s.num_context,
        lambda s: 0.01 + 4e-5 * s.num_prompt_tokens + 0.003 * s.has_drafts,
        lambda s: 0.01 + 1e-6 * s.num_tokens + 2e-4 * (s.num_tokens - s.num_prompt_tokens),
    ],
)
def test_what_steps_take_is_found_again(seconds, noise):
    found = learned(sizes(1500), seconds, noise)
    for wanted in (step(4), step(16, context=50_000), step(48, context=1000), step(40, 3000)):
        num_verified = wanted.num_tokens - wanted.num_prompt_tokens
        expected = pytest.approx(seconds(wanted), rel=0.06 + noise / 2)
        alone, beside = found.expected(wanted, num_verified), found.expected(wanted, [5, num_verified])[1]
        assert alone == beside == expected


def test_a_pass_of_a_model_has_a_time_of_its_own():
    rng = np.random.default_rng(3)
    steps = [step(int(rng.integers(4, 40)), passes=int(rng.integers(1, 4))) for _ in range(600)]
    found = learned(steps, lambda s: 0.01 + 0.002 * s.num_passes, 0.05)
    assert found.expected_pass(4) == pytest.approx(0.002, rel=0.1)


def test_where_drafts_are_padded_plain_steps_may_take_longer():
    steps = [step(4), *[step(20)] * 9] * 60
    found = learned(steps, lambda s: 0.02 if s.has_drafts else 0.1, pads_drafts=True)
    assert found.expected(step(20), 20) == pytest.approx(0.02, rel=0.05)
    assert found.expected(step(4), 4) == pytest.approx(0.1, rel=0.1)


def test_nothing_is_believed_before_plain_steps_were_seen_or_many_others():
    """A step that is far off what was expected is no plain step that says something."""
    found = StepSeconds()
    for each in (step(20), *[step(4, 500)] * FIRST_STEPS, *[step(4)] * (FIRST_STEPS - 1)):
        found.learn(each, 0.1)
        assert not found.is_known
    found.learn(step(4), 1.0)
    assert not found.is_known
    found.learn(step(4, 4), 0.1)  # where requests come and go in every step, hardly one is without a prompt
    assert found.is_known
    others = StepSeconds()
    for _ in range(MEMORY):
        assert not others.is_known
        others.learn(step(20), 0.1)
    assert others.is_known


@pytest.mark.parametrize("times", [1.6, 1 / 1.6, 5, 1 / 5])
def test_an_engine_that_becomes_slower_or_faster_is_followed(times):
    """Far slower or faster, it is another engine, and what was learned is soon forgotten."""
    found = learned([step(4 + i % 9) for i in range(5000)], lambda s: 0.01, 0.05)
    rng = np.random.default_rng(4)
    for i in range(2 * MEMORY if 0.3 < times < 3 else 2 * ODD_STEPS):
        found.learn(step(4 + i % 9), 0.01 * times * rng.lognormal(0.0, 0.05))
    assert found.expected(step(4), 4) == pytest.approx(0.01 * times, rel=0.15)


def test_a_step_that_was_disturbed_hardly_counts():
    found = learned([step(4 + i % 9) for i in range(1000)], lambda s: 0.01)
    for i in range(STEPS_PER_FIT):  # after which it is fitted again
        found.learn(step(12), 0.01 if i else 60.0)
    assert found.expected(step(12), 12) == pytest.approx(0.01, rel=0.02)


def test_what_is_not_seen_any_more_is_believed_less_and_less():
    found = learned([step(4 + 16 * (i % 2)) for i in range(100)], lambda s: 0.05 if s.has_drafts else 0.01)
    beliefs = [float(found.expected(step(20), 20))]
    for _ in range(20):
        for _ in range(MEMORY):
            found.learn(step(4), 0.01)
        beliefs.append(float(found.expected(step(20), 20)))
    assert beliefs == sorted(beliefs, reverse=True)
    assert beliefs[0] == pytest.approx(0.05, rel=0.05) and beliefs[-1] < 0.02


NUMS = st.integers(1, 60_000)
MEASURED = st.lists(st.tuples(NUMS, NUMS, st.booleans(), st.floats(1e-6, 100.0)), min_size=1, max_size=60)


@settings(max_examples=100)
@given(MEASURED, NUMS, NUMS)
def test_whatever_is_measured_more_tokens_take_no_less_time(measured, num, more):
    found = StepSeconds()
    for num_verified, num_prompt, drafted, seconds in measured:
        found.learn(step(num_verified, num_prompt, drafted=drafted), seconds)
    nums = np.array([1, num, num + more, 10**6])
    plain, drafted = (found.expected(step(4, drafted=each), nums) for each in (False, True))
    assert np.isfinite(plain).all() and (np.diff(plain) >= 0.0).all() and (plain >= 0.0).all()
    assert (drafted >= plain).all()
