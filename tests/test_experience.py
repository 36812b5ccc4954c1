"""Long seeded runs beside the oracle: what the index learns, and that it cannot be driven mad."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.drafting.corpus import open_corpus
from rollout_spec.drafting.index import SuffixIndex
from tests.oracle import CorpusOracle, Experience, GroupOracle, Options, SequenceOracle
from tests.text import int32, save_corpus, speak

NUM_ROWS, K = 20, 4


def test_thousands_of_row_steps_equal_the_oracle(tmp_path):
    """Twenty rows, more than one turn of walks: what a walk changed would show in another row's draft.

    Siblings behind five prompts, the last of each begins at the root. Each row gets what a target would
    sample: its draft as far as that is right, and one token more. Now and then more, as after a step that was
    left out: of what it drafted behind the first wrong token nothing is learned.
    """
    rng = np.random.default_rng(2)

    def say(length):
        return speak(rng, length, num_words=12, alphabet=9).tolist()

    corpus = [say(60)]
    options, experience = Options(num_speculative_tokens=K, corpus=CorpusOracle(corpus)), Experience()
    mapped = open_corpus(save_corpus(tmp_path / "corpus.sam", corpus))
    index = SuffixIndex(num_speculative_tokens=K, corpus=mapped)
    sequences, oracles, matrix = [], [], np.zeros((NUM_ROWS, 128), np.int32)
    for row in range(NUM_ROWS):
        after_prompt = row % 4 != 3
        if row % 4 == 0:
            prompt = say(int(rng.integers(0, 20)))
            group, of_group = index.open_group(int32(*prompt)), GroupOracle(prompt, options)
        sequences.append(index.open_sequence(group, after_prompt=after_prompt))
        oracles.append(SequenceOracle(of_group, after_prompt, experience))
    texts = [[*oracle.start, *say(100)] for oracle in oracles]
    while rows := [i for i in rng.permutation(NUM_ROWS).tolist() if len(oracles[i].text) < len(texts[i])]:
        price = float(rng.choice([0.0, 0.0, 0.2]))
        for row in rows:
            text, known = texts[row], len(oracles[row].text)
            agrees = [a == b for a, b in zip(oracles[row].last_draft, text[known:], strict=False)]
            level = min(len(text), known + [*agrees, False].index(False) + int(rng.choice([1, 1, 1, 4])))
            matrix[row, :level] = text[:level]
            oracles[row].index(text[:level])
        levels = int32(*(len(oracles[row].text) for row in rows))
        budgets = np.full(len(rows), K, np.int32)
        result = index.index_and_draft(
            int32(*(sequences[row] for row in rows)), matrix, int32(*rows), levels, budgets, price
        )
        for i, row in enumerate(rows):
            num = result.num_draft_tokens[i]
            assert result.draft_tokens[i, :num].tolist() == oracles[row].draft(K, price)
            assert result.survivals[i, :num] == pytest.approx(oracles[row].survivals, rel=1e-5)
    index.validate()
    # Long enough for the table of contexts to grow, and for the weights to move.
    assert len(experience.contexts.buckets) >= 512


def decode(index, sequence, sample, num_tokens):
    """A target that sees what is drafted: `sample(level, drafted)` is its token there, drafted -1: none.

    Yields the level before every step, its draft, and how many tokens of it were accepted.
    """
    text = np.zeros((1, num_tokens + 9), np.int32)
    text[0, 0], level = sample(0, -1), 1
    while level < num_tokens:
        result = index.index_and_draft(int32(sequence), text, int32(0), int32(level), int32(8), 0.15)
        draft = result.draft_tokens[0, : result.num_draft_tokens[0]].tolist()
        before = level
        for drafted in [*draft, -1]:
            text[0, level] = sampled = sample(level, drafted)
            level += 1
            if sampled != drafted:
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

    def sample(level, drafted):
        expected = int(cycle[level % len(cycle)])
        if lies <= level < lies + honest or (bait and drafted < 0):
            return expected
        other = int(rng.integers(0, 39))
        return other + (other >= drafted >= 0)

    with SuffixIndex(num_speculative_tokens=8) as index:
        sequence = index.open_sequence(index.open_group(int32()))
        steps = []
        for i, step in enumerate(decode(index, sequence, sample, 2 * lies + honest)):
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
    text = speak(np.random.default_rng(6), 4009).tolist()
    with SuffixIndex(num_speculative_tokens=8, max_bytes=4 << 20) as index:
        empty = index.stats().num_bytes
        num_steps = []
        for _ in range(2):
            sequence = index.open_sequence(index.open_group(int32()))
            num_steps.append(sum(1 for _ in decode(index, sequence, lambda level, _: text[level], 4000)))
            index.clear()
        assert num_steps[1] < 0.7 * num_steps[0]
        assert empty < index.stats().num_bytes <= empty + (4 << 20) // 8
        index.validate()


def test_a_failed_step_learns_nothing():
    text = speak(np.random.default_rng(7), 209)
    drafts = []
    for broken in (False, True):
        with SuffixIndex(num_speculative_tokens=8) as index:
            sequence = index.open_sequence(index.open_group(int32()))
            drafts.append([])
            for level, draft, _ in decode(index, sequence, lambda level, _: int(text[level]), 200):
                drafts[-1].append(draft)
                if broken:
                    with pytest.raises(ValueError, match="must not be negative"):
                        index.index_and_draft(
                            int32(sequence), text[None], int32(0), int32(level + 1), int32(-1)
                        )
    assert drafts[0] == drafts[1] and any(drafts[0])
