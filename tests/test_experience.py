"""Mode sam beyond single steps: what it learns, what it does not share, and that it cannot be driven mad."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.index import SuffixIndex
from tests.oracle import Experience, GroupOracle, Options, SequenceOracle
from tests.text import speak


def int32(*values):
    return np.array(values, np.int32)


def decode(index, sequence, text, start, budget=8):
    """Feed a text as a target would: accepted draft tokens and one more a step; yields every draft."""
    level = start + 1
    while level <= len(text):
        result = index.step(int32(sequence), text[None], int32(0), int32(level), int32(budget))
        draft = result.draft_tokens[0, : result.num_draft_tokens[0]].tolist()
        said = text[level : level + len(draft)].tolist()
        agrees = [drafted == token for drafted, token in zip(draft, said, strict=False)]
        accepted = [*agrees, False].index(False)
        yield level, draft, accepted
        if level == len(text):
            return
        level = min(len(text), level + accepted + 1)


@pytest.mark.parametrize("share", [True, False])
def test_long_texts_draft_as_the_oracle_does(share):
    """Long enough for the table of contexts to grow several times and for the weights to move."""
    rng = np.random.default_rng(1)
    options = {"num_speculative_tokens": 6, "mode": "sam", "min_token_prob": 0.1, "share_contexts": share}
    experience = Experience()
    with SuffixIndex(**options) as index:
        for _ in range(5):
            text = speak(rng, 240)
            oracle = SequenceOracle(GroupOracle(text[:10].tolist(), Options(**options)), True, experience)
            sequence = index.open_sequence(index.open_group(text[:10]))
            for level, draft, _ in decode(index, sequence, text, 10):
                oracle.index(text[:level].tolist())
                assert oracle.draft(8)[1] == draft
        assert len(experience.contexts.buckets) >= 512
        index.validate()


def test_what_was_said_once_is_told_apart_by_who_said_it():
    """Own text, live and finished siblings, older policies: cells and so survivals are the oracle's."""
    rng = np.random.default_rng(4)
    options = {"num_speculative_tokens": 4, "mode": "sam", "min_token_prob": 0.01}
    experience = Experience()
    prompt = speak(rng, 12)
    told = np.concatenate([prompt, speak(rng, 120)])  # what siblings say, with other words here and there
    with SuffixIndex(**options) as index:
        group, oracle = index.open_group(prompt), GroupOracle(prompt.tolist(), Options(**options))
        live = []
        for weight in [1, 3, *[4] * 10]:
            text = np.where((rng.random(132) < 0.1) & (np.arange(132) >= 12), rng.integers(1000), told)
            sequence = index.open_sequence(group, weight=weight)
            live.append((sequence, text.astype(np.int32), SequenceOracle(oracle, True, experience, weight)))
            while len(live) == 3:
                live = [row for row in live if decode_some(index, *row, rng)]
        index.validate()
    sources = {cell[4] for cell in experience.cells if cell[0] == "match" and isinstance(cell[4], str)}
    assert sources == {"own text", "live sibling", "finished sibling", "older policy"}


def decode_some(index, sequence, text, oracle, rng):
    """A step of one sequence, as the oracle's; whether it goes on.

    One at a time: whoever comes to a cell first sets its prior, and the rows of a step take turns.
    """
    level = min(len(text), len(oracle.text) + int(rng.integers(1, 4)))
    result = index.step(int32(sequence), text[None], int32(0), int32(level), int32(4))
    oracle.index(text[:level].tolist())
    draft = oracle.draft(4)[1]
    assert result.draft_tokens[0, : result.num_draft_tokens[0]].tolist() == draft
    assert result.survivals[0, : len(draft)] == pytest.approx(oracle.survivals, rel=1e-5)
    if level < len(text):
        return True
    index.close_sequence(sequence)
    oracle.close()
    return False


def test_a_group_may_have_more_sequences_than_numbers_for_speakers():
    """One number for several: they may be taken for one another, and nothing else happens."""
    prompt = speak(np.random.default_rng(5), 8)
    rows = np.tile(np.append(prompt, 0), (600, 1)).astype(np.int32)
    rows[:, 8] = np.arange(600)
    with SuffixIndex(num_speculative_tokens=4, mode="sam") as index:
        group = index.open_group(prompt)
        sequences = [index.open_sequence(group) for _ in range(600)]
        everyone = np.arange(600, dtype=np.int32)
        index.step(int32(*sequences), rows, everyone, np.full(600, 9, np.int32), np.full(600, 4, np.int32))
        for sequence in sequences[::2]:
            index.close_sequence(sequence)
        index.validate()
        left = sequences[1::2]
        index.step(int32(*left), rows, everyone[:300], np.full(300, 9, np.int32), np.full(300, 4, np.int32))
        index.validate()


def test_other_prompts_are_evidence_unless_sharing_is_off():
    first, second = speak(np.random.default_rng(2), 3000), speak(np.random.default_rng(3), 600)
    num_accepted = {}
    for share in (True, False):
        with SuffixIndex(num_speculative_tokens=8, mode="sam", share_contexts=share) as index:
            for text in (first, second):
                sequence = index.open_sequence(index.open_group(int32()))
                num_accepted[share] = sum(accepted for *_, accepted in decode(index, sequence, text, 0))
    assert num_accepted[True] > 1.2 * num_accepted[False]


def converse(index, sequence, say, num_tokens):
    """A target that sees what is drafted: `say(level, drafted)` is its token there, drafted -1 for nothing.

    Yields the level before every step, its draft, and how many tokens of it were accepted.
    """
    text = np.zeros((1, num_tokens + 9), np.int32)
    level = 1
    while level < num_tokens:
        result = index.step(int32(sequence), text, int32(0), int32(level), int32(8))
        draft = result.draft_tokens[0, : result.num_draft_tokens[0]].tolist()
        before = level
        for drafted in [*draft, -1]:
            text[0, level] = said = say(level, drafted)
            level += 1
            if said != drafted:
                break
        yield before, draft, level - before - 1


@pytest.mark.parametrize("bait", [False, True])
def test_an_adversary_wastes_little_and_honesty_is_believed_again(bait):
    """Two phases of lies, and one of honest repetition in between.

    Lies: never the token that is drafted, whatever it is. Where nothing is drafted, a random one; or, as a
    bait, the one that repetition leads to expect.
    """
    rng = np.random.default_rng(4)
    cycle = rng.integers(0, 40, 50)
    lies, honest = 4000, 1500

    def say(level, drafted):
        expected = int(cycle[level % len(cycle)])
        if lies <= level < lies + honest or (bait and drafted < 0):
            return expected
        other = int(rng.integers(0, 39))
        return other + (other >= drafted >= 0)

    with SuffixIndex(num_speculative_tokens=8, mode="sam", min_token_prob=0.15) as index:
        sequence = index.open_sequence(index.open_group(int32()))
        steps = []
        for i, step in enumerate(converse(index, sequence, say, 2 * lies + honest)):
            steps.append(step)
            if i % 100 == 0:
                index.validate()
        index.validate()
    assert any(accepted == 8 for level, _, accepted in steps if lies <= level < lies + 200)
    for first in (0, lies + honest):
        wasted = np.array([len(draft) for level, draft, _ in steps if first <= level < first + lies])
        # A bait costs about every other step one token; without one drafting all but ends.
        assert wasted.mean() < (0.75 if bait else 0.1)
        assert wasted[len(wasted) // 2 :].mean() < (0.75 if bait else 0.02)


def test_what_was_learned_outlives_the_groups_and_is_bounded():
    text = speak(np.random.default_rng(6), 4000)
    with SuffixIndex(num_speculative_tokens=8, mode="sam", max_bytes=4 << 20) as index:
        empty = index.stats().num_bytes
        num_steps = []
        for _ in range(2):
            sequence = index.open_sequence(index.open_group(int32()))
            num_steps.append(sum(1 for _ in decode(index, sequence, text, 0)))
            index.clear()
        assert num_steps[1] < 0.7 * num_steps[0]
        assert empty < index.stats().num_bytes <= empty + (4 << 20) // 8
        index.validate()


@pytest.mark.parametrize("mode", ["sam", "suffix_policy"])
def test_a_failed_step_learns_nothing(mode):
    text = speak(np.random.default_rng(7), 200)
    drafts = []
    for broken in (False, True):
        with SuffixIndex(num_speculative_tokens=8, mode=mode, min_token_prob=0.05) as index:
            sequence = index.open_sequence(index.open_group(int32()))
            said = []
            for level, draft, _ in decode(index, sequence, text, 0):
                said.append(draft)
                if broken and level < len(text):
                    worse = np.full((1, len(text)), -1, np.int32)
                    with pytest.raises(ValueError, match="must not be negative"):
                        index.step(int32(sequence), worse, int32(0), int32(level + 1), int32(8))
            drafts.append(said)
    assert drafts[0] == drafts[1]
