"""The index beside the oracle: random interleavings, and a long seeded run."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_spec.drafting.drafts import ModelDrafts
from rollout_spec.drafting.index import ALL_TOKENS, SuffixIndex
from rollout_spec.drafting.native import BudgetExceeded, InvalidArgument
from tests.native.checks import check_index
from tests.oracle import Experience, GroupOracle, ModelProposal, Options, SequenceOracle, group_of, num_alike
from tests.text import int32, speak

NUM_COLUMNS = 160
EXPERIENCE_BYTES = 139_200  # of an empty index


def texts(max_size):
    """What breaks automata: small alphabets, long repeats, chains of one token."""
    small = st.lists(st.integers(0, 2), max_size=max_size)
    chain = st.builds(lambda token, n: [token] * n, st.integers(0, 1), st.integers(1, max_size + 1))
    unit, times = st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(2, max_size + 2)
    repeat = st.builds(lambda unit, times: (unit * times)[:max_size], unit, times)
    return st.one_of(small, chain, repeat, st.lists(st.integers(0, 40), max_size=max_size))


# The automaton proposes such tokens too; -1 ends the model's draft.
MODEL_PROPOSALS = st.builds(ModelProposal, st.sampled_from([-1, 0, 0, 1, 2, 3, 40]), st.integers(0, 11))


def as_arrays(models):
    """Log-odds from the middle of the range that a confidence stands for; the first and the last are open."""
    if not models:
        return None
    tokens, confidences = np.array(models, np.int32).transpose(2, 0, 1)
    log_odds = np.select([confidences == 0, confidences == 11], [-np.inf, np.inf], confidences - 3.5)
    return ModelDrafts(tokens, log_odds.astype(np.float32))


def assert_drafts(result, row, oracle, *asked):
    num = result.num_draft_tokens[row]
    assert result.draft_tokens[row, :num].tolist() == oracle.draft(*asked)
    assert result.survivals[row, :num] == pytest.approx(oracle.survivals, rel=1e-5)


def index_with_corpus(given, max_bytes=0, **options):
    """`max_bytes` is what it has besides the corpus."""
    if max_bytes:
        empty, whole = (index_with_corpus(texts, **options).stats().num_bytes for texts in ([], given))
        max_bytes += whole - empty
    index = SuffixIndex(**options, max_bytes=max_bytes)
    for text in given:
        index.add_to_corpus(int32(*text))
    return index


class IndexMachine(RuleBasedStateMachine):
    @initialize(
        num_speculative_tokens=st.integers(1, 6),
        corpus=st.none() | st.lists(texts(30), max_size=3),
        tight=st.sampled_from([0, 0, 6000, 12000]),
    )
    def make(self, tight, corpus, **options):
        self.options = Options(**options, corpus=group_of(corpus) if corpus else None)
        self.corpus = corpus or [[]]
        self.max_bytes = tight + EXPERIENCE_BYTES if tight else 0
        # A tight budget has no room for a larger table of contexts.
        self.experience = Experience(max_bytes=tight)
        self.index = index_with_corpus(corpus or [], **options, max_bytes=self.max_bytes)
        self.groups: dict[int, GroupOracle] = {}
        self.sequences: dict[int, SequenceOracle] = {}
        self.sequence_group: dict[int, int] = {}  # of those that run
        self.parked: dict[int, int] = {}  # likewise
        self.resumed: set[int] = set()
        self.texts: list[tuple[int, SequenceOracle]] = []  # groups, and what was added to them
        self.idle: list[int] = []  # the groups without a sequence, the one that has been so longest first
        self.is_over = False  # something had no room: how far it came the index does not say

    def pick(self, data, ids):
        return data.draw(st.sampled_from(sorted(ids)))

    def forget(self, group):
        self.idle.remove(group)
        self.texts = [each for each in self.texts if each[0] != group]
        for sequence in [name for name, at in self.parked.items() if at == group]:
            del self.parked[sequence], self.sequences[sequence]
        del self.groups[group]

    def leave(self, group):
        """Somebody has left the group, who may have been the only one in it."""
        if group not in self.sequence_group.values():
            self.idle = [*(each for each in self.idle if each != group), group]

    def check_given_up(self, *, after_indexing=False):
        """Where room was wanted, those that had been idle longest; and whether idle text made room.

        Of text that is indexed the index does not say when it wanted room, so how it went on is not known.
        """
        given_up = set(self.index.take_given_up())
        assert given_up <= set(self.idle) and (self.max_bytes or not given_up)
        assert after_indexing or given_up == set(self.idle[: len(given_up)])
        for group in given_up:
            self.forget(group)
        num_tokens = sum(group.num_tokens for group in self.groups.values())
        has_forgotten = self.max_bytes > 0 and self.index.stats().num_tokens != num_tokens
        self.is_over |= has_forgotten or (after_indexing and len(given_up) > 0)

    @rule(prompt=texts(40))
    def open_group(self, prompt):
        if self.is_over:
            return
        try:
            group = self.index.open_group(np.array(prompt, np.int32))
        except BudgetExceeded:
            self.check_given_up()
            assert self.max_bytes and not self.idle
            return
        self.check_given_up()
        assert group not in self.groups
        self.groups[group] = GroupOracle(prompt, self.options, self.experience)
        self.idle.append(group)

    @precondition(lambda self: self.groups and not self.is_over)
    @rule(data=st.data(), prompt=texts(20))
    def set_prompt(self, data, prompt):
        group = self.pick(data, self.groups)
        try:
            self.index.set_prompt(group, np.array(prompt, np.int32))
        except BudgetExceeded:
            self.is_over = True  # idle text may be gone
            return
        self.groups[group].set_prompt(prompt, self.experience)
        self.leave(group)
        self.check_given_up()

    @precondition(lambda self: self.groups and not self.max_bytes)
    @rule(data=st.data(), text=texts(30))
    def add_text(self, data, text):
        group = self.pick(data, self.groups)
        self.index.add_text(group, np.array(text, np.int32))
        if not text:
            return
        oracle = SequenceOracle(self.groups[group], self.experience)
        oracle.said += tuple(text)
        self.texts.append((group, oracle))
        self.leave(group)
        self.check_given_up()

    @precondition(lambda self: self.groups and not self.is_over)
    @rule(data=st.data())
    def open_sequence(self, data):
        group = self.pick(data, self.groups)
        try:
            sequence = self.index.open_sequence(group)
        except BudgetExceeded:
            self.leave(group)
            self.check_given_up()
            assert self.max_bytes and self.idle in ([], [group])
            return
        assert sequence not in self.sequences
        self.idle = [each for each in self.idle if each != group]
        self.check_given_up()
        self.sequences[sequence] = SequenceOracle(self.groups[group], self.experience)
        self.sequence_group[sequence] = group

    @precondition(lambda self: self.sequence_group and not self.is_over)
    @rule(data=st.data())
    def step(self, data):
        running = sorted(self.sequence_group)
        chosen = data.draw(st.lists(st.sampled_from(running), unique=True, min_size=1, max_size=4))
        matrix = np.full((len(chosen) + 1, NUM_COLUMNS), -1, np.int32)
        rows = data.draw(st.permutations(range(len(chosen))), label="rows")
        said, levels, budgets, no_text = [], [], [], set()
        for sequence, row in zip(chosen, rows, strict=True):
            oracle = self.sequences[sequence]
            begins_again = data.draw(st.integers(0, 9)) == 0
            if begins_again or (sequence in self.resumed and data.draw(st.booleans())):
                kept = data.draw(st.integers(len(oracle.start), len(oracle.said)))
                tokens = [*oracle.said[:kept], *data.draw(texts(max(1, len(oracle.said) - kept)))]
            else:
                tokens = list(oracle.said) + self.new_tokens(data, oracle)
            tokens = tokens[:NUM_COLUMNS]
            # What is known already is read again only where text may have changed.
            is_compared = sequence in self.resumed or len(tokens) < len(oracle.said)
            known = len(oracle.said) if not is_compared else len(oracle.start)
            matrix[row, known : len(tokens)] = tokens[known:]
            if is_compared:
                known = num_alike(tokens, oracle.said)
            if len(tokens) > known and data.draw(st.integers(0, 19)) == 0:
                matrix[row, data.draw(st.integers(known, len(tokens) - 1))] = -1
                no_text.add(sequence)
            said.append(tokens)
            levels.append(len(tokens))
            budgets.append(data.draw(st.integers(0, self.options.num_speculative_tokens + 1)))
        min_survival = data.draw(st.sampled_from([0.0, 0.0, 0.1, 0.3, 0.7, 1.0]), label="min_survival")
        models = self.model_drafts(data, len(matrix))
        max_tokens = data.draw(st.sampled_from([0, 3, 50, ALL_TOKENS]))
        arrays = [np.array(values, np.int32) for values in (chosen, rows, levels, budgets)]
        num_left_out = self.index.stats().num_texts_left_out
        asked = *arrays[1:], min_survival, max_tokens, as_arrays(models)
        negative = np.array([*budgets[:-1], -1], np.int32)
        with pytest.raises(InvalidArgument, match=rf"^max_draft_tokens\[{len(chosen) - 1}\]=-1: must not be"):
            self.index.index_and_draft(arrays[0], matrix, *arrays[1:3], negative)  # which learns nothing
        result = self.index.index_and_draft(arrays[0], matrix, *asked)
        dropped = {chosen[i] for i in result.dropped}
        assert no_text <= dropped
        self.is_over = dropped != no_text or self.index.stats().num_texts_left_out > num_left_out
        if self.is_over:
            assert self.max_bytes
            return
        for sequence, tokens in zip(chosen, said, strict=True):
            if sequence in no_text:
                self.sequences.pop(sequence)
                self.leave(self.sequence_group.pop(sequence))
            else:
                self.sequences[sequence].take(tokens, is_resumed=sequence in self.resumed)
        self.resumed -= set(chosen)
        self.catch_up(max_tokens)
        self.check_given_up(after_indexing=True)
        if self.is_over:
            return
        nums_unindexed = 0
        for i, sequence in enumerate(chosen):
            if sequence in no_text:
                continue
            oracle = self.sequences[sequence]
            budget, model = budgets[i] * oracle.is_whole, models[rows[i]] if models else ()
            nums_unindexed += not oracle.is_whole
            assert_drafts(result, i, oracle, budget, min_survival, model)
        assert result.num_unindexed == nums_unindexed

    def catch_up(self, max_tokens):
        """What runs and prompts, first where least is left; then what is parked and texts, in order."""
        while True:
            every = [
                *((True, group, self.sequences[name]) for name, group in self.sequence_group.items()),
                *((False, group, self.sequences[name]) for name, group in self.parked.items()),
                *((False, group, oracle) for group, oracle in self.texts),
            ]
            # Of earlier prompts those after which there is something.
            prompts = {group.prompt: number for number, group in self.groups.items()}
            prompts |= {oracle.prompt: number for _, number, oracle in every}
            waiting = [((0, one.num_unindexed, one.serial), number, one) for one, number in prompts.items()]
            for runs, number, oracle in every:
                if oracle.prompt.is_whole:
                    key = (0, oracle.num_unindexed) if runs else (1, 0)
                    waiting.append(((*key, oracle.serial), number, oracle))
            waiting = [each for each in waiting if each[2].num_unindexed]
            if not waiting:
                return False
            if max_tokens == 0:
                return True
            _, number, oracle = min(waiting, key=lambda each: each[0])
            num = min(max_tokens, oracle.num_unindexed)
            oracle.index(num)
            max_tokens -= num
            self.texts = [each for each in self.texts if each[1].num_unindexed]
            self.leave(number)

    @precondition(lambda self: self.groups and not self.is_over)
    @rule(max_tokens=st.sampled_from([1, 30]))
    def catch_up_between_steps(self, max_tokens):
        num_left_out = self.index.stats().num_texts_left_out
        has_more = self.index.catch_up(max_tokens)
        self.is_over = self.index.stats().num_texts_left_out > num_left_out
        if not self.is_over:
            assert has_more == self.catch_up(max_tokens) or self.max_bytes
            self.check_given_up(after_indexing=True)

    @precondition(lambda self: self.sequence_group and not self.is_over)
    @rule(data=st.data())
    def park(self, data):
        sequence = self.pick(data, self.sequence_group)
        self.index.park_sequence(sequence)
        self.parked[sequence] = self.sequence_group.pop(sequence)
        self.leave(self.parked[sequence])

    @precondition(lambda self: self.parked and not self.is_over)
    @rule(data=st.data())
    def resume(self, data):
        sequence = self.pick(data, self.parked)
        try:
            self.index.resume_sequence(sequence)
        except BudgetExceeded:
            self.is_over = True
            return
        self.sequence_group[sequence] = self.parked.pop(sequence)
        self.idle = [each for each in self.idle if each != self.sequence_group[sequence]]
        self.resumed.add(sequence)
        self.check_given_up()

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

    @precondition(lambda self: self.sequences and not self.is_over)
    @rule(data=st.data())
    def close_sequence(self, data):
        sequence = self.pick(data, self.sequences)
        self.index.close_sequence(sequence)
        oracle = self.sequences.pop(sequence)
        self.resumed.discard(sequence)
        group = {**self.sequence_group, **self.parked}[sequence]
        self.texts += [(group, oracle)] * bool(oracle.num_unindexed)
        if self.parked.pop(sequence, None) is None:
            self.leave(self.sequence_group.pop(sequence))
        with pytest.raises(InvalidArgument):
            self.index.close_sequence(sequence)
        self.check_given_up()

    @precondition(lambda self: self.groups and not self.is_over)
    @rule(data=st.data())
    def close_group(self, data):
        group = self.pick(data, self.groups)
        if group in self.sequence_group.values():
            with pytest.raises(InvalidArgument):
                self.index.close_group(group)
            return
        self.index.close_group(group)
        self.forget(group)

    @invariant()
    def agrees(self):
        if not hasattr(self, "index"):
            return
        check_index(self.index)
        if self.is_over:
            return
        stats = self.index.stats()
        for sequence, oracle in self.sequences.items():
            assert self.index.text(sequence).tolist() == list(oracle.said[len(oracle.start) :])
        assert stats.num_groups == len(self.groups)
        assert stats.num_sequences == len(self.sequence_group)
        assert stats.num_tokens == sum(group.num_tokens for group in self.groups.values())
        assert stats.num_states == sum(group.num_states for group in self.groups.values())


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=80, stateful_step_count=30)


NUM_ROWS, K = 20, 4


def test_thousands_of_row_steps_equal_the_oracle():
    """Twenty rows, more than one turn of walks: what a walk changed would show in another row's draft.

    Siblings after five prompts, the last of each after another one. Each row gets what a target would
    sample: its draft as far as that is right, and one token more. Now and then more, as after a step that was
    left out: of what it drafted after the first wrong token nothing is learned.
    """
    rng = np.random.default_rng(2)

    def say(length):
        return speak(rng, length, num_words=12, alphabet=9).tolist()

    corpus = [say(60)]
    options, experience = Options(num_speculative_tokens=K, corpus=group_of(corpus)), Experience()
    index = index_with_corpus(corpus, num_speculative_tokens=K)
    sequences, oracles, matrix = [], [], np.zeros((NUM_ROWS, 128), np.int32)
    for row in range(NUM_ROWS):
        if row % 4 in (0, 3):
            prompt = say(int(rng.integers(0, 20)))
            if row % 4 == 0:
                group, of_group = index.open_group(int32(*prompt)), GroupOracle(prompt, options)
            else:
                index.set_prompt(group, int32(*prompt))
                of_group.set_prompt(prompt)
            experience.next_serial()
            index.catch_up()
        sequences.append(index.open_sequence(group))
        oracles.append(SequenceOracle(of_group, experience))
    index.catch_up()
    texts = [[*oracle.start, *say(100)] for oracle in oracles]
    while rows := [i for i in rng.permutation(NUM_ROWS).tolist() if len(oracles[i].text) < len(texts[i])]:
        min_survival = float(rng.choice([0.0, 0.0, 0.2]))
        for row in rows:
            text, known = texts[row], len(oracles[row].text)
            num_right = num_alike(oracles[row].last_draft, text[known:])
            level = min(len(text), known + num_right + int(rng.choice([1, 1, 1, 4])))
            matrix[row, :level] = text[:level]
            oracles[row].take(text[:level])
        levels = int32(*(len(oracles[row].text) for row in rows))
        budgets = np.full(len(rows), K, np.int32)
        # A model that is often right, in some of the steps.
        places = [len(oracle.text) + np.arange(2) for oracle in oracles]
        models = [
            [ModelProposal(text[min(at, len(text) - 1)], int(rng.integers(0, 12))) for at in place]
            for text, place in zip(texts, places, strict=True)
        ] * int(rng.integers(0, 2))  # fmt: skip
        result = index.index_and_draft(
            int32(*(sequences[row] for row in rows)), matrix, int32(*rows), levels, budgets, min_survival,
            model_drafts=as_arrays(models),
        )  # fmt: skip
        for i, row in enumerate(rows):
            assert_drafts(result, i, oracles[row], K, min_survival, models[row] if models else ())
    check_index(index)
    # Long enough for the table of contexts to grow, and for the weights to move.
    assert len(experience.contexts.buckets) >= 512
