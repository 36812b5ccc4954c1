"""What the gate learns: which passes of a model pay, and what a step costs. Rollouts are in test_simulate."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_spec.drafting.gate.costs import NOTHING, PROBE_EVERY, Choice, Costs, Ranks, Step
from rollout_spec.drafting.gate.passes import RETRY_EVERY, TRY_EVERY, Passes
from rollout_spec.drafting.gate.step_cost import ENOUGH, KNOTS, StepCost
from rollout_spec.metrics import EngineCounters


class Model:
    """Each further pass takes a share of a plain step's time, and brings so many tokens a row.

    Both are measured with noise, a tenth of the step's time and as much as a pass's token brings.
    """

    def __init__(self, gains, share, seed=0):
        self.passes, self.gains, self.share = Passes(1 + len(gains)), gains, share
        self._random = np.random.default_rng(seed)

    def steps(self, num):
        """The passes of each."""
        return [self._step() for _ in range(num)]

    def _step(self):
        num = self.passes.num
        noise = self._random.normal(size=1 + num)
        self.passes.learn_share(num, (num - 1) * self.share + 0.1 * noise[0])
        self.passes.learn_gains(np.array([1.0, *self.gains])[:num] * (1 + noise[1:]))
        self.passes.choose(2.0)
        return num


@pytest.mark.parametrize(
    ("gains", "share", "best"),
    [
        # Its tokens must bring a few times what its pass takes.
        ([0.6, 0.5], 0.05, 3),
        ([0.6, 0.05], 0.05, 2),
        ([0.3, 0.2], 0.1, 1),
        ([-0.01, -0.01], 0.05, 1),  # a wrong head
        ([0.7, 0.6, 0.5, 0.4, 0.05], 0.05, 5),
        ([], 0.1, 1),
    ],
)
def test_passes_run_that_pay(gains, share, best):
    model = Model(gains, share)
    model.steps(1500)
    taken = model.steps(10 * RETRY_EVERY)
    assert taken.count(best) > 0.95 * len(taken)


def test_all_passes_run_until_what_they_take_is_known(monkeypatch):
    """Also where no step can be compared."""
    model = Model([-0.1, -0.1], 0.3)
    assert set(model.steps(2 * TRY_EVERY)) == {2, 3}
    monkeypatch.setattr(model.passes, "learn_share", lambda num, excess: None)
    assert set(model.steps(500)) == {2, 3}


def test_a_head_that_gets_better_or_worse_is_noticed():
    model = Model([0.8, 0.7], 0.05)
    for gains, best in (([0.0, 0.0], 1), ([0.8, 0.7], 3), ([0.0, 0.0], 1)):
        model.gains = gains
        model.steps(3000)
        assert model.steps(RETRY_EVERY).count(best) >= RETRY_EVERY - 1


def learned(cost, nums_tokens, noise=0.0):
    curve, rng = StepCost(), np.random.default_rng(0)
    for _ in range(100):
        for n in nums_tokens:
            curve.learn(n, 1000, cost(n) * rng.lognormal(0.0, noise))
    return curve


@pytest.mark.parametrize(
    ("cost", "learned_at", "wanted"),
    [
        # At the knots and between them; what was never measured is guessed safely.
        (lambda n: 0.05 + 0.002 * n, [1, 2, 4, 8, 12, 16, 32], {1: 0.052, 5: 0.06, 14: 0.078, 32: 0.114}),
        (lambda n: 0.1, [8], {2: 0.05, 8: 0.1, 32: 0.2, 128: 0.4}),
        # It jumps where a tile is full.
        (lambda n: 0.06 + 0.032 * np.ceil(n / 16), [8, 16, 24, 32], {8: 0.092, 16: 0.092, 24: 0.124}),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.2, 0.08)])
def test_a_cost_is_found_again(cost, learned_at, wanted, noise, error):
    curve = learned(cost, learned_at, noise)
    assert curve.seconds([*wanted], 1000) == pytest.approx([*wanted.values()], rel=error)


def test_context_has_a_price_of_its_own():
    curve, rng = StepCost(), np.random.default_rng(1)
    for context in range(0, 20_000, 10):
        n = int(rng.integers(4, 33))
        curve.learn(n, context, 0.02 + 0.001 * n + 1e-6 * context)
    for n, context in ((8, 0), (8, 19_990), (24, 10_000)):
        assert curve.seconds(n, context) == pytest.approx(0.02 + 0.001 * n + 1e-6 * context, rel=0.1)


def test_much_less_context_than_was_ever_seen_is_not_free():
    """A slope that noise has made too steep."""
    curve, rng = StepCost(), np.random.default_rng(2)
    for context in rng.integers(20_000, 25_000, 200).tolist():
        curve.learn(256, context, 0.02 + 1e-5 * (context - 20_000))
    assert curve.seconds(256, 1000) > 0.7 * curve.seconds(256, 22_500)


def test_what_was_hardly_measured_is_half_a_guess_from_fewer_tokens():
    curve = StepCost()
    assert curve.seconds_from(16, 0.1, [16, 64], 0) == pytest.approx([0.1, 0.2])  # nothing known but the base
    curve.learn(64, 0, 1.0)
    assert curve.seconds_from(16, 0.1, [64], 0) == pytest.approx([0.6])
    for _ in range(20):
        curve.learn(64, 0, 1.0)
    assert curve.seconds_from(16, 0.1, [64], 0) == pytest.approx([1.0], rel=0.01)
    assert 0.1 < curve.seconds_from(16, 0.1, [32], 0)[0] < 1.0  # between its neighbours
    for _ in range(200):
        curve.learn(64, 0, 2.0)
    assert curve.seconds_from(16, 0.1, [64], 0) == pytest.approx([2.0], rel=0.05), "a lasting change"
    for _ in range(50):
        curve.forget(0.1)
    assert curve.seconds_from(16, 0.1, [64], 0) == pytest.approx([0.2])


NUMS, CONTEXTS = st.integers(1, 60_000), st.integers(0, 10**7)  # of tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NUMS, CONTEXTS, st.floats(1e-6, 100.0)), min_size=1, max_size=60), NUMS, CONTEXTS)
def test_whatever_is_measured_a_cost_is_a_positive_number(measured, n, context):
    curve = StepCost()
    for sample in measured:
        curve.learn(*sample)
    seconds = curve.seconds(np.array([n, int(KNOTS[-1]), 10**6]), context)
    assert np.isfinite(seconds).all() and (seconds > 0.0).all()


def test_one_odd_step_at_few_tokens_does_not_make_many_dear():
    curve = learned(lambda n: 0.1, [8, 12, 16])
    curve.learn(5, 1000, 0.25)
    assert curve.seconds([5, 8, 16], 1000) == pytest.approx([0.1, 0.1, 0.1], rel=0.05)


def test_the_first_step_of_a_size_is_cold_but_of_many_near_one_knot_only_a_few():
    curve = StepCost()
    assert [curve.was_cold(n) for n in (5, 5, 4, 5, 4)] == [True, False, True, False, False]
    assert sum(curve.was_cold(n) for n in range(512, 700)) == ENOUGH


def test_a_rank_answers_for_its_own_drafts_where_another_made_the_step_longer():
    counters, numbers = EngineCounters(), itertools.count()
    costs = Costs(counters, fill_to=0)

    def learn(most_tokens, seconds, choice=NOTHING, num_new_tokens=4):
        ranks = Ranks(next(numbers), most_tokens)
        return costs.learn(Step(4, 0, num_new_tokens, seconds, ranks), choice)

    for _ in range(PROBE_EVERY):
        learn(8, 1.0)
    assert costs.most_rows == 8 and costs.plain_seconds == pytest.approx(1.0)
    assert counters.gate_seconds == 0, "another rank's drafts"
    for _ in range(4):
        learn(24, 2.0)
    assert not costs.is_probe
    [expected] = costs.drafted_seconds(np.array([20]))
    assert learn(24, 1.8, Choice(4, 3.0, 1.2), num_new_tokens=7) == pytest.approx(1.8 - expected)
    assert counters.gate_seconds == pytest.approx(1.8 * 1.2 / expected)
    assert counters.gate_plain_seconds == pytest.approx(7 / 4)
