"""The gates by themselves: steps in, budgets out. Whole rollouts under them are in test_simulate."""

import dataclasses

import numpy as np
import pytest

from rollout_spec.drafting.gate.gate import PATIENCE, AutoGate, FixedGate
from rollout_spec.drafting.gate.probes import PROBE_EVERY
from rollout_spec.drafting.gate.step import EndedStep
from rollout_spec.drafting.gate.step_seconds import FIRST_STEPS
from rollout_spec.metrics import EngineCounters

NUM_ROWS, K = 4, 8


def plain(num_rows, seconds=0.1, **more):
    step = EndedStep(num_rows, 0, False, None, num_rows, num_rows * 100, num_rows, seconds)
    return dataclasses.replace(step, **more)


def test_a_fixed_gate_is_open_up_to_its_threshold():
    gate = FixedGate(EngineCounters(), 8, 0.3)
    assert [gate.begin(plain(num_rows)).min_survival for num_rows in (8, 9, 1, 200)] == [0.3, None, 0.3, None]
    assert gate.counters.num_steps_off_threshold == 2


class Machine:
    """Rows that all draft tokens with these survivals; what was promised comes true, unless it `lies`. Every
    step with drafts verifies `pad_to` tokens of each row, whatever was proposed."""

    def __init__(self, survivals, seconds, share_proposed=1.0, pad_to=0):
        self.gate, self.seconds = AutoGate(EngineCounters(), pad_to), seconds
        self.survivals = np.tile(np.asarray(survivals, np.float32), (NUM_ROWS, 1))
        self.lies = False
        self._rng, self._share = np.random.default_rng(0), share_proposed
        self._num_padded = pad_to * NUM_ROWS
        self._num_drafted, self.num_right, self._promised = 0, 0, 0.0

    def step(self):
        """Run one; returns the draft tokens that the next verifies, None where it is to be a plain one."""
        num_new_tokens = NUM_ROWS + self.num_right * (not self.lies)
        work = (NUM_ROWS + self._num_drafted, 0, self._num_drafted > 0, None)
        seconds = self.seconds(self._num_drafted)
        step = EndedStep(*work, NUM_ROWS, 100, num_new_tokens, seconds, self._promised)
        self._num_drafted, self.num_right, self._promised = 0, 0, 0.0
        self.least, self.probe_in_two, _ = self.gate.begin(step)
        if self.least is None:
            return None
        is_proposed = self._rng.random() < self._share
        numbers = np.full(NUM_ROWS, self.survivals.shape[1] * is_proposed, np.int32)
        chosen, self._promised, pads = self.gate.choose(step, self.survivals, numbers)
        if self._num_padded and not pads:
            return None
        is_right = np.arange(self.survivals.shape[1]) < chosen[:, None]
        self.num_right = round(float(self.survivals[is_right].sum()))
        self._num_drafted = self._num_padded or int(chosen.sum())
        return chosen

    def steps(self, num):
        return [self.step() for _ in range(num)]

    def share_drafted(self, num):
        return np.mean([sum(budgets([numbers])) > 0 for numbers in self.steps(num)])


def test_it_says_two_steps_before_which_step_is_measured_without_drafts():
    machine = Machine([0.9], lambda drafted: 0.1)
    is_plain, was_said = [], []
    for _ in range(5 * PROBE_EVERY):
        is_plain.append(machine.step() is None)
        was_said.append(machine.probe_in_two)
    assert is_plain[FIRST_STEPS + 2 :] == was_said[FIRST_STEPS:-2]
    assert sum(is_plain) >= FIRST_STEPS + 4


def budgets(chosen):
    return [int(numbers.sum()) for numbers in chosen if numbers is not None]


def test_tokens_that_cost_nothing_are_all_verified():
    machine = Machine([0.9, 0.6], lambda drafted: 0.1)
    machine.steps(200)
    assert set(budgets(machine.steps(50))) == {2 * NUM_ROWS}
    # 10 tokens a step in place of 4.
    counters = machine.gate.counters
    assert counters.drafted_seconds > 10.0
    assert counters.drafted_as_plain_seconds / counters.drafted_seconds == pytest.approx(2.5, rel=0.05)
    assert counters.believed_plain_seconds / counters.num_timed_steps == pytest.approx(0.1, rel=0.02)
    assert 0.0 <= counters.error_seconds < 0.02 * counters.timed_seconds
    assert counters.timed_seconds == pytest.approx(0.1 * counters.num_timed_steps)
    assert counters.plain_seconds == pytest.approx(counters.timed_seconds - counters.drafted_seconds)
    assert counters.believed_of_plain_seconds == pytest.approx(counters.plain_seconds, rel=0.1)
    machine.survivals[:] = 1e-4  # less likely tokens are looked for step by step, but not these
    tried = [machine.least for _ in range(20) if machine.step() is not None]
    assert tried[:3] == pytest.approx([0.3, 0.15, 0.075]) and min(tried) == 0.02
    assert counters.num_steps_on + counters.num_steps_off_probe + counters.num_steps_off_cost == 270


PAYING = [([0.95, 0.8, 0.3, 0.1], 0.01), ([0.95, 0.9, 0.85, 0.5], 0.002), ([0.5, 0.3], 0.02)]


@pytest.mark.parametrize(("survivals", "cost"), PAYING)
def test_drafts_end_where_most_tokens_a_second_are_given(survivals, cost):
    machine = Machine(survivals, lambda drafted: 0.1 + cost * drafted)
    machine.steps(200)
    numbers = np.array(budgets(machine.steps(400)))
    every = [NUM_ROWS * n for n in range(len(survivals) + 1)]
    gives = np.cumsum([NUM_ROWS, *(NUM_ROWS * survival for survival in survivals)])
    rates = {num: tokens / (0.1 + cost * num) for num, tokens in zip(every, gives, strict=True)}
    assert np.mean([rates[num] for num in numbers]) > 0.96 * max(rates.values())


@pytest.mark.parametrize(("survivals", "cost"), [([0.5, 0.3], 0.05), ([0.9, 0.8], 0.1), ([0.05], 1.0)])
def test_drafts_that_do_not_pay_are_tried_and_seldom_asked_for(survivals, cost):
    machine = Machine(survivals, lambda drafted: 0.1 + cost * drafted)
    machine.steps(200)
    found = budgets(machine.steps(400))
    assert sum(found) <= 6 * NUM_ROWS and 0.9 * 400 / PATIENCE <= len(found) <= 1.1 * 400 / PATIENCE
    assert machine.gate.counters.num_steps_off_cost > 300


@pytest.mark.parametrize("times_as_long", [1, 6])
def test_the_gate_opens_within_twenty_steps_though_the_first_of_each_size_are_slow(times_as_long):
    """An engine makes its kernels for a number of tokens when it first meets it."""
    met = list[int]()

    def seconds(drafted):
        met.append(drafted)
        return (0.03 + 0.0015 * drafted) * (times_as_long if met.count(drafted) == 1 else 1)

    machine = Machine([0.9, 0.8, 0.7, 0.6], seconds)
    machine.steps(20)
    assert machine.share_drafted(24) >= 19 / 24  # every seventh is plain


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
        machine.survivals = rng.beta(1.2, 0.8, (NUM_ROWS, 6)).clip(0.02, 0.99).cumprod(1).astype(np.float32)
        nums_tokens.append(NUM_ROWS + machine.num_right)
        machine.step()
    return 0.1 * sum(nums_tokens[200:]) / NUM_ROWS / sum(work[200:])


def drifting(period):
    """Up to twice as long as at other times: another value every `period` steps, and a line between them."""
    values = 2.0 ** np.random.default_rng(0).random(1000)
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


def test_promises_that_do_not_come_true_are_corrected():
    machine = Machine([0.9] * K, lambda drafted: 0.1 + 0.01 * drafted)
    machine.steps(20)
    machine.lies = True
    machine.steps(300)
    assert sum(budgets(machine.steps(100))) <= 4 * K * NUM_ROWS
    machine.lies = False  # they are believed again in time
    machine.steps(2500)
    assert max(budgets(machine.steps(200)), default=0) >= K


def test_of_steps_with_prompts_nothing_is_counted():
    """They differ too much."""
    gate = AutoGate(EngineCounters())
    for num_prompt_tokens in [0] * 20 + [900] * 9:
        more = {"num_tokens": 4 + num_prompt_tokens, "num_prompt_tokens": num_prompt_tokens}
        gate.begin(plain(4, 0.1 + 0.01 * num_prompt_tokens, **more))
    assert 10 < gate.counters.num_timed_steps < 20


@pytest.mark.parametrize("num_rows", [1, 256])
def test_steps_that_cannot_be_compared_draft_nothing(num_rows):
    gate = AutoGate(EngineCounters())
    assert {gate.begin(plain(num_rows, None)).min_survival for _ in range(50)} == {None}
    assert gate.counters.num_steps_off_probe == 50


def test_ranks_that_step_together_go_without_drafts_in_the_same_steps():
    """However different their loads are, and however often each is asked."""

    def asked_in(num_rows, first):
        gate, asked = AutoGate(EngineCounters()), set()
        for number in range(first, 600):
            if gate.begin(plain(num_rows, number=number)).min_survival is None:
                asked.add(number)
        return {number for number in asked if number > first + FIRST_STEPS}

    probes = {256, 512}
    assert asked_in(2, 0) == asked_in(12, 0) == {16, 32, 64, 128} | probes
    assert asked_in(5, 190) == probes


def test_beside_a_busier_rank_drafts_are_free_up_to_its_tokens():
    """And a step in which only the other rank has drafts is no plain one."""
    gate = AutoGate(EngineCounters())
    for number in range(1, 400):
        has_drafts = number % 4 == 0 and number > 300  # of the other rank, whose 12 rows get 24 tokens then
        work = (24 if has_drafts else 12, 0, False, number)
        gate.begin(step := EndedStep(*work, 4, 100, 4, 0.2 if has_drafts else 0.1))
    survivals = np.full((4, 8), 0.5, np.float32).cumprod(axis=1)
    assert gate.choose(step, survivals, np.full(4, 8, np.int32)).lengths.sum() == 8
    assert gate.counters.num_drafted_steps == 24


@pytest.mark.parametrize(
    ("survivals", "seconds", "share_proposed", "pad_to", "least", "most"),
    [
        # As vllm-ascend 9077 measured: 59.6 tokens a second with K tokens in all steps, 6.1 in none.
        ([0.9, 0.5, 0.1], (0.025, 0.11), 0.5, 3, 0.99, 1.0),
        ([0.9], (0.11, 0.1), 1.0, 16, 0.9, 1.0),  # short drafts are known by their padding
        ([0.9, 0.5, 0.1], (0.4, 0.11), 1.0, 3, 0.0, 0.1),
        # Drafts pay, when there are some; a step without any is a plain one.
        ([0.9, 0.9, 0.9], (0.12, 0.1), 0.5, 3, 0.3, 0.6),
    ],
)
def test_padded_steps_are_taken_where_they_pay(survivals, seconds, share_proposed, pad_to, least, most):
    """`seconds`: of a step with drafts, and of a plain one."""
    machine = Machine(survivals, lambda drafted: seconds[not drafted], share_proposed, pad_to)
    machine.steps(300)
    assert least < np.mean([chosen is not None for chosen in machine.steps(1000)]) <= most
    counters = machine.gate.counters
    assert counters.num_steps_on + counters.num_steps_off_probe + counters.num_steps_off_cost == 1300


def test_a_closed_gate_tries_drafts_before_it_measures_a_plain_step():
    cost = 1.0
    machine = Machine([0.9], lambda drafted: 0.1 + cost * (drafted > 0))
    machine.steps(300)
    assert np.nonzero(budgets(machine.steps(PROBE_EVERY)))[0].size == 2
    cost = 0.0
    machine.steps(2 * PROBE_EVERY)
    assert machine.share_drafted(100) > 0.9


class Model:
    """Each of its passes takes so long, and its tokens bring so much a row; measured with noise."""

    def __init__(self, gains, seconds):
        self.gate = AutoGate(EngineCounters(), most_model_tokens=len(gains))
        self.gains, self.seconds = np.array(gains), seconds
        self._rng, self._num_drafted, self._promised = np.random.default_rng(0), 0, 0.0

    def steps(self, num):
        """The passes of each."""
        return [self._step() for _ in range(num)]

    def _step(self):
        num = self._num_model_tokens if self._num_drafted else 1
        accepted = self.gains[:num] * self._rng.lognormal(0.0, 0.3, num)
        shares = (np.ones(num), accepted) if self._num_drafted else None
        seconds = (0.1 + self.seconds * num + 0.001 * self._num_drafted) * self._rng.lognormal(0.0, 0.05)
        work = (NUM_ROWS + self._num_drafted, 0, self._num_drafted > 0, None)
        tokens = NUM_ROWS + round(0.9 * self._num_drafted)
        survivals = np.full((NUM_ROWS, 1), 0.9, np.float32)
        step = EndedStep(*work, NUM_ROWS, 100, tokens, seconds, self._promised, num, shares)
        self._num_drafted, self._promised = 0, 0.0
        opening = self.gate.begin(step)
        self._num_model_tokens = opening.num_model_tokens
        if opening.min_survival is not None:
            choice = self.gate.choose(step, survivals, np.ones(NUM_ROWS, np.int32))
            self._num_drafted, self._promised = int(choice.lengths.sum()), choice.promised
        return num


@pytest.mark.parametrize(
    ("gains", "seconds", "best"),
    [
        ([1.8, 1.5, 1.4], 0.005, 3),
        ([1.8, 1.5, 0.8], 0.005, 2),  # what a token brings beyond the 0.9 that others would give in its place
        ([0.8, 0.8, 0.8], 0.005, 1),  # a wrong head
        ([1.8, 1.2, 1.15], 0.02, 1),
        ([1.8], 0.005, 1),
    ],
)
def test_passes_run_that_pay(gains, seconds, best):
    model = Model(gains, seconds)
    model.steps(1500)
    taken = model.steps(1000)
    assert taken.count(best) > 0.9 * len(taken)


def test_a_head_that_gets_better_or_worse_is_noticed():
    model = Model([1.8, 0.5], 0.005)
    for gain, best in ((0.5, 1), (1.8, 2), (0.5, 1)):
        model.gains[1] = gain
        model.steps(3000)
        assert model.steps(100).count(best) >= 90
