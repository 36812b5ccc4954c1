"""Long seeded runs beside the oracle: what the index learns, and that it cannot be driven mad."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollout_spec.drafting.corpus import open_corpus
from rollout_spec.drafting.index import ModelDrafts, SuffixIndex
from tests.oracle import CorpusOracle, Experience, GroupOracle, ModelProposal, Options, SequenceOracle
from tests.text import int32, save_corpus, speak

NUM_ROWS, MAX_RESPONSE, NUM_COLUMNS, K = 20, 40, 64, 4


class Pair:
    """An index and its oracle, which live through the same."""

    def __init__(self, seed, texts, path):
        self.rng = np.random.default_rng(seed)
        self.options = Options(num_speculative_tokens=K, corpus=CorpusOracle(texts))
        self.index = SuffixIndex(num_speculative_tokens=K, corpus=open_corpus(save_corpus(path, texts)))
        self.experience = Experience()
        self.matrix = np.zeros((NUM_ROWS, NUM_COLUMNS), np.int32)
        self.rows = {}  # row: sequence, oracle, the text that the target will have

    def speak(self, length):
        return speak(self.rng, length, num_words=12, alphabet=9)

    def open_group(self, rows):
        """Siblings behind one prompt; the last of them begins at the root."""
        prompt = self.speak(int(self.rng.integers(0, 20)))
        group, oracle = self.index.open_group(prompt), GroupOracle(prompt.tolist(), self.options)
        for row in rows:
            after_prompt = row != rows[-1]
            sequence = self.index.open_sequence(group, after_prompt=after_prompt)
            slow = SequenceOracle(oracle, after_prompt, self.experience)
            self.rows[row] = (sequence, slow, [*slow.start, *self.speak(MAX_RESPONSE).tolist()])
        return group

    def close_group(self, group, rows):
        for row in rows:
            self.index.close_sequence(self.rows.pop(row)[0])
        self.index.close_group(group)

    def step(self, rows):
        """Each row gets what a target would sample: its draft as far as that is right, and one token more.

        Now and then more, as after a step that was left out: of what it drafted behind the first wrong token,
        which is about another text, nothing is learned.
        """
        price = float(self.rng.choice([0.0, 0.0, 0.2]))
        for row in rows:
            _, slow, text = self.rows[row]
            known = len(slow.text)
            num_new = self.num_accepted(slow.last_draft, text[known:]) + int(self.rng.choice([1, 1, 1, 4]))
            level = min(len(text), known + num_new)
            self.matrix[row, :level] = text[:level]
            slow.index(text[:level])
        levels = np.array([len(self.rows[row][1].text) for row in rows], np.int32)
        sequences = np.array([self.rows[row][0] for row in rows], np.int32)
        budgets = np.full(len(rows), K, np.int32)
        result = self.index.index_and_draft(
            sequences, self.matrix, np.array(rows, np.int32), levels, budgets, price
        )
        for i, row in enumerate(rows):
            slow = self.rows[row][1]
            num = result.num_draft_tokens[i]
            assert result.draft_tokens[i, :num].tolist() == slow.draft(K, price)
            assert result.survivals[i, :num] == pytest.approx(slow.survivals, rel=1e-5)

    @staticmethod
    def num_accepted(draft, text):
        pairs = zip(draft, text, strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    def is_over(self, row):
        _, slow, text = self.rows[row]
        return len(slow.text) == len(text)


def test_thousands_of_row_steps_equal_the_oracle(tmp_path):
    """Twenty rows, more than one turn of walks: what a walk changed would show in another row's draft."""
    text = speak(np.random.default_rng(9), 60, num_words=12, alphabet=9).tolist()
    pair = Pair(2, [text], tmp_path / "corpus.sam")
    num_row_steps = 0
    groups = {}
    while num_row_steps < 1500:
        for first in range(0, NUM_ROWS, 4):
            if first not in groups:
                groups[first] = pair.open_group(range(first, first + 4))
        rows = [row for row in pair.rng.permutation(NUM_ROWS).tolist() if not pair.is_over(row)]
        pair.step(rows)
        num_row_steps += len(rows)
        for first in list(groups):
            if all(pair.is_over(row) for row in range(first, first + 4)):
                pair.close_group(groups.pop(first), range(first, first + 4))
    # Long enough for the table of contexts to grow, and for the weights to move.
    assert len(pair.experience.contexts.buckets) >= 512
    pair.index.validate()


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_nothing_is_learned_behind_the_first_wrong_token(wrong):
    """The rest of the draft comes true all the same, in a step that brings more than one wrong token. A model
    drafts, too."""
    rng = np.random.default_rng(8)
    oracle = SequenceOracle(GroupOracle((), Options(num_speculative_tokens=6)), True, Experience())
    with SuffixIndex(num_speculative_tokens=6) as index:
        sequence = index.open_sequence(index.open_group(int32()))
        text = rng.integers(0, 4, 12).tolist()
        for _ in range(25):
            row = np.array([text], np.int32)
            tokens, confidences = rng.integers(0, 4, 4).tolist(), rng.integers(0, 12, 4).tolist()
            model = ModelDrafts(
                np.array([tokens], np.int32), np.array([confidences], np.float32) - np.float32(3.5)
            )
            result = index.index_and_draft(
                int32(sequence), row, int32(0), int32(len(text)), int32(6), model_drafts=model
            )
            oracle.index(text)
            draft = oracle.draft(
                6, 0.0, [ModelProposal(*each) for each in zip(tokens, confidences, strict=True)]
            )
            assert result.draft_tokens[0, : len(draft)].tolist() == draft
            assert result.survivals[0, : len(draft)] == pytest.approx(oracle.survivals, rel=1e-5)
            text += [token + (i == wrong) for i, token in enumerate(draft)]


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
