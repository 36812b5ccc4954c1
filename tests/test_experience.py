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


def test_other_prompts_are_evidence_unless_sharing_is_off():
    first, second = speak(np.random.default_rng(2), 3000), speak(np.random.default_rng(3), 600)
    num_accepted = {}
    for share in (True, False):
        with SuffixIndex(num_speculative_tokens=8, mode="sam", share_contexts=share) as index:
            for text in (first, second):
                sequence = index.open_sequence(index.open_group(int32()))
                num_accepted[share] = sum(accepted for *_, accepted in decode(index, sequence, text, 0))
    assert num_accepted[True] > 1.2 * num_accepted[False]


def test_it_stops_drafting_what_is_never_said_and_begins_again():
    """An adversary repeats everything but with another token after it; then the text turns honest."""
    rng = np.random.default_rng(4)
    lies = rng.integers(0, 40, 6000).astype(np.int32)
    truth = np.resize(rng.integers(0, 40, 50), 1500).astype(np.int32)
    with SuffixIndex(num_speculative_tokens=8, mode="sam", min_token_prob=0.15) as index:
        sequence = index.open_sequence(index.open_group(int32()))
        drafts = [len(draft) for _, draft, _ in decode(index, sequence, lies, 0)]
        assert sum(drafts[-1000:]) < 0.2 * len(drafts[-1000:])
        sequence = index.open_sequence(index.open_group(int32()))
        steps = list(decode(index, sequence, truth, 0))
        assert len(steps) < len(truth) / 4
        index.validate()


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
