"""The gates by themselves: steps in, budgets out. Whole rollouts under them are in test_simulate."""

import numpy as np
import pytest

from rollout_spec.drafting.gate.costs import (
    EARLY_PROBE_EVERY,
    EARLY_STEPS,
    PROBE_EVERY,
    ModelShares,
    Ranks,
    Step,
)
from rollout_spec.drafting.gate.gate import HYSTERESIS_STEPS, LOOK_EVERY, AutoGate, FixedGate
from rollout_spec.drafting.gate.passes import Passes
from rollout_spec.drafting.gate.step_cost import ENOUGH

NUM_ROWS, K = 4, 8


def rows(num_rows):
    return Step(num_rows=num_rows, num_context=0, num_new_tokens=num_rows, seconds=0.1)


def test_one_arrival_does_not_flip_a_fixed_gate():
    gate = FixedGate(8, 0.3)

    def is_open(*nums_rows):
        return [gate.begin(rows(n)) is not None for n in nums_rows]

    assert is_open(8, 9, 8, 9, 9, 9, 8) == [True] * 7
    assert is_open(*[9] * HYSTERESIS_STEPS) == [True] * (HYSTERESIS_STEPS - 1) + [False]
    assert is_open(8, 8, 8, 9, 3, 200) == [False] * 6
    assert is_open(*[8] * HYSTERESIS_STEPS)[-1]
    assert gate.begin(rows(8)) == 0.3
    assert gate.counters.num_steps_off_threshold == 1 + 6 + HYSTERESIS_STEPS - 1


class Machine:
    """Rows that all draft tokens with these survivals; what was promised comes true, unless it `lies`.

    Args:
        seconds: of a step with so many draft tokens.
        share_proposed: of the steps in which the rows have drafts.
        fill_to: the tokens that every step with drafts verifies of each row, whatever was proposed.
    """

    def __init__(self, survivals, seconds, share_proposed=1.0, fill_to=0):
        self.gate, self.seconds = AutoGate(fill_to), seconds
        self.survivals = np.tile(np.asarray(survivals, np.float32), (NUM_ROWS, 1))
        self.lies = False
        self._rng, self._share, self._num_filled = (
            np.random.default_rng(0),
            share_proposed,
            fill_to * NUM_ROWS,
        )
        self._num_drafted = self.num_right = 0

    def step(self):
        """Run one; returns the draft tokens that the next verifies, None where it is to be a plain one."""
        num_new_tokens = NUM_ROWS + self.num_right * (not self.lies)
        step = Step(NUM_ROWS, 100, num_new_tokens, self.seconds(self._num_drafted))
        self._num_drafted = self.num_right = 0
        self.price = self.gate.begin(step)
        if self.price is None:
            return None
        is_proposed = self._rng.random() < self._share
        numbers = np.full(NUM_ROWS, self.survivals.shape[1] * is_proposed, np.int32)
        chosen = self.gate.choose(self.survivals, numbers)
        if self._num_filled and not self.gate.fills:
            return None
        is_right = np.arange(self.survivals.shape[1]) < chosen[:, None]
        self.num_right = round(float(self.survivals[is_right].sum()))
        self._num_drafted = self._num_filled or int(chosen.sum())
        return chosen

    def steps(self, num):
        return [self.step() for _ in range(num)]


def test_it_says_two_steps_before_which_step_is_measured_without_drafts():
    machine = Machine([0.9], lambda drafted: 0.1)
    is_plain, was_said = [], []
    for _ in range(5 * PROBE_EVERY):
        is_plain.append(machine.step() is None)
        was_said.append(machine.gate.probes_soon)
    assert is_plain[ENOUGH + 2 :] == was_said[ENOUGH:-2]
    assert sum(is_plain) > ENOUGH + 3


def budgets(chosen):
    return [int(numbers.sum()) for numbers in chosen if numbers is not None]


def test_tokens_that_cost_nothing_are_all_verified():
    machine = Machine([0.9, 0.6], lambda drafted: 0.1)
    machine.steps(200)
    assert set(budgets(machine.steps(50))) == {2 * NUM_ROWS}
    assert machine.price is None or machine.price >= 0.02, "what hardly ever comes true is not looked for"
    # 10 tokens a step in place of 4.
    counters = machine.gate.counters
    assert counters.gate_seconds > 10.0
    assert counters.gate_plain_seconds / counters.gate_seconds == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize(
    ("survivals", "cost", "most_drafted", "most_asked"),
    [
        # A token costs a tenth of a plain step, which gives 4: at about 1.5x the speed, 0.6 of a token.
        ([0.95, 0.8, 0.3, 0.1], 0.01, 400 * 2 * NUM_ROWS, 400),
        # No token is worth its cost: they are tried, and the drafter is asked in few steps.
        ([0.5, 0.3], 0.05, 4 * NUM_ROWS, 80),
        ([0.9, 0.8], 0.1, 4 * NUM_ROWS, 80),
    ],
)
def test_drafts_end_where_the_gain_equals_the_cost(survivals, cost, most_drafted, most_asked):
    machine = Machine(survivals, lambda drafted: 0.1 + cost * drafted)
    machine.steps(200)
    found = budgets(machine.steps(400))
    assert sum(found) <= most_drafted and len(found) <= most_asked
    if most_asked == 400:
        assert set(found) == {2 * NUM_ROWS}
    else:
        assert machine.gate.counters.num_steps_off_cost > 300


def test_drafting_stops_where_it_has_become_slow_and_comes_back():
    cost = {"drafts": 0.01}
    machine = Machine([0.9, 0.6], lambda drafted: 0.1 + cost["drafts"] * (drafted > 0))

    def share_drafted(num_steps):
        return np.mean([sum(budgets([numbers])) > 0 for numbers in machine.steps(num_steps)])

    machine.steps(200)
    assert share_drafted(200) > 0.9
    cost["drafts"] = 1.0
    machine.steps(200)
    assert share_drafted(200) < 0.1
    cost["drafts"] = 0.01
    machine.steps(1200)
    assert share_drafted(200) > 0.9


@pytest.mark.parametrize("times_as_long", [1, 6])
def test_the_gate_opens_within_twenty_steps_though_the_first_of_each_size_are_slow(times_as_long):
    """An engine makes its kernels for a number of tokens when it first meets it."""
    met = set()

    def seconds(drafted):
        is_first = drafted not in met
        met.add(drafted)
        return (0.03 + 0.0015 * drafted) * (times_as_long if is_first else 1)

    machine = Machine([0.9, 0.8, 0.7, 0.6], seconds)
    machine.steps(20)
    assert sum(sum(budgets([numbers])) > 0 for numbers in machine.steps(24)) >= 19  # every seventh is plain


def test_an_engine_without_requests_passes_for_no_step():
    """A minute would outweigh a hundred steps, and their gain: at 1x the third token would be worth it."""
    idle = {"seconds": 0.0}
    machine = Machine([0.95, 0.8, 0.5, 0.1], lambda drafted: 0.1 + 0.01 * drafted + idle.pop("seconds", 0))
    machine.steps(200)
    idle["seconds"] = 60.0
    machine.step()
    assert set(budgets(machine.steps(50))) == {2 * NUM_ROWS}


def relative_speed(times_of_a_step, slope=0.025):
    """Tokens for the machine's work, over that of plain steps, once it has learned.

    A plain step is 0.1 s of work for four rows. Every draft token costs `slope` seconds of work.
    A step's work takes times_of_a_step(its number) times as long, and the gate sees only that.
    """
    rng, work, nums_tokens = np.random.default_rng(0), [], []

    def seconds(drafted):
        work.append(0.1 + slope * drafted)
        return work[-1] * times_of_a_step(len(work)) * rng.lognormal(0.0, 0.05)

    machine = Machine([], seconds)
    for _ in range(1000):
        rates = rng.beta(1.2, 0.8, (NUM_ROWS, 6)).clip(0.02, 0.99)
        machine.survivals = rates.cumprod(1).astype(np.float32)
        nums_tokens.append(NUM_ROWS + machine.num_right)
        machine.step()
    return 0.1 * sum(nums_tokens[200:]) / NUM_ROWS / sum(work[200:])


def drifting(period, seed=0):
    """Up to twice as long as at other times: another value every `period` steps, and a line between them."""
    values = 2.0 ** np.random.default_rng(seed).random(1000)
    return lambda number: float(np.interp(number / period, np.arange(len(values)), values))


@pytest.mark.parametrize("period", [10, 300])
@pytest.mark.parametrize(("slope", "least"), [(0.025, 0.98), (0.05, 0.97)])
def test_drafts_that_cost_what_they_give_lose_little_on_a_machine_of_varying_speed(period, slope, least):
    """As beside a training on the same cores: all steps take longer, and the gate compares old with new."""
    assert relative_speed(drifting(period), slope) > least


def test_drafts_that_pay_go_on_on_a_machine_of_varying_speed():
    steady = relative_speed(lambda number: 1.0, slope=0.005)
    assert steady > 1.4
    assert relative_speed(drifting(10), slope=0.005) > 0.95 * steady


def test_plain_steps_that_were_slow_at_first_hide_no_loss():
    """A cold start: by the first plain steps drafts would gain, by all later ones they lose a quarter."""
    cold = {"left": ENOUGH + 1}

    def seconds(drafted):
        if drafted:
            return 0.1 * 2 * 1.25
        cold["left"] -= 1
        return 0.3 if cold["left"] >= 0 else 0.1

    machine = Machine([0.9], seconds)
    machine.steps(200)
    assert sum(budgets(machine.steps(100))) < 10 * NUM_ROWS


def test_promises_that_do_not_come_true_are_corrected():
    machine = Machine([0.9] * K, lambda drafted: 0.1 + 0.01 * drafted)
    machine.steps(20)
    machine.lies = True
    machine.steps(300)
    assert sum(budgets(machine.steps(100))) < 2 * K * NUM_ROWS
    machine.lies = False  # they are believed again in time
    machine.steps(1500)
    assert max(budgets(machine.steps(200)), default=0) >= K


@pytest.mark.parametrize("num_rows", [1, 256])
def test_steps_that_cannot_be_compared_draft_nothing(num_rows):
    gate = AutoGate()
    for _ in range(50):
        assert gate.begin(Step(num_rows, 100, num_rows, None)) is None
    assert gate.counters.num_steps_off_probe == 50


def test_ranks_that_step_together_go_without_drafts_in_the_same_steps():
    """However different their loads are, and however often each is asked."""

    def asked_in(num_rows, first):
        gate, asked = AutoGate(), set()
        for number in range(first, 200):
            step = Step(num_rows, 100, num_rows, 0.1, Ranks(number, num_rows))
            if gate.begin(step) is None:
                asked.add(number)
        return {number for number in asked if number > first + ENOUGH}

    probes = set(range(PROBE_EVERY, 200, PROBE_EVERY))
    early = set(range(0, EARLY_STEPS, EARLY_PROBE_EVERY))
    assert asked_in(2, 0) == asked_in(12, 0) == {number for number in probes | early if number > ENOUGH}
    assert asked_in(5, 90) == {number for number in probes if number > 90 + ENOUGH}


@pytest.mark.parametrize(
    ("survivals", "seconds", "share_proposed", "fill_to", "least", "most"),
    [
        # As vllm-ascend 9077 measured: 59.6 tokens a second with K tokens in all steps, 6.1 in none.
        ([0.9, 0.5, 0.1], (0.025, 0.11), 0.5, 3, 0.99, 1.0),
        ([0.9], (0.11, 0.1), 1.0, 16, 0.9, 1.0),  # short drafts are known by what fills them up
        ([0.9, 0.5, 0.1], (0.4, 0.11), 1.0, 3, 0.0, 0.1),
        # Drafts pay, when there are some; a step without any is a plain one.
        ([0.9, 0.9, 0.9], (0.12, 0.1), 0.5, 3, 0.3, 0.6),
    ],
)
def test_filled_steps_are_taken_where_they_pay(survivals, seconds, share_proposed, fill_to, least, most):
    """`seconds`: of a step with drafts, and of a plain one."""
    machine = Machine(survivals, lambda drafted: seconds[not drafted], share_proposed, fill_to)
    machine.steps(300)
    assert least < np.mean([chosen is not None for chosen in machine.steps(1000)]) <= most


def test_a_closed_gate_weighs_drafts_now_and_then():
    """It closes after a few steps in which no draft pays. Steps that measure count for neither."""
    machine, has_weighed = Machine([0.05], lambda _: 0.1), []
    for _ in range(140):
        num_probes = machine.gate.counters.num_steps_off_probe
        chosen = machine.step()
        if machine.gate.counters.num_steps_off_probe == num_probes:
            has_weighed.append(chosen is not None)
    closed = ([False] * (LOOK_EVERY - 1) + [True]) * len(has_weighed)
    assert has_weighed == ([True] * HYSTERESIS_STEPS + closed)[: len(has_weighed)]
    assert machine.gate.counters.num_steps_off_cost == len(has_weighed) > 100


def test_what_a_models_tokens_bring_and_take_is_learned(monkeypatch):
    """In tokens a row, less what others would have brought in their places; here a pass takes nothing."""
    gains, shares, num_drafted = [], [], 0
    monkeypatch.setattr(Passes, "learn_gains", lambda self, gain: gains.append(gain.tolist()))
    monkeypatch.setattr(Passes, "learn_share", lambda self, *share: shares.append(share))
    gate = AutoGate(most_model_tokens=2)
    survivals = np.full((NUM_ROWS, 2), (0.9, 0.85), np.float32)
    verified = ModelShares(verified=np.array([1.0, 0.5]), accepted=np.array([0.95, 0.45]))
    for _ in range(60):
        num_new = NUM_ROWS + round(0.875 * num_drafted)
        step = Step(NUM_ROWS, 100, num_new, 0.1, num_passes=2, model_shares=verified if num_drafted else None)
        num_drafted = 0
        if gate.begin(step) is not None:
            num_drafted = int(gate.choose(survivals, np.full(NUM_ROWS, 2, np.int32)).sum())
    assert gains[-1] == pytest.approx([0.95 - 0.85, 0.45 - 0.5 * 0.85])
    assert shares[-1] == (2, pytest.approx(0.0, abs=0.01))
