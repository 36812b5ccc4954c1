"""The drafter without an engine: rows are arrays, as vLLM's `token_ids_cpu` is one."""

import itertools
from unittest.mock import Mock

import numpy as np
import pytest

from rollout_spec.config import SpecConfig
from rollout_spec.drafting import drafter as drafter_module
from rollout_spec.drafting.drafter import PAD, Drafter
from rollout_spec.drafting.drafts import ModelDrafts, NextStep
from rollout_spec.drafting.gate.gains import DraftGains
from rollout_spec.drafting.gate.gate import Opening
from rollout_spec.drafting.gate.step import EndedStep, Work
from rollout_spec.drafting.history import group_key, prompt_key
from rollout_spec.drafting.native import InvalidArgument
from tests.native.checks import check_index
from tests.text import speak

PROMPT = np.array([1, 2, 3, 4], np.int32)


class Batch:
    def __init__(self, drafter, *names, num_rows=8, length=64):
        self.drafter = drafter
        self.token_ids = np.zeros((num_rows, length), np.int32)
        self.levels = np.zeros(num_rows, np.int32)
        self.request_ids: list[str] = []
        self.drafts_wanted = False  # after the last step
        for name in names:
            self.add(name)

    def add(self, name, prompt=PROMPT, max_level=64, *group):
        row = len(self.request_ids)
        self.request_ids.append(name)
        self.token_ids[row, : len(prompt)] = prompt
        self.levels[row] = len(prompt)
        self.drafter.add(name, prompt, max_level, *group)

    def end(self):
        for name in self.request_ids:
            self.drafter.remove(name)
        self.request_ids.clear()

    def step(self, tokens, *, takes_drafts=True, model=None, room=None, work=None):
        for row, new in enumerate(tokens):
            self.token_ids[row, self.levels[row] : self.levels[row] + len(new)] = new
            self.levels[row] += len(new)
        if model is not None:
            model = ModelDrafts(np.array(model, np.int32), np.full(np.shape(model), 9, np.float32))
        next_step = NextStep(takes_drafts, room and np.array(room, np.int32))
        rows = self.request_ids, list(map(len, tokens)), self.token_ids, self.levels
        drafts = self.drafter.draft(*rows, work, model, next_step)
        self.drafts_wanted = self.drafter.to_come.drafts_wanted
        return drafts.lists()


def make(*names, pads_drafts=False, most_model_tokens=0, **options):
    config = SpecConfig(**{"batch_threshold": 8, "min_survival": 0.0, **options})  # type: ignore[arg-type]
    return Batch(Drafter(config, pads_drafts=pads_drafts, most_model_tokens=most_model_tokens), *names)


def steps_told(gate):
    steps, begin = list[EndedStep](), gate.begin
    gate.begin = lambda step: (steps.append(step), begin(step))[1]
    return steps


def test_a_draft_fits_the_room_of_its_row():
    """Also where the rows before it have no place in the index."""
    batch = make("out of range", "a", "b", "c", num_speculative_tokens=4)
    text = [10, 11, 12, 13, 14, 15]
    batch.step([[-7], text, text, text])
    again = [[-7], text[:1], text[:1], text[:1]]
    assert batch.step(again, room=[4, 2, 0, 4]) == [[], text[1:3], [], text[1:5]]
    assert batch.drafter.counters.num_draft_tokens == 6
    assert batch.step([[-7], [11], [11], [11]])[2] == text[2:6], "the room is one step's"


def test_a_models_drafts_are_those_of_their_rows():
    """Also where rows before them prefill, or have no place in the index; such rows draft nothing."""
    batch = make("prefills", "out of range", "a", "b", num_speculative_tokens=3)
    assert batch.step([[], [-7], [10], [20]])[0] == []
    counters = batch.drafter.take_counters()
    assert (counters.num_steps, counters.num_row_steps, counters.num_untracked_rows) == (1, 3, 1)
    assert batch.drafter.take_counters().num_steps == 0
    drafts = batch.step([[], [11], [11], [21]], model=[[50, 50], [60, 60], [70, 10], [-1, 80]])
    assert drafts == [[], [], [70, 10, 11], []]


@pytest.mark.parametrize("most_model_tokens", [0, 3])
@pytest.mark.parametrize("batch_threshold", [0, 8, "auto"])
def test_an_open_gate_alone_waits_for_drafts(batch_threshold, most_model_tokens):
    """Also where the text gives nothing, if there is a model. Drafts that come too late are none."""
    config = SpecConfig(batch_threshold=batch_threshold)  # type: ignore[arg-type]
    batch = Batch(Drafter(config, itertools.count().__next__, most_model_tokens=most_model_tokens), "a")
    for token in [10, 11] * 10:
        assert batch.step([[token]], takes_drafts=False) == [[]]
        repeats = batch.levels[0] > len(PROMPT) + 2
        if batch_threshold != "auto":
            may_draft = most_model_tokens > 0 or repeats
            assert batch.drafts_wanted == (batch_threshold != 0 and may_draft)
    assert batch.drafts_wanted == (batch_threshold != 0)
    nums = [num for name, num in vars(batch.drafter.counters).items() if name.startswith("num_steps_o")]
    assert sum(nums) == 20 and batch.drafter.counters.num_draft_tokens == 0, "each is on or off"
    [draft] = batch.step([[10]])
    assert draft[:3] == [11, 10, 11][: 3 * (batch_threshold != 0)]
    assert batch.drafts_wanted == (batch_threshold != 0)
    batch.step([[]])  # no row decodes, so the gate is not asked
    assert batch.drafts_wanted == (batch_threshold != 0)


def test_no_drafts_are_wanted_in_a_step_that_is_measured():
    batch = make("a")
    for probe_in_two in (False, True, False):
        opening = Opening(0.0, probe_in_two)
        batch.drafter._gate.begin = lambda step, opening=opening: opening
        batch.step([[10]])
        assert batch.drafts_wanted != probe_in_two


def test_a_model_drafts_again_once_it_pays_though_the_text_does_not():
    """An engine that schedules ahead: while the gate is closed there are no drafts of the model to weigh."""
    now, dear = 0.0, 9.0
    drafter = Drafter(SpecConfig(), lambda: now, most_model_tokens=2)
    batch = Batch(drafter, num_rows=1, length=4096)
    batch.add("a", max_level=4096)
    text = np.random.default_rng(0).integers(10, 20, 4096).tolist()  # of it the index proposes what is wrong
    num_accepted = 0

    def share_drafted(num_steps):
        nonlocal now, num_accepted
        num_drafted = 0
        for _ in range(num_steps):
            done, waits = int(batch.levels[0]), batch.drafts_wanted
            end = done + 1 + num_accepted
            model = [text[end : end + 2]] if waits else None
            [draft] = batch.step([text[done:end]], takes_drafts=waits, model=model)
            num_accepted = sum(token == true for token, true in zip(draft, text[end:], strict=False))
            now += 1.0 + dear * bool(draft)
            num_drafted += bool(draft)
        return num_drafted / num_steps

    share_drafted(200)
    assert share_drafted(100) < 0.1
    dear = 0.0
    share_drafted(1200)
    assert share_drafted(100) > 0.8


def test_the_gate_is_told_what_a_step_took_unless_the_engine_may_have_been_idle():
    """Then no request of the step before is in it, or weights were synced since."""
    now = iter([1.0, 3.0, 4.0, 8.0, 108.0, 109.0, 999.0])
    batch = Batch(Drafter(SpecConfig(), clock=lambda: next(now)), "a")
    steps = steps_told(batch.drafter._gate)
    batch.step([[10]])
    batch.step([[11, 12]])
    batch.add("b")
    batch.step([[13], []], work=Work(9, 8))
    batch.step([[14], [10]])
    batch.end()
    batch.add("c")
    batch.step([[10]])
    batch.step([[11]], work=Work(24, 3, True, 7))
    batch.drafter.note_new_weights()
    batch.step([[12]])

    def step(seconds, num_rows, num_context, num_new_tokens, *work):
        rows = {"num_rows": num_rows, "num_context": num_context, "num_new_tokens": num_new_tokens}
        return EndedStep(*work, **rows, seconds=seconds)

    assert steps == [
        step(None, 1, 5, 1, 1),
        step(2.0, 1, 7, 2, 1),
        step(1.0, 1, 8, 1, 9, 8),
        step(4.0, 2, 14, 2, 2),
        step(None, 1, 5, 1, 1),
        step(1.0, 1, 6, 1, 24, 3, True, 7),
        step(None, 1, 7, 1, 1),
    ]


def test_a_step_is_taken_for_one_with_the_drafts_that_it_was_given():
    batch = make("a", "b", num_speculative_tokens=4)
    steps = steps_told(batch.drafter._gate)
    given = batch.step([[10, 11, 12], [10]])
    batch.step([[13], [11]])
    assert sum(map(len, given)) == 2
    assert [(each.num_tokens, each.has_drafts) for each in steps] == [(2, False), (4, True)]


def test_what_a_step_verified_of_a_models_drafts_is_counted_by_place():
    """A draft is the model's as far as its tokens are; a step without a model's drafts says nothing but that
    the first pass has run."""
    batch = make("a", "b", "c", "d", num_speculative_tokens=4, most_model_tokens=3)
    steps = steps_told(batch.drafter._gate)
    batch.step([[50], [60], [70], [80]])
    model = [[51, 52, 53], [61, 62, 63], [71, 72, -1], [81, 82, 83]]
    drafts = batch.step([[50], [60], [70], [80]], model=model, room=[4, 2, 4, 0])
    assert [draft[:3] for draft in drafts[:2]] == [[51, 52, 53], [61, 62]] and drafts[3] == []
    assert drafts[2][:2] == [71, 72]
    batch.step([[51, 52, 53, 50], [61, 65], [71, 72, 70], []])
    assert steps[-1].model_shares is not None
    verified, accepted = steps[-1].model_shares
    assert verified.tolist() == pytest.approx([1.0, 1.0, 1 / 3])
    assert accepted.tolist() == pytest.approx([1.0, 2 / 3, 1 / 3])
    counters = batch.drafter.counters
    assert (counters.num_model_draft_tokens, counters.num_model_accepted_tokens) == (7, 6)
    batch.step([[50, 51], [60], [70], [80]])
    assert [step.model_shares is None for step in steps] == [True, True, False, True]
    assert [step.num_passes for step in steps] == [1, 3, 1, 1]
    assert (counters.num_model_draft_tokens, counters.num_model_accepted_tokens) == (7, 6)


def test_what_is_wrong_changes_nothing():
    batch = make("a", "b")
    steps = steps_told(batch.drafter._gate)
    assert batch.step([[10, 11, 12, 13], [10]])[1]
    for _ in range(2):
        with pytest.raises(KeyError, match="stranger"):
            batch.drafter.draft(["b", "stranger"], [1, 1], batch.token_ids, batch.levels)
    with pytest.raises(InvalidArgument, match="request_ids: has 2 entries, nums_new_tokens has 1"):
        batch.drafter.draft(["a", "b"], [1], batch.token_ids, batch.levels)
    with pytest.raises(InvalidArgument, match=r"request_ids: has 2 entries, .* levels has 1"):
        batch.drafter.draft(["a", "b"], [1, 1], batch.token_ids, batch.levels[:1])
    with pytest.raises(InvalidArgument, match="prompt_token_ids: must be a contiguous"):
        batch.drafter.add("c", PROMPT.astype(np.int64), 64)
    assert batch.step([[], [11]])[1][:1] == [12]
    assert not steps[1].has_drafts and steps[1].seconds is None, "its drafts are lost, and what it took"


@pytest.mark.parametrize("token", [-1, -(2**31)])
def test_what_is_no_text_is_dropped_and_the_others_draft(token):
    """A row, a prompt, a response of the history."""
    batch = make(num_speculative_tokens=3, history=2)
    batch.drafter.history.add(prompt_key(PROMPT), np.array([20, token], np.int32))
    for name in ("a", "b", "c"):
        batch.add(name)
    batch.add("d", np.array([1, token], np.int32))
    batch.step([[10, 11, 12, 13], [10], [10], [10]])
    assert batch.step([[10], [token], [11], [10]]) == [[11, 12, 13], [], [12, 13, 10], []]
    assert batch.drafter.counters.num_untracked_rows == 3
    assert batch.step([[11], [12], [12], []])[0] == [12, 13, 10]
    batch.end()
    # Nothing runs in the group any more: it takes in what others have said.
    batch.drafter.history.add(prompt_key(PROMPT), np.array([90, 91], np.int32))
    batch.add("e")
    assert batch.step([[90]])[0][:1] == [91]


def long_run(seconds):
    """Drafts at the end, and the tokens that each `add` and step indexed; of steps that take so long.

    Siblings after a long prompt; one was interrupted, one ends while the prompt is not whole. History. A
    piece takes 0.1 ms.
    """
    now = 0.0

    def clock():
        nonlocal now
        now += 1e-4
        return now

    text = speak(np.random.default_rng(0), 9_000)
    config = SpecConfig(batch_threshold=8, min_survival=0.0, num_speculative_tokens=4, history=2)
    drafter = Drafter(config, clock)
    batch = Batch(drafter, num_rows=4, length=9_000)
    for begin in (100, 2_000):
        drafter.history.add(group_key("g"), text[begin : begin + 500])
    num_tokens, drafts = [0], []
    batch.token_ids[:] = text
    for name, own in (("a", 0), ("b", 700), ("c", 0)):
        batch.add(name, text[: 6_000 + own], 9_000, "g", 6_000)
        num_tokens.append(drafter.index.stats().num_tokens)
    for step in range(60):
        if step == 3:
            drafter.remove(batch.request_ids.pop())
        now += seconds
        drafts = batch.step([text[level : level + 1] for level in batch.levels[: len(batch.request_ids)]])
        num_tokens.append(drafter.index.stats().num_tokens)
    check_index(drafter.index)
    return drafts, np.diff(num_tokens).tolist()


def test_a_long_prompt_is_indexed_in_a_fiftieth_of_a_step(monkeypatch):
    monkeypatch.setattr(drafter_module, "PIECE_TOKENS", 64)
    at_once, after_pauses = long_run(100.0)
    in_parts, num_tokens = long_run(0.02)
    assert at_once == in_parts and any(at_once)
    assert max(num_tokens) <= 5 * 64 + 3
    assert max(after_pauses) <= 101 * 64 + 3, "10 ms at most, however long the engine had no work"
    assert sum(num_tokens) == 6_000 + 60 + 760 + 1_000 + 3


def test_text_is_indexed_while_a_device_is_waited_for():
    """An unindexed row has no draft, the others do; what is left when the device is ready waits."""
    text = speak(np.random.default_rng(0), 9_000)
    drafter = Drafter(SpecConfig(batch_threshold=8, min_survival=0.0), clock=lambda: 0.0)
    batch = Batch(drafter, "short", num_rows=2, length=9_000)
    batch.step([[10, 11, 10, 11, 10]])
    batch.add("long", text[:8_000], 9_000)
    nums_left = []
    for answers in ([True, True, False], [False], [True] * 9):
        times = iter(answers)
        drafter.catch_up(lambda: next(times))  # noqa: B023
        nums_left.append(drafter.index.stats().num_tokens_unindexed)
    assert nums_left == [8_000 - 2 * 1024, 8_000 - 2 * 1024, 0]
    assert list(map(bool, batch.step([[11], [int(text[8_000])]]))) == [True, True]


def test_a_full_index_closes_no_more_groups_than_it_needs():
    """Groups of four come and go, of which the budget holds a few of 32."""
    random, nums_open = np.random.default_rng(0), []
    batch = Batch(Drafter(SpecConfig(max_index_mb=1, batch_threshold=8)), num_rows=4, length=1_000)
    for _ in range(32):
        prompt = random.integers(0, 50_000, 8, dtype=np.int32)
        for row in range(4):
            batch.add(f"{row}", prompt, 1_000)
        for _ in range(20):
            batch.step([random.integers(0, 50_000, 49).tolist() for _ in range(4)])
            nums_open.append(batch.drafter.index.stats().num_groups)
        batch.end()
    assert np.diff(nums_open).min() == -1 and (np.diff(nums_open) == -1).sum() > 12
    assert batch.drafter.counters.num_untracked_rows == 0


def test_rows_that_do_not_fit_leave_in_one_pass_and_the_history_keeps_none_of_them():
    """Each is of a group of its own, so that what leaves makes room for the others."""
    random = np.random.default_rng(0)
    config = SpecConfig(max_index_mb=1, batch_threshold=64, history=1)
    batch = Batch(Drafter(config), num_rows=64, length=2_000)
    index = batch.drafter.index
    index.index_and_draft = Mock(wraps=index.index_and_draft)  # type: ignore[method-assign]
    for i in range(64):
        batch.add(f"{i}", random.integers(0, 50_000, 8, dtype=np.int32), 2_000)
    nums_dropped = []
    for step in range(30):
        batch.step(random.integers(0, 50_000, (64, 33)).tolist())
        nums_dropped.append(batch.drafter.take_counters().num_untracked_rows)
        assert index.index_and_draft.call_count == step + 1
        check_index(index)
    assert nums_dropped == sorted(nums_dropped) and nums_dropped[0] == 0 and 32 < nums_dropped[-1] < 63
    assert index.stats().num_bytes <= 1 << 20
    batch.end()
    assert index.stats().num_sequences == 0
    assert len(batch.drafter.history._texts) == 64 - nums_dropped[-1]


def test_a_step_that_no_row_decoded_in_ends_what_the_gate_has_chosen(monkeypatch):
    """All were prefilled in it: it verifies no drafts, and neither does the step after."""
    promised: list[float] = []
    monkeypatch.setattr(DraftGains, "learn", lambda self, *args: promised.append(args[0]))
    ticks = itertools.count()
    batch = Batch(Drafter(SpecConfig(), lambda: next(ticks)), length=256)
    batch.add("a", max_level=256)
    while not any(batch.step([[10]])):
        pass
    batch.drafter.take_counters()
    batch.step([[]])
    counters = batch.drafter.take_counters()
    assert counters.num_steps == 0 and counters.draft_seconds > 0.0, "the drafter's time counts all the same"
    batch.step([[10]])
    assert promised[-1] == 0.0


def test_drafts_are_padded_in_every_decoding_row_while_the_gate_is_open():
    batch = make(*"abc", pads_drafts=True, num_speculative_tokens=4)
    assert batch.step([[10, 11, 12], [], []]) == [[PAD] * 4, [], []]
    assert batch.step([[13], [10, 11], []]) == [[PAD] * 4, [12, 13, PAD, PAD], []]
    assert batch.drafter.take_counters().num_draft_tokens == 2
    assert batch.step([[], [12, 13, 14], []], takes_drafts=False) == [[], [], []]


def test_drafts_are_padded_only_where_all_of_them_may_be_verified():
    batch = make(*"abc", pads_drafts=True, num_speculative_tokens=4, max_draft_tokens=8)
    assert batch.step([[10, 11], [12], []]) == [[PAD] * 4, [PAD] * 4, []]
    assert batch.step([[10], [14], [10]]) == [[], [], []]
    counters = batch.drafter.take_counters()
    assert (counters.num_steps, counters.num_steps_on, counters.num_steps_off_threshold) == (2, 1, 1)


def test_a_step_has_the_likeliest_tokens_of_all_rows_and_no_more_than_it_may():
    survivals = np.array([[0.9, 0.5, 0.5], [0.8, 0.7, 0.1], [0.5, 0.5, 0.9]], np.float32)
    numbers = np.array([3, 3, 2], np.int32)  # the last token is none
    likeliest = sorted([0.9, 0.5, 0.5, 0.8, 0.7, 0.1, 0.5, 0.5], reverse=True)
    for most in range(1, 9):
        kept = np.arange(3) < drafter_module._likeliest(survivals, numbers, most)[:, None]
        assert sorted(survivals[kept], reverse=True) == pytest.approx(likeliest[:most])


def test_max_draft_tokens_bounds_the_drafts_of_a_step():
    text = [10, 11, 12, 13, 14, 15]
    batch = make(*"abc", max_draft_tokens=5)
    batch.step([text] * 3)
    drafts = batch.step([text[:1]] * 3)
    assert sum(map(len, drafts)) == 5 and all(draft == text[1 : 1 + len(draft)] for draft in drafts)
