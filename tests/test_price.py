"""The price that mode sam finds itself: against plain replays of SuffixDecoding's policy."""

from __future__ import annotations

import contextlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from rollout_spec import price as module
from rollout_spec import reference as reference_module
from rollout_spec.config import MIN_TOKEN_PROB, SpecConfig
from rollout_spec.drafter import Drafter
from rollout_spec.index import SuffixIndex
from rollout_spec.native import InvalidArgument
from rollout_spec.price import (
    LEAST_PRICE,
    LEAST_SHARE,
    SETTINGS,
    PricedIndex,
    make_index,
)
from rollout_spec.reference import AIM
from rollout_spec.replay import IndexProposer, ReplayResult, read_trace, replay, replay_line
from tests.replays import decoded, policy, rollout
from tests.text import speak

TRACE = Path(__file__).parent / "data" / "demo_trace.jsonl.gz"
K = 8


def follow(trace, config, num_lines=None):
    """The price after a replay, and what the replay has counted."""
    result = ReplayResult()
    with contextlib.closing(IndexProposer(config)) as proposer:
        for line in list(trace)[:num_lines]:
            replay_line(proposer, line, [], config.num_speculative_tokens, result)
        return proposer.index.price, result


def test_the_references_spend_what_they_would_alone(monkeypatch):
    """Rollouts that mode sam decodes say what SuffixDecoding would have taken for them."""
    monkeypatch.setattr(reference_module, "MEMORY", 1e18)
    trace = list(read_trace(TRACE))
    price, ours = follow(trace, SpecConfig(num_speculative_tokens=K))
    for reference, setting in zip(price._references, SETTINGS, strict=True):
        assert reference.ours.num_row_steps == pytest.approx(ours.num_steps, rel=0.08)
        assert reference.ours.num_draft_tokens == pytest.approx(ours.num_draft_tokens, rel=0.08)
        alone = decoded(trace, policy(setting.max_spec_factor))
        spent = reference.spent
        # The last tokens of a line are never indexed, nor are all steps taken when it ends.
        assert spent.num_row_steps == pytest.approx(alone.num_steps, rel=0.08)
        assert spent.num_draft_tokens / spent.num_row_steps == pytest.approx(
            alone.draft_tokens_per_step, rel=0.02
        )


@pytest.mark.parametrize("alphabet", [20, 50, 300])
def test_no_more_is_spent_than_suffix_decoding_would(alphabet):
    """In text of whatever predictability; a fixed price spends more in some, less in others."""
    rng = np.random.default_rng(alphabet)
    lines = [rollout([speak(rng, 400, alphabet=alphabet) for _ in range(4)]) for _ in range(24)]
    price, ours = follow(lines, SpecConfig(num_speculative_tokens=K))
    spent = [decoded(lines, policy(setting.max_spec_factor)).draft_tokens_per_step for setting in SETTINGS]
    budget = min(number * setting.share for number, setting in zip(spent, SETTINGS, strict=True))
    fixed = replay(lines, SpecConfig(num_speculative_tokens=K, min_token_prob=MIN_TOKEN_PROB))
    assert LEAST_PRICE < price.value < 1.0
    # What moves the price is what was spent too much.
    excess = math.log(price.value / MIN_TOKEN_PROB) / module.STEEPNESS
    expected = AIM * budget * ours.num_steps + excess
    assert ours.num_draft_tokens == pytest.approx(expected, rel=0.02)
    assert abs(fixed.draft_tokens_per_step - budget) > abs(ours.draft_tokens_per_step - budget)


def test_the_price_stays_a_price():
    """Whatever was saved or wasted before."""
    price = make_index(SpecConfig()).price
    for reference in price._references:
        reference.spent.add(1000, 2000)
    for num_draft_tokens, expected in ((1_000_000, 1.0), (0, LEAST_PRICE)):
        for reference in price._references:
            reference.ours.add(100_000, num_draft_tokens)
        price._decode(1)
        assert price.value == expected
        assert abs(price._excess()) == pytest.approx(module.MAX_EXCESS)


@pytest.mark.parametrize("num_rows", [1, 16, 64])
@pytest.mark.parametrize("clears", [True, False])
def test_groups_of_any_size_are_kept_up_with(num_rows, clears):
    """As an engine steps, group after group, with and without new weights in between."""
    drafter = Drafter(SpecConfig(batch_threshold=64))
    for number in range(max(3, 64 // num_rows)):
        texts = [speak(np.random.default_rng([number, i]), 300, alphabet=50) for i in range(num_rows)]
        engine = Engine(None, texts, groups=[f"{number}"] * num_rows, drafter=drafter)
        while engine.ids:
            engine.verify()
        if clears:
            drafter.clear()
    drafted = drafter.counters.num_draft_tokens
    for reference in drafter.index.price._references:
        assert reference.ours.num_draft_tokens > 0.9 * drafted


def test_who_has_a_price_of_its_own():
    assert isinstance(make_index(SpecConfig()), PricedIndex)
    for options in (
        {"min_token_prob": 0.2},
        {"mode": "frequent"},
        {"batch_threshold": "auto"},
        {"batch_threshold": 0},
    ):
        assert type(make_index(SpecConfig(**options))) is SuffixIndex


class Engine:
    """Steps of a drafter over texts that are known, each row as fast as its drafts allow."""

    def __init__(self, config, texts, prompt=(1, 2), *, groups=None, drafter=None):
        self.drafter = drafter or Drafter(config)
        self.drafts = None
        self.prompt = np.array(prompt, np.int32)
        self.texts = [[*prompt, *text] for text in texts]
        self.tokens = np.zeros((len(texts), 4096), np.int32)
        for row, text in zip(self.tokens, self.texts, strict=True):
            row[: len(text)] = text
        self.levels = np.full(len(texts), len(prompt), np.int32)
        self.ids = [str(i) for i in range(len(texts))]
        for i, id_ in enumerate(self.ids):
            self.drafter.open(id_, self.prompt, 4096, group=groups[i] if groups else "g")

    @property
    def price(self):
        return self.drafter.index.price

    def step(self, num_tokens=1):
        """Of each row, at least so many tokens more."""
        before = self.levels.copy()
        for row, text in enumerate(self.texts):
            self.levels[row] = min(len(text), before[row] + num_tokens)
        return self.drafter.step(self.ids, (self.levels - before).tolist(), self.tokens, self.levels)

    def verify(self):
        """Each row says what it was drafted and one token more, and ends where its text does."""
        accepted = np.zeros(len(self.ids), np.int32)
        for row, draft in enumerate(self.drafts or []):
            text = self.texts[row][self.levels[row] :]
            while accepted[row] < len(draft) and draft[accepted[row]] == text[accepted[row]]:
                accepted[row] += 1
        before = self.levels.copy()
        self.levels += accepted + 1
        self.drafts = self.drafter.step(self.ids, (self.levels - before).tolist(), self.tokens, self.levels)
        # A draft may not reach beyond the end of the text that is known.
        over = [len(text) - level <= K + 1 for text, level in zip(self.texts, self.levels, strict=True)]
        for id_ in itertools.compress(self.ids, over):
            self.drafter.close(id_)
        kept = [not is_over for is_over in over]
        self.ids, self.texts, self.drafts = (
            list(itertools.compress(values, kept)) for values in (self.ids, self.texts, self.drafts)
        )
        self.tokens, self.levels = self.tokens[kept], self.levels[kept]


def closed_step(engine):
    """Of the index: all rows, none of which may draft."""
    rows = np.arange(len(engine.ids), dtype=np.int32)
    sequences = np.array([engine.drafter._requests[id_].sequence for id_ in engine.ids], np.int32)
    return sequences, engine.tokens, rows, engine.levels, np.zeros_like(rows)


def texts_of(number, length=600, alphabet=300):
    rng = np.random.default_rng(number)
    return [speak(rng, length, alphabet=alphabet) for _ in range(number)]


def indexed_by(reference):
    return reference.index.stats().num_tokens


def test_text_without_drafts_is_not_indexed_until_there_are_some():
    """With the gate closed following costs next to nothing; what was said then is caught up with in parts."""
    engine = Engine(SpecConfig(batch_threshold=3), texts_of(4))
    for _ in range(300):
        engine.step()
    references = engine.price._references
    assert [indexed_by(reference) for reference in references] == [2, 2]  # the prompt
    engine.drafter.close(engine.ids.pop())
    engine.texts.pop()
    engine.levels = engine.levels[:3].copy()
    most = [2, 2]
    for _ in range(250):
        engine.step()
        now = [indexed_by(reference) for reference in references]
        assert all(
            new - old <= reference_module.MIN_PLAIN_TOKENS + 4 * reference_module.MAX_PACE * 2 * (K + 1)
            for old, new in zip(most, now, strict=True)
        )
        most = now
    assert all(number > 4 * 300 for number in most)
    assert all(reference.spent.num_row_steps > 0 for reference in references)


def test_a_request_that_begins_anew_ends_the_following_only():
    engine = Engine(SpecConfig(), texts_of(4))
    for _ in range(50):
        engine.step()
    assert engine.price._group_of
    engine.levels[:] = 10
    engine.step()
    assert not engine.price._group_of
    value = engine.price.value
    for _ in range(20):
        assert len(engine.step()) == 4
    assert engine.drafter.counters.num_draft_tokens > 0 and engine.price.value == value


def test_no_room_for_the_references_is_no_loss():
    """Theirs is a sixteenth of the budget each; when it is full the price stays, and drafting goes on."""
    engine = Engine(SpecConfig(max_index_mb=1), texts_of(4, 3000, 400))
    followed = [bool(engine.price._group_of)]
    for _ in range(700):
        engine.step(4)
        followed.append(bool(engine.price._group_of))
    assert followed[0] and not followed[-1]
    assert engine.drafter.counters.num_untracked_rows == 0
    assert engine.drafter.counters.num_draft_tokens > 0
    engine.drafter.clear()
    engine.drafter.open("next", engine.prompt, 4096, group="next")
    assert engine.price._group_of


def test_a_row_at_its_limit_is_compared_like_others():
    """It has no room for a draft left, and says its last token beside others that draft."""
    first, *others = texts_of(4, 300)
    engine = Engine(SpecConfig(), [first[:80], *others])
    engine.drafter.clear()
    for id_, text in zip(engine.ids, engine.texts, strict=True):
        engine.drafter.open(id_, engine.prompt, len(text), group="g")
    engine.price._next = 10**6
    for _ in range(85):
        engine.step()
    engine.price._next = 0
    for _ in range(100):
        engine.step()
    for reference in engine.price._references:
        # One step a token, but for the first and the last, and those that others must be known ahead.
        assert reference.ours.num_row_steps > 3 * 165 + 78


def test_one_group_that_begins_anew_is_noticed_whenever_it_is_heard():
    """Even where it has said more than before by then."""
    engine = Engine(SpecConfig(batch_threshold=16), texts_of(16), groups=["a"] * 8 + ["b"] * 8)
    for _ in range(20):
        engine.step()
    assert engine.price._group_of
    engine.levels[0] = 10
    engine.price._next = engine.price._num_steps + 30
    engine.step(0)
    for _ in range(20):
        engine.step()
    assert engine.price._group_of and engine.levels[0] > 22
    for _ in range(20):
        engine.step()
    assert not engine.price._group_of


def test_new_weights_end_the_following_and_keep_the_price():
    engine = Engine(SpecConfig(), texts_of(4))
    for _ in range(200):
        engine.step()
    value = engine.price.value
    engine.drafter.clear()
    assert engine.price.value == value != MIN_TOKEN_PROB
    assert [indexed_by(reference) for reference in engine.price._references] == [0, 0]


def test_an_eighth_of_the_rows_is_followed():
    groups = [f"g{i // 4}" for i in range(80)]
    engine = Engine(SpecConfig(batch_threshold=80), texts_of(80, 40), groups=groups)
    # The first group, and those that find seven eighths of the rows taken by others.
    assert len(engine.price._group_of) == 12
    # New weights, and the requests that were open are gone with everything else.
    engine.drafter.clear()
    engine = Engine(SpecConfig(), texts_of(80, 40), groups=groups, drafter=engine.drafter)
    assert len(engine.price._group_of) == 12


def test_later_on_a_sixteenth_of_the_steps_is_followed(monkeypatch):
    monkeypatch.setattr(module, "NUM_FIRST_ROW_STEPS", 100)
    engine = Engine(SpecConfig(), texts_of(4, 500))
    shares = []
    for number in range(60):
        steps = 0
        for _ in range(100):
            engine.step()
            engine.levels[:] = np.minimum(engine.levels, 400)
            steps += bool(engine.price._group_of)
        shares.append(steps / 100)
        for id_ in engine.ids:
            engine.drafter.close(id_)
        engine.ids = [f"{number}-{i}" for i in range(4)]
        engine.levels[:] = 2
        for id_ in engine.ids:
            engine.drafter.open(id_, engine.prompt, 4096, group=f"next {number}")
    assert shares[0] == 1.0
    # Steps without drafts earn nothing.
    allowance = engine.price._allowance
    for _ in range(50):
        engine.drafter._index.step(*closed_step(engine))
    assert engine.price._allowance == allowance
    assert np.mean(shares[5:]) == pytest.approx(1 / 16, abs=0.05)


def test_a_row_that_waits_leaves_the_price_alone():
    """A preempted request keeps its place, and its siblings go on: their reference waits for it."""
    engine = Engine(SpecConfig(), texts_of(4, 2000))
    for _ in range(100):
        engine.step()
    first = engine.price.value
    waiting = engine.ids.pop(), engine.texts.pop()
    levels, engine.levels = engine.levels, engine.levels[:3].copy()
    for _ in range(500):
        engine.step()
    stalled = [reference.spent.num_row_steps for reference in engine.price._references]
    assert all(number < 4 * 110 for number in stalled)
    for reference in engine.price._references:
        assert reference.ours.num_row_steps < 4 * 110
    assert engine.price.value == pytest.approx(first, rel=0.2)
    engine.ids.append(waiting[0])
    engine.texts.append(waiting[1])
    engine.levels = np.append(engine.levels, levels[3])
    for _ in range(300):
        engine.step()
    for before, reference in zip(stalled, engine.price._references, strict=True):
        assert reference.spent.num_row_steps > before + 400


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_text_of_the_history_is_no_step(num_steps):
    """It is indexed in parts between the engine's steps, however these fall."""
    history = SpecConfig(history=64)
    engine = Engine(history, texts_of(64, 300))
    for row, text in enumerate(engine.texts):
        engine.levels[row] = len(text)
    engine.drafter.step(engine.ids, engine.levels.tolist(), engine.tokens, engine.levels)
    engine.drafter.clear()
    engine = Engine(history, texts_of(4, 300), groups=["other"] * 4, drafter=engine.drafter)
    for _ in range(num_steps):
        engine.step()
    engine.drafter.open("waiting", engine.prompt, 4096, group="g")
    for _ in range(60):
        assert engine.drafter._backlog
        engine.step()
    assert engine.price._num_steps == engine.drafter.counters.num_steps_on >= 56
    [reference] = engine.price._references
    assert reference.spent.num_row_steps > 100


def test_history_is_text_of_the_references_too():
    config = SpecConfig(history=4)
    engine = Engine(config, texts_of(3, 300))
    for _ in range(300):
        engine.step()
    engine.drafter.clear()
    for id_ in ("a", "b"):
        engine.drafter.open(id_, engine.prompt, 4096, group="g")
    engine.ids, engine.texts, engine.levels = ["a", "b"], engine.texts[:2], engine.levels[:2] * 0 + 2
    [reference] = engine.price._references
    for _ in range(60):
        engine.step()
    own = int(engine.levels.sum()) - 2
    assert indexed_by(reference) > 3 * 250 + own - 50


def test_the_metrics_have_the_price():
    engine = Engine(SpecConfig(), texts_of(4))
    prices = []
    for _ in range(200):
        prices.append(engine.price.value)
        engine.step()
    counters = engine.drafter.take_counters()
    assert counters.sum_min_token_prob / counters.num_steps_on == pytest.approx(np.mean(prices))
    assert len(set(prices)) > 10


def test_a_closed_index_is_closed_as_a_whole():
    index = make_index(SpecConfig())
    index.open_group(np.array([1], np.int32))
    index.close()
    with pytest.raises(InvalidArgument, match="closed"):
        index.price._references[0].index.stats()


def test_nothing_is_too_much_before_anything_was_decoded():
    assert make_index(SpecConfig()).price._excess() == 0.0


def test_the_references_share_the_decision():
    """The first decides, the second where it leaves less, down to a share of the first's."""
    price = make_index(SpecConfig()).price
    first, second = price._references
    for reference in price._references:
        reference.ours.add(100, 200)
    first.spent.add(100, 200)
    for by_second, expected in ((400, 1.0), (285, 0.95), (200, LEAST_SHARE)):
        second.spent = type(second.spent)()
        second.spent.add(100, by_second)
        assert price._excess() == pytest.approx(200 - AIM * 200 * expected)
