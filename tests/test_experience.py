"""Beyond single steps: what the index learns, and that it cannot be driven mad."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_spec.drafting.index import ModelDrafts, SuffixIndex
from tests.oracle import Experience, GroupOracle, ModelProposal, Options, SequenceOracle
from tests.text import int32, speak


def decode(index, sequence, text, start, min_survival=0.2):
    """Feed a text as a target would: accepted draft tokens and one more a step; yields every draft."""
    level = start + 1
    while level <= len(text):
        result = index.index_and_draft(
            int32(sequence), text[None], int32(0), int32(level), int32(8), min_survival
        )
        draft = result.draft_tokens[0, : result.num_draft_tokens[0]].tolist()
        sampled = text[level : level + len(draft)].tolist()
        agrees = [drafted == token for drafted, token in zip(draft, sampled, strict=False)]
        accepted = [*agrees, False].index(False)
        yield level, draft, accepted
        if level == len(text):
            return
        level = min(len(text), level + accepted + 1)


def test_long_texts_draft_as_the_oracle_does():
    """Long enough for the table of contexts to grow several times and for the weights to move."""
    rng = np.random.default_rng(1)
    experience = Experience()
    with SuffixIndex(num_speculative_tokens=6) as index:
        for _ in range(3):
            text = speak(rng, 240)
            oracle = SequenceOracle(
                GroupOracle(text[:10].tolist(), Options(num_speculative_tokens=6)), True, experience
            )
            sequence = index.open_sequence(index.open_group(text[:10]))
            for level, draft, _ in decode(index, sequence, text, 10, 0.1):
                oracle.index(text[:level].tolist())
                assert oracle.draft(8, 0.1) == draft
        assert len(experience.contexts.buckets) >= 512
        index.validate()


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


def test_a_model_is_believed_as_far_as_it_is_right():
    """On text that nothing else can know: what it says of itself is the same for all three."""
    text = np.random.default_rng(3).integers(0, 5000, (1, 2000)).astype(np.int32)
    num_drafted = {}
    for share_right in (0.0, 0.5, 0.9):
        is_right = np.random.default_rng(5).random(text.shape) < share_right
        said = np.where(is_right, text, 5000 + text)
        with SuffixIndex(num_speculative_tokens=8) as index:
            sequence = int32(index.open_sequence(index.open_group(int32())))
            num_drafted[share_right] = []
            for level in range(1, text.shape[1] - 2):
                model = ModelDrafts(said[:, level : level + 2], np.full((1, 2), 0.5, np.float32))
                result = index.index_and_draft(
                    sequence, text, int32(0), int32(level), int32(8), 0.3, model_drafts=model
                )
                num_drafted[share_right].append(int(result.num_draft_tokens[0]))
            index.validate()
    ends = {share: np.mean(numbers[-1000:]) for share, numbers in num_drafted.items()}
    assert ends[0.0] < 0.01 and 0.9 < ends[0.5] < 1.3 and ends[0.9] > 1.95


def test_other_prompts_are_evidence():
    """What was sampled under one prompt helps under the next, that with other wording does not."""
    rng = np.random.default_rng(2)
    text = speak(rng, 600)
    num_accepted = []
    for first in (speak(rng, 3000), rng.integers(0, 300, 3000).astype(np.int32)):
        with SuffixIndex(num_speculative_tokens=8) as index:
            for sampled in (first, text):
                sequence = index.open_sequence(index.open_group(int32()))
                accepted = sum(accepted for *_, accepted in decode(index, sequence, sampled, 0))
            num_accepted.append(accepted)
    assert num_accepted[0] > 1.2 * num_accepted[1]


def converse(index, sequence, sample, num_tokens):
    """A target that sees what is drafted: `sample(level, drafted)` is its token there, drafted -1: none.

    Yields the level before every step, its draft, and how many tokens of it were accepted.
    """
    text = np.zeros((1, num_tokens + 9), np.int32)
    level = 1
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
        for i, step in enumerate(converse(index, sequence, sample, 2 * lies + honest)):
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
    with SuffixIndex(num_speculative_tokens=8, max_bytes=4 << 20) as index:
        empty = index.stats().num_bytes
        num_steps = []
        for _ in range(2):
            sequence = index.open_sequence(index.open_group(int32()))
            num_steps.append(sum(1 for _ in decode(index, sequence, text, 0)))
            index.clear()
        assert num_steps[1] < 0.7 * num_steps[0]
        assert empty < index.stats().num_bytes <= empty + (4 << 20) // 8
        index.validate()


def test_a_failed_step_learns_nothing():
    text = speak(np.random.default_rng(7), 200)
    drafts = []
    for broken in (False, True):
        with SuffixIndex(num_speculative_tokens=8) as index:
            sequence = index.open_sequence(index.open_group(int32()))
            found = []
            for level, draft, _ in decode(index, sequence, text, 0, 0.05):
                found.append(draft)
                if broken and level < len(text):
                    with pytest.raises(ValueError, match="must not be negative"):
                        index.index_and_draft(
                            int32(sequence), text[None], int32(0), int32(level + 1), int32(-1)
                        )
            drafts.append(found)
    assert drafts[0] == drafts[1]
