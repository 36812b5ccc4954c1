"""Long seeded runs of several rows: every draft and all that is learned equal the oracle's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollout_spec.drafting.corpus import open_corpus
from rollout_spec.drafting.index import SuffixIndex
from tests.oracle import CorpusOracle, Experience, GroupOracle, Options, SequenceOracle
from tests.text import save_corpus, speak

NUM_ROWS, MAX_RESPONSE, NUM_COLUMNS, K = 20, 40, 64, 4


class Pair:
    """An index and its oracle, which live through the same."""

    def __init__(self, seed, texts=None, path=None):
        self.rng = np.random.default_rng(seed)
        corpus = CorpusOracle(texts) if texts else None
        self.options = Options(num_speculative_tokens=K, corpus=corpus)
        mapped = open_corpus(save_corpus(path, texts)) if texts else None
        self.index = SuffixIndex(num_speculative_tokens=K, corpus=mapped)
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


@pytest.mark.parametrize("with_corpus", [False, True])
def test_thousands_of_row_steps_equal_the_oracle(tmp_path, with_corpus):
    """Twenty rows, more than one turn of walks: what a walk changed would show in another row's draft."""
    texts = [speak(np.random.default_rng(9), 60, num_words=12, alphabet=9).tolist()] if with_corpus else None
    pair = Pair(1 + with_corpus, texts, tmp_path / "corpus.sam")
    num_row_steps = 0
    groups = {}
    while num_row_steps < 2000:
        for first in range(0, NUM_ROWS, 4):
            if first not in groups:
                groups[first] = pair.open_group(range(first, first + 4))
        rows = [row for row in pair.rng.permutation(NUM_ROWS).tolist() if not pair.is_over(row)]
        pair.step(rows)
        num_row_steps += len(rows)
        for first in list(groups):
            if all(pair.is_over(row) for row in range(first, first + 4)):
                pair.close_group(groups.pop(first), range(first, first + 4))
    pair.index.validate()
