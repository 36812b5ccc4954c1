"""Text to draft from, without a model, and what a history keeps of it."""

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.groups import Groups
from rollout_spec.drafting.history import History
from rollout_spec.metrics import EngineCounters
from rollout_spec.predict.replay import Counts, replay
from rollout_spec.trace import to_line


def int32(*values):
    return np.array(values, np.int32)


def speak(rng, length, num_words=400, alphabet=300):
    """Text with a wording: random words of a fixed vocabulary, so that contexts and matches both occur."""
    words = np.random.default_rng(5).integers(0, alphabet, (num_words, 4))
    chosen = words[np.minimum(rng.zipf(1.3, length), num_words) - 1]
    return chosen.reshape(-1)[:length].astype(np.int32)


def save_corpus(path, texts):
    path.write_text(to_line("texts", None, [], [list(text) for text in texts]))
    return path


def tokens_per_step(engines):
    """Of what each engine has served, replayed by a drafter of its own with the default options."""
    return Counts.sum(replay(lines, SpecConfig()).total for lines in engines).tokens_per_step


def merged(*contents):
    history = History(1000, 1 << 30)
    for content in contents:
        history.merge(content)
    return history


def write_trace(path, *lines):
    path.write_text("".join(to_line("g", None, prompt, responses) for prompt, responses in lines))
    return path


def tokens_of(line):
    return line.prompt_token_ids.tolist(), [response.tolist() for response in line.responses]


class Rows:
    """Requests one after the other, each of which says its text in one step and ends."""

    def __init__(self, index, history):
        self.index, self.history, self.counters = index, history, EngineCounters()
        self.groups = Groups(index, history, self.counters)

    def add(self, prompt, group=None, num_group_tokens=None, sample=None):
        return self.groups.add(int32(*prompt), group, num_group_tokens, sample)

    def say(self, sequence, row):
        no = int32(0)
        return self.index.index_and_draft(int32(sequence.handle), int32(*row)[None], no, int32(len(row)), no)

    def end(self, sequence, row):
        self.say(sequence, row)
        self.groups.park(sequence, is_aborted=False)
        return sequence

    def index_all(self):
        while self.groups.has_waiting or self.index.has_unindexed:
            self.index.catch_up()
            self.groups.hand_on_next_text()
