"""An obviously correct, slow model of the native index: dictionaries of substrings, no automaton.

The words match, class and expert are defined in native/draft.h, what is learned in native/contexts.h and
native/evidence.h.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Text = tuple[int, ...]
single = np.float32

COUNTED_STATES = 8
MAX_BRANCHES = 64
TOKENS_OF_A_STEP = 65
MODEL_EXPERT = 8
CORPUS_EXPERT = 9
BITS64 = (1 << 64) - 1


def suffixes(text):
    """Longest first, without the empty one."""
    return [text[start:] for start in range(len(text))]


def num_alike(text, other):
    return [*(a == b for a, b in zip(text, other, strict=False)), False].index(False)


@dataclass(frozen=True, kw_only=True)
class Options:
    num_speculative_tokens: int
    corpus: GroupOracle | None = None


class ContextsOracle:
    """The table of contexts: lists of at most four [identity, confidence, token] per bucket."""

    WAYS, MAX_CONFIDENCE, SPLITS_PER_TOKEN = 4, 15, 8

    def __init__(self, max_bytes=0):
        self.num_wanted = 256
        self.buckets: list[list[list[int]]] = [[] for _ in range(self.num_wanted)]
        self.max_bytes = max_bytes

    def bucket(self, identity):
        number = identity % self.num_wanted
        return self.buckets[number if number < len(self.buckets) else number - self.num_wanted // 2]

    def find(self, identity):
        return next((slot for slot in self.bucket(identity) if slot[0] == identity), None)

    def learn(self, identities, token):
        for identity in identities:
            self.learn_in(identity, token)
        for _ in range(min(self.SPLITS_PER_TOKEN, self.num_wanted - len(self.buckets))):
            self.split()
        fits = not self.max_bytes or 2 * self.num_wanted * self.WAYS * 8 <= self.max_bytes // 8
        is_full = sum(map(len, self.buckets)) >= self.WAYS * len(self.buckets) // 8 * 7
        if len(self.buckets) == self.num_wanted and is_full and fits:
            self.num_wanted *= 2

    def split(self):
        source = len(self.buckets) - self.num_wanted // 2
        slots, self.buckets[source] = self.buckets[source], []
        self.buckets.append([])
        for slot in slots:
            self.bucket(slot[0]).append(slot)

    def learn_in(self, identity, token):
        slot = self.find(identity)
        bucket = self.bucket(identity)
        if slot is None and len(bucket) < self.WAYS:
            bucket.append([identity, 1, token])
        elif slot is None:
            weakest = min(range(self.WAYS), key=lambda way: bucket[way][1])
            bucket[weakest] = [identity, 1, token]
        elif slot[2] == token:
            slot[1] = min(slot[1] + 1, self.MAX_CONFIDENCE)
        elif slot[1] > 1:
            slot[1] //= 2
        else:
            slot[2] = token

    @staticmethod
    def identities(text, own_salt):
        """Of the contexts of the token that comes after the text; keys 4 and 5 are the sequence's own."""
        found: dict[int, int] = {}
        value = 0
        for length, token in enumerate(reversed(text[-6:]), start=1):
            value = (value ^ token) * 0x9E3779B97F4A7C15 & BITS64
            value ^= value >> 29
            for key, wanted in enumerate((1, 2, 3, 6)):
                if length == wanted:
                    found[key] = identity_of(value, length)
            if length <= 2:
                found[6 - length] = identity_of(value, own_salt - length)
        return dict(sorted(found.items()))


def identity_of(value, salt):
    return max(1, (((value ^ salt) & BITS64) * 0xBF58476D1CE4E5B9 & BITS64) >> 36)


class ModelProposal(NamedTuple):
    """What a model proposes at one position: its token, and the range that its log-odds of it are in."""

    token: int
    confidence: int


@dataclass
class Prediction:
    tokens: dict[int, int]  # expert: its proposal
    cells: dict[int, tuple]
    previous: int  # the token before, -1: none
    token: int = -1
    probability: float = 0.0


class Experience:
    """What is learned in the life of an index: contexts, cells and weights; predicting changes none of it."""

    MAX_WEIGHT = 4.0 / 3.0
    # The first bias, weights for an expert's own token, and for another expert's: sums over the selectors.
    FIRST = (
        [0.48],
        [0.93, 0.45, 0.10, 0.26, -0.10, -0.21, 0.18, 0.15, 0.51, 0.30],
        [0.38, 0.10, -0.05, -0.02, 0.17, 0.10, 0.03, 0.11, 0.76, 0.30],
    )

    def __init__(self, max_bytes=0):
        self.contexts = ContextsOracle(max_bytes)
        self.cells: dict[tuple, list] = {}
        # [bias, for an expert's own token, for another expert's] by selector and what it selects by
        self.weights: dict[tuple, list] = defaultdict(self.first_weights)
        self.num_opened = 0

    def next_serial(self):
        self.num_opened += 1
        return self.num_opened

    def first_weights(self):
        [bias], own, other = ([single(x) / single(3) for x in part] for part in self.FIRST)
        return [bias, own, other]

    def predict(self, group, text, own_salt, depth=0, model=()):
        """Of the token after the text, whose last `depth` tokens are draft tokens; so far as these are its
        own, the model goes on."""
        context = group.match(text)
        prediction = Prediction({}, {}, text[-1] if text else -1)
        for expert in (0, 1):
            if not context:
                break
            self.add_match(prediction, expert, len(context), *group.most_frequent(context))
            context = group.match(group.next_class(context))
        found = group.corpus_match(text)
        if found:
            self.add_match(prediction, CORPUS_EXPERT, len(found), *group.options.corpus.most_frequent(found))
        for key, identity in self.contexts.identities(text, own_salt).items():
            slot = self.contexts.find(identity)
            if slot is not None:
                prediction.tokens[2 + key] = slot[2]
                prediction.cells[2 + key] = ("context", key, slot[1])
        drafted = text[len(text) - depth :]
        if len(model) > depth and drafted == tuple(proposal.token for proposal in model[:depth]):
            token, confidence = model[depth]
            if token >= 0:
                prediction.tokens[MODEL_EXPERT] = token
                prediction.cells[MODEL_EXPERT] = ("model", min(depth, 7), confidence)
        if prediction.tokens:
            candidates = [prediction.tokens[expert] for expert in sorted(prediction.tokens)]
            prediction.token = max(candidates, key=lambda token: self.mix(prediction, token))
            prediction.probability = squash(self.mix(prediction, prediction.token))
        return prediction

    def add_match(self, prediction, expert, length, token, count, total):
        circumstance = start_of(LENGTHS, length), start_of(TOTALS, total), count * 8 // total
        prediction.tokens[expert], prediction.cells[expert] = token, ("match", expert, *circumstance)

    def probability(self, cell):
        return float(self.cells[cell][0] if cell in self.cells else single(prior(*cell)))

    def input(self, prediction, expert, candidate):
        """1 or 2: whether the expert is for the candidate or for another token; and how strongly."""
        p = self.probability(prediction.cells[expert])
        if prediction.tokens[expert] == candidate:
            return 1, stretch(p)
        return 2, stretch((1.0 - p) * 0.2)

    def selected(self, prediction, candidate):
        """The weights by the token before, by the candidate and by who proposes it, the corpus left out."""
        who = frozenset(e for e, token in prediction.tokens.items() if token == candidate) - {CORPUS_EXPERT}
        keys = (0, token_hash(prediction.previous)), (1, token_hash(candidate)), (2, who)
        return [self.weights[key] for key in keys]

    def mix(self, prediction, candidate):
        """In single precision, every operation rounded, in this order."""
        a, b, c = self.selected(prediction, candidate)
        total = a[0] + b[0] + c[0]
        for expert in sorted(prediction.tokens):
            side, value = self.input(prediction, expert, candidate)
            total = total + (a[side][expert] + b[side][expert] + c[side][expert]) * value
        return float(total)

    def calibrate(self, prediction, token):
        error = (prediction.token == token) - squash(self.mix(prediction, prediction.token))
        step = 0.0133 * error
        for weights in self.selected(prediction, prediction.token):
            weights[0] = self.bounded(float(weights[0]) + step)
            for expert in prediction.tokens:
                side, value = self.input(prediction, expert, prediction.token)
                weights[side][expert] = self.bounded(float(weights[side][expert]) + step * float(value))
        for expert, proposed in prediction.tokens.items():
            key = prediction.cells[expert]
            cell = self.cells.setdefault(key, [self.probability(key), 2])
            cell[1] = min(cell[1] + 1, 250)
            cell[0] = float(single(cell[0] + ((proposed == token) - cell[0]) / cell[1]))

    def bounded(self, weight):
        return single(max(-self.MAX_WEIGHT, min(self.MAX_WEIGHT, weight)))


def prior(kind, expert, *circumstance):
    """What is believed of a cell of which nothing was learned."""
    if kind == "context":
        (confidence,) = circumstance
        return confidence / (confidence + 2.0)
    if kind == "model":
        (confidence,) = circumstance
        return squash(confidence - 3.5)
    length, total, share = circumstance
    count = total * min(1.0, (share + 0.5) / 8)
    return count / (total + 0.5) * (1.0 - 0.5 / (length + 0.5))


def token_hash(token):
    return (token * 0x9E3779B1 & 0xFFFFFFFF) >> 24


STRETCHED = [single(math.log((i + 0.5) / 1024 / (1.0 - (i + 0.5) / 1024))) for i in range(1024)]


def stretch(p):
    return STRETCHED[min(int(p * 1024), 1023)]


def squash(x):
    return 1.0 / (1.0 + math.exp(-x))


# Cells are for ranges that begin here.
LENGTHS, TOTALS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64), (1, 2, 3, 5, 9, 17)


def start_of(ranges, number):
    return max(start for start in ranges if start <= number)


@dataclass(eq=False)
class PromptOracle:
    """A prompt of a group, and how much of it is indexed."""

    group: GroupOracle
    text: Text
    serial: int = 0
    indexed: Text = ()

    @property
    def num_unindexed(self):
        return len(self.text) - len(self.indexed)

    @property
    def is_whole(self):
        return self.num_unindexed == 0

    def index(self, num):
        for token in self.text[len(self.indexed) :][:num]:
            self.indexed = self.group.extend(self.indexed, token)


class GroupOracle:
    """Everything that was indexed in one group; `experience`: where its prompts are unindexed at first."""

    def __init__(self, prompt, options, experience=None):
        self.options = options
        self.continuations: dict[Text, list[int]] = defaultdict(list)
        self.positions: dict[Text, int] = {}
        self.ends: dict[Text, set[int]] = defaultdict(set)
        self.counts: dict[Text, int] = defaultdict(int)
        self.num_tokens = 0
        self.set_prompt(prompt, experience)

    def set_prompt(self, prompt, experience=None):
        self.prompt = PromptOracle(self, tuple(prompt))
        if experience is None:
            self.prompt.index(len(prompt))
        else:
            self.prompt.serial = experience.next_serial()

    @property
    def num_states(self):
        """Classes of substrings that end at the same positions; one more is the root."""
        return 1 + len({frozenset(ends) for ends in self.ends.values() if ends})

    def match(self, text):
        """The longest suffix of the text that has a continuation."""
        return next((suffix for suffix in suffixes(text) if self.continuations[suffix]), ())

    def extend(self, text, token):
        """Index one token that comes after the text; returns the longer text."""
        for suffix in [*suffixes(text), ()]:
            if token not in self.continuations[suffix]:
                self.continuations[suffix].append(token)
        text += (token,)
        self.num_tokens += 1
        position = self.positions.setdefault(text, len(self.positions))
        for suffix in suffixes(text):
            self.ends[suffix].add(position)
        num_classes, ends = 0, None
        for suffix in suffixes(text):
            if self.ends[suffix] != ends:
                num_classes, ends = num_classes + 1, self.ends[suffix]
            if num_classes <= COUNTED_STATES:
                self.counts[suffix] += 1
        return text

    def corpus_match(self, text):
        """The corpus's, where it is longer; empty where it is not."""
        if self.options.corpus is None:
            return ()
        found = self.options.corpus.match(text)
        return found if len(found) > len(self.match(text)) else ()

    def next_class(self, context):
        """The longest suffix of the context that ends at more positions."""
        return next((s for s in suffixes(context) if self.ends[s] != self.ends[context]), ())

    def most_frequent(self, context):
        """Of the continuations that are looked at: the most frequent one, its count, all their counts."""
        candidates = self.continuations[context][:MAX_BRANCHES]
        counts = [self.counts[(*context, candidate)] for candidate in candidates]
        return candidates[counts.index(max(counts))], max(counts), sum(counts)


def group_of(texts):
    group = GroupOracle((), Options(num_speculative_tokens=1))
    for text in texts:
        group.set_prompt(text)
    return group


class SequenceOracle:
    """One sequence: its text, how much of it is indexed, and the draft that is not verified yet."""

    def __init__(self, group, experience):
        self.group, self.experience, self.prompt = group, experience, group.prompt
        self.start = self.said = self.prompt.text
        self.text = self.start  # of what is said, what is indexed
        self.num_followed = 0  # of it, tokens that were indexed before and are not counted again
        self.last_draft, self.survivals, self.predictions = list[int](), list[float](), list[Prediction]()
        self.serial = experience.next_serial()
        self.own_salt = ~(self.serial << 8) & BITS64

    @property
    def num_unindexed(self):
        return len(self.said) - len(self.text)

    @property
    def is_whole(self):
        return self.prompt.is_whole and self.num_unindexed == 0

    def take(self, row, *, is_resumed=False):
        """The first half of a step: the row has these tokens now."""
        if is_resumed or len(row) < len(self.said):
            self.cut(num_alike(row, self.said))
        new, was_whole = row[len(self.said) :], self.is_whole
        for prediction, token in zip(self.predictions, new, strict=False):
            self.experience.calibrate(prediction, token)
            if prediction.token != token:
                break
        self.predictions = []
        self.said += tuple(new)
        if was_whole and len(new) <= TOKENS_OF_A_STEP:
            self.index(len(new))

    def cut(self, num_kept):
        """What is kept has not to be indexed again."""
        self.said, self.predictions = self.said[:num_kept], []
        if num_kept < len(self.text):
            self.text, self.num_followed = self.start, num_kept
        self.num_followed = min(self.num_followed, num_kept)

    def index(self, num):
        for token in self.said[len(self.text) :][:num]:
            if len(self.text) < self.num_followed:
                self.text += (token,)
            else:
                contexts = self.experience.contexts
                contexts.learn(contexts.identities(self.text, self.own_salt).values(), token)
                self.text = self.group.extend(self.text, token)

    def draft(self, max_draft_tokens, min_survival=0.0, model=()):
        """The second half, after every row of the step was indexed; `model`: its draft after the text."""
        self.last_draft, self.survivals = [], []
        survival = 1.0
        for depth in range(min(self.group.options.num_speculative_tokens, max_draft_tokens)):
            text = (*self.text, *self.last_draft)
            prediction = self.experience.predict(self.group, text, self.own_salt, depth, model)
            if prediction.token < 0:
                break
            self.predictions.append(prediction)
            survival *= prediction.probability
            if survival < min_survival:
                break
            self.last_draft.append(prediction.token)
            self.survivals.append(survival)
        return self.last_draft
