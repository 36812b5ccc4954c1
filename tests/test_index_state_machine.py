"""Random interleavings of groups and sequences: every draft equals the oracle's, every invariant holds."""

from __future__ import annotations

import pathlib
import tempfile

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_spec.drafting.corpus import Corpus, open_corpus
from rollout_spec.drafting.index import ModelDrafts, SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, InvalidArgument, UnknownId
from tests.oracle import CorpusOracle, Experience, GroupOracle, ModelProposal, Options, SequenceOracle
from tests.text import save_corpus

NUM_COLUMNS = 160
EXPERIENCE_BYTES = 139_200  # of an empty index


def texts(max_size: int) -> st.SearchStrategy[list[int]]:
    """What breaks automata: small alphabets, long repeats, chains of one token."""
    small = st.lists(st.integers(0, 2), max_size=max_size)
    chain = st.builds(lambda token, n: [token] * n, st.integers(0, 1), st.integers(1, max_size + 1))
    repeat = st.builds(
        lambda unit, n: (unit * n)[:max_size],
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
        st.integers(2, max_size + 2),
    )
    wide = st.lists(st.integers(0, 40), max_size=max_size)
    return st.one_of(small, chain, repeat, wide)


# The automaton proposes such tokens too; -1 ends the model's draft.
MODEL_PROPOSALS = st.builds(ModelProposal, st.sampled_from([-1, 0, 0, 1, 2, 3, 40]), st.integers(0, 11))


def as_arrays(models: list[list[ModelProposal]]) -> ModelDrafts | None:
    """Log-odds from the middle of the range that a confidence stands for; the first and the last are open."""
    if not models:
        return None
    tokens, confidences = np.array(models, np.int32).transpose(2, 0, 1)
    log_odds = np.select([confidences == 0, confidences == 11], [-np.inf, np.inf], confidences - 3.5)
    return ModelDrafts(tokens, log_odds.astype(np.float32))


def build_corpus(given: list[list[int]]) -> Corpus:
    with tempfile.TemporaryDirectory() as folder:
        return open_corpus(save_corpus(pathlib.Path(folder, "corpus.sam"), given))


class IndexMachine(RuleBasedStateMachine):
    @initialize(
        num_speculative_tokens=st.integers(1, 6),
        corpus=st.none() | st.lists(texts(30), max_size=3),
        tight=st.sampled_from([0, 0, 6000, 12000]),
    )
    def make(self, tight, corpus, **options):
        self.options = Options(**options, corpus=None if corpus is None else CorpusOracle(corpus))
        self.corpus = corpus or [[]]
        self.max_bytes = tight + EXPERIENCE_BYTES if tight else 0
        # A tight budget has no room for a larger table of contexts.
        self.experience = Experience(max_bytes=tight)
        mapped = None if corpus is None else build_corpus(corpus)
        self.index = SuffixIndex(**options, corpus=mapped, max_bytes=self.max_bytes)
        self.groups: dict[int, GroupOracle] = {}
        self.sequences: dict[int, SequenceOracle] = {}
        self.sequence_group: dict[int, int] = {}
        self.num_tokens: dict[int, int] = {}

    def pick(self, data, ids):
        return data.draw(st.sampled_from(sorted(ids)))

    @rule(prompt=texts(40))
    def open_group(self, prompt):
        before = self.index.stats()
        try:
            group = self.index.open_group(np.array(prompt, np.int32))
        except BudgetExceeded:
            assert self.max_bytes and self.index.stats()._replace(num_bytes=0) == before._replace(num_bytes=0)
            return
        assert group not in self.groups
        self.groups[group] = GroupOracle(prompt, self.options)
        self.num_tokens[group] = len(prompt)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), after_prompt=st.booleans())
    def open_sequence(self, data, after_prompt):
        group = self.pick(data, self.groups)
        try:
            sequence = self.index.open_sequence(group, after_prompt=after_prompt)
        except BudgetExceeded:
            assert self.max_bytes
            return
        assert sequence not in self.sequences
        self.sequences[sequence] = SequenceOracle(self.groups[group], after_prompt, self.experience)
        self.sequence_group[sequence] = group

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def step(self, data):
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.sequences)), unique=True, min_size=1, max_size=4)
        )
        matrix = np.full((len(chosen) + 1, NUM_COLUMNS), -1, np.int32)
        rows = data.draw(st.permutations(range(len(chosen))), label="rows")
        levels, budgets = [], []
        for sequence, row in zip(chosen, rows, strict=True):
            oracle = self.sequences[sequence]
            if data.draw(st.integers(0, 9)) == 0:
                tokens = list(oracle.start) + data.draw(texts(max(1, len(oracle.text) - len(oracle.start))))
            else:
                tokens = list(oracle.text) + self.new_tokens(data, oracle)
            tokens = tokens[:NUM_COLUMNS]
            matrix[row, : len(tokens)] = tokens
            if len(tokens) >= len(oracle.text):
                # Tokens below the level that is indexed already are not read again.
                matrix[row, : len(oracle.text)] = -1
            levels.append(len(tokens))
            budgets.append(data.draw(st.integers(0, self.options.num_speculative_tokens + 1)))
            matrix[row, : len(oracle.start)] = -1
            oracle.row = tokens
        price = data.draw(st.sampled_from([0.0, 0.0, 0.1, 0.3, 0.7, 1.0]), label="price")
        models = self.model_drafts(data, len(matrix))
        before = self.index.stats()
        arrays = [np.array(values, np.int32) for values in (chosen, rows, levels, budgets)]
        try:
            result = self.index.step(arrays[0], matrix, *arrays[1:], price, 0, as_arrays(models))
        except BudgetExceeded:
            assert self.max_bytes and self.index.stats()._replace(num_bytes=0) == before._replace(num_bytes=0)
            return
        for sequence in chosen:
            oracle = self.sequences[sequence]
            known = len(oracle.text) if len(oracle.row) >= len(oracle.text) else len(oracle.start)
            self.num_tokens[self.sequence_group[sequence]] += len(oracle.row) - known
            oracle.index(oracle.row)
        for i, sequence in enumerate(chosen):
            draft = self.sequences[sequence].draft(budgets[i], price, models[rows[i]] if models else ())
            num = result.num_draft_tokens[i]
            assert result.draft_tokens[i, :num].tolist() == draft
            assert result.survivals[i, :num] == pytest.approx(self.sequences[sequence].survivals, rel=1e-5)

    def model_drafts(self, data, num_rows):
        """Of every row of the matrix, all of one length; empty: there is no model in this step."""
        most = self.options.num_speculative_tokens
        length = data.draw(st.sampled_from([0, 0, 1, 3, 6]), label="model tokens")
        tokens = st.lists(MODEL_PROPOSALS, min_size=min(length, most), max_size=min(length, most))
        return [data.draw(tokens, label="model") for _ in range(num_rows)] if length else []

    def new_tokens(self, data, oracle):
        """As a target would: often the draft and one more token, otherwise anything."""
        if oracle.last_draft and data.draw(st.booleans()):
            num_accepted = data.draw(st.integers(0, len(oracle.last_draft)))
            return [*oracle.last_draft[:num_accepted], data.draw(st.integers(0, 3))]
        if self.options.corpus and data.draw(st.booleans()):
            return data.draw(st.sampled_from(self.corpus))[-20:]
        return data.draw(texts(12))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close_sequence(self, data):
        sequence = self.pick(data, self.sequences)
        self.index.close_sequence(sequence)
        del self.sequences[sequence]
        with pytest.raises(UnknownId):
            self.index.close_sequence(sequence)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def close_group(self, data):
        group = self.pick(data, self.groups)
        if any(oracle.group is self.groups[group] for oracle in self.sequences.values()):
            with pytest.raises(InvalidArgument):
                self.index.close_group(group)
            return
        self.index.close_group(group)
        del self.groups[group], self.num_tokens[group]

    @rule()
    def clear(self):
        if len(self.groups) < 3:
            return
        self.index.clear()
        self.groups, self.sequences, self.num_tokens = {}, {}, {}

    @invariant()
    def agrees(self):
        if not hasattr(self, "index"):
            return
        self.index.validate()
        stats = self.index.stats()
        for sequence, oracle in self.sequences.items():
            assert self.index.text(sequence).tolist() == list(oracle.text[len(oracle.start) :])
        assert stats.num_groups == len(self.groups)
        assert stats.num_sequences == len(self.sequences)
        assert stats.num_tokens == sum(self.num_tokens.values())
        # A state is a class of substrings that end at the same positions; one more is the root.
        num_states = 0
        for group in self.groups.values():
            num_states += 1 + len({frozenset(ends) for ends in group.ends.values() if ends})
        assert stats.num_states == num_states

    def teardown(self):
        if hasattr(self, "index"):
            self.index.close()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
