"""Coupled verification: the noise, the keyed sampler's distribution, and its independence of the drafts."""

import math

import numpy as np
import pytest
import torch

from rollout_spec.verification import blocks, coupled, noise, prefixes
from rollout_spec.verification.transfers import to_host
from tests.drawn import keyed_sample

torch.set_num_threads(1)  # rows this small gain nothing from threads


def tensor(values):
    return torch.tensor(values, dtype=torch.int64)


def is_sampled(temperature):
    """By row; one value where it is the same for all."""
    hot = temperature > 0
    return hot if hot.any() and not hot.all() else bool(hot.all())


CPU = torch.device("cpu")


def words_by_hand(keys, positions, num):
    """Of 32 bits, uint64 [n, num]: the words by their definition, with nothing from the code under test."""

    def output(seeds, numbers):
        words = seeds + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))

    seeds = output(keys.numpy().astype(np.uint64), positions.numpy() + 1)
    return output(seeds[:, np.newaxis], np.arange(num) + 1) >> np.uint64(32)


def noise_by_hand(keys, positions, num):
    """Exp(1), float64 [n, num]."""
    return -np.log1p(-(words_by_hand(keys, positions, num) + 0.5) / 2**32)


def test_rows_may_come_as_numbers_of_32_bits():
    numbers = np.arange(3, dtype=np.int32) + 2**30
    assert torch.equal(noise.row_seeds(numbers, numbers), noise.row_seeds(numbers.tolist(), numbers.tolist()))


def test_tokens_on_the_host_are_not_copied():
    tokens = torch.arange(4, dtype=torch.int32)
    assert all(np.shares_memory(values, tokens.numpy()) for values in to_host(tokens, tokens.view(2, 2)))


def test_the_extreme_words_are_finite(monkeypatch):
    monkeypatch.setattr(noise, "splitmix", lambda *_: tensor([[0, -1]]))
    smallest, largest = noise.exponential(tensor([0]), 2, CPU)[0].tolist()
    assert smallest == 2.0**-33
    assert 16 < largest < 17


def test_keys_depend_on_every_part():
    parts: list[tuple[int | str | bool, ...]] = [(1, 2), (2, 1), (12,), ("12",), ("1", "2"), (1, 2, True)]
    keys = {noise.make_key(*part) for part in parts}
    assert len(keys) == len(parts)
    assert all(0 <= key < 2**63 for key in keys)
    # A run that is repeated with another release gets the same tokens.
    assert noise.make_key("a run", 1) == 8435121926746128968


def target(vocab_size):
    """Logits that give every block something to win and some tokens nothing."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    logits[::7] = -torch.inf
    return logits


def one_peak(vocab_size, blocks_of_peak):
    """One token as likely as so many whole blocks, beside blocks that are flat."""
    logits = torch.full((vocab_size,), -math.log(128 * blocks_of_peak))
    logits[vocab_size // 2] = 0.0
    return logits


def only(vocab_size, *token_ids):
    """A vocabulary that is masked but for these tokens, equally likely; often as in a grammar."""
    logits = torch.full((vocab_size,), -torch.inf)
    logits[list(token_ids)] = -3.0
    return logits


# What a softmax can look like to blocks of 128 tokens; most have a last block that is not whole.
STRUCTURED = {
    "below one block": target(5),
    "one block": target(128),
    "a remainder of one token": target(129),
    "whole blocks": target(1024),
    "random": target(600),
    "one peak beside flat blocks": one_peak(1000, 1.0),
    "a peak of 0.127": one_peak(1024, 8 / 6.9),
    "a higher peak": one_peak(1100, 4.0),
    "large logits": one_peak(1000, 1.0) + 45.0,
    "near ties": torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-5,
    "all but one token a block masked": only(1000, 0, 127, 128, 500, 998, 999),
    "whole blocks masked": target(1000).index_fill(0, torch.arange(100, 900), -torch.inf),
    "only the remainder is left": only(900, 896, 898, 899),
    "only whole blocks are left": only(900, 3, 200, 895),
    "a slope": torch.linspace(3.0, 0.0, 1000),
    "a steep slope": torch.linspace(200.0, 0.0, 1000),
}


def behind_by_hand(logits, noise_values, token_ids):
    """By how many nats each token, or its block, lost its race: 0 for the winner, inf for what has no mass.

    The two races over all blocks and all tokens, in float64.

    noise_values: [n, 128 + number of blocks].
    """
    after = []
    for row, noise_, token in zip(logits.double().numpy(), noise_values, token_ids.tolist(), strict=True):
        masses = np.exp(row - row.max())
        blocks_ = [masses[start : start + 128] for start in range(0, len(masses), 128)]
        of_blocks = np.array([block.sum() for block in blocks_]) / noise_[128:]
        of_tokens = blocks_[token // 128] / noise_[: len(blocks_[token // 128])]
        races = (of_blocks, token // 128), (of_tokens, token % 128)
        with np.errstate(divide="ignore", invalid="ignore"):
            after.append(max(np.log(scores.max()) - np.log(scores[at]) for scores, at in races))
    return np.array(after)


def test_log_odds_by_hand():
    logits = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log() + 3
    found = coupled.log_odds(logits, torch.tensor([1, 0, 0])).tolist()
    assert found == [pytest.approx(-math.log(3), abs=1e-6), pytest.approx(0, abs=1e-6), math.inf]


def test_the_noise_is_that_of_its_definition():
    """`noise` quotes what BigCrush and dieharder say of it."""
    keys, positions = torch.arange(500) * 2**54, torch.arange(500)
    seeds = noise.row_seeds(keys, positions)
    assert np.array_equal(noise.random_words(seeds, 99, CPU), words_by_hand(keys, positions, 99))
    noise_values = noise.exponential(seeds, 99, CPU)
    # Single precision leaves the largest values, which hardly ever win, their first digits.
    np.testing.assert_allclose(noise_values, noise_by_hand(keys, positions, 99), rtol=1e-3)
    small = noise_values < 8
    np.testing.assert_allclose(noise_values[small], noise_by_hand(keys, positions, 99)[small], rtol=2e-5)


@pytest.mark.parametrize("name", STRUCTURED)
def test_the_token_is_the_one_that_wins_both_races(name, torch_device, monkeypatch):
    """Of 1,500 draws each: all blocks and all tokens race, with noise and block size by their definitions."""
    monkeypatch.setattr(blocks, "CHUNK_SIZE", 1 << 14)
    logits = STRUCTURED[name].expand(1500, -1)
    keys, positions = torch.arange(1500) * 2**51 + 11, torch.arange(1500) % 7
    tokens = keyed_sample(logits.to(torch_device), keys, positions).cpu()
    noise_values = noise_by_hand(keys, positions, 128 - -logits.shape[1] // 128)
    assert behind_by_hand(logits, noise_values, tokens).max() < 1e-4


def test_a_flat_block_may_win_by_little():
    """Its sum is 128 times its largest probability: the bound on what can win has nothing to give."""
    logits = only(640, 130).repeat(2, 1)
    logits[:, 384:512] = -3.0 - math.log(128)
    noise_values = torch.ones(2, 128 + 5)
    noise_values[:, 128 + 3] = torch.tensor([0.999, 1.001])
    noise_values[:, 77] = 0.5
    assert coupled.race(logits, noise_values).tolist() == [384 + 77, 130]


def ragged():
    """Draft lengths of a step, each request's key and first position, and the logits at and after drafts."""
    generator = torch.Generator().manual_seed(6)
    counts = [2, 0, 3, 1]
    logits, after = (torch.randn(n, 300, generator=generator) / 2 for n in (sum(counts), len(counts)))
    return counts, tensor([5, 9, 5, 7]), tensor([10, 3, 40, 8]), logits, after


def test_a_step_draws_at_each_place_what_a_plain_step_draws_there():
    counts, keys, positions, logits, after = ragged()
    of_drafts = keys.repeat_interleave(tensor(counts)), tensor([10, 11, 40, 41, 42, 8])
    expected = keyed_sample(logits, *of_drafts).tolist()
    expected_after = keyed_sample(after, keys, tensor([12, 3, 43, 9])).tolist()
    assert len(set(expected)) > 3 and len(set(expected_after)) > 2
    for is_first in (True, False):
        step = coupled.StepNoise(keys, positions, counts)
        if is_first:
            assert step.sample(logits).tolist() == expected
        assert step.sample_after(after).tolist() == expected_after
        assert step.sample(logits).tolist() == expected


@pytest.mark.parametrize(
    "temperature", [[0.0] * 4, [0.5, 1.0, 0.7, 2.0], [1e-3, 0.0, 0.7, 0.0], [0.0, 1.0, 0.0, 0.5]]
)
def test_a_step_keeps_the_targets_own_tokens_up_to_the_first_other(temperature):
    counts, keys, positions, logits, _ = ragged()
    places = tensor([10, 11, 40, 41, 42, 8])
    sampled = keyed_sample(logits, keys.repeat_interleave(tensor(counts)), places).tolist()
    best = logits.argmax(-1).tolist()
    assert all(own != other for own, other in zip(sampled, best, strict=True))
    hot = [t > 0 for t, n in zip(temperature, counts, strict=True) for _ in range(n)]
    own = [token if is_hot else other for token, other, is_hot in zip(sampled, best, hot, strict=True)]
    bonus, no = [201, 202, 203, 204], prefixes.PLACEHOLDER_TOKEN_ID

    def rows(draft):
        step = coupled.StepNoise(keys, positions, counts)
        given = torch.tensor(bonus, dtype=torch.int32).unsqueeze(-1)
        asked = is_sampled(torch.tensor(temperature))
        output = coupled.coupled_verify(tensor(draft), 3, logits, given, asked, step)
        assert output.dtype == torch.int32
        return output.tolist()

    assert rows(own) == [[*own[:2], 201, no], [202, no, no, no], [*own[2:5], 203], [own[5], 204, no, no]]
    other = [own[0], own[1] + 1, own[2], own[3] + 1, own[4], own[5] + 1]
    assert rows(other) == [[*own[:2], no, no], [202, no, no, no], [*own[2:4], no, no], [own[5], no, no, no]]


@pytest.mark.parametrize("vocab_size", [32_000, 50_257, 151_936])
@pytest.mark.parametrize("scale", [0.01, 5.0])
def test_a_rows_scores_are_the_same_bits_among_others(torch_device, vocab_size, scale):
    """A sum in another order would change one token in a million."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(33, vocab_size, generator=generator).to(torch_device) * scale
    keys = torch.arange(33, device=torch_device)

    def scores(rows):
        seeds = noise.row_seeds(keys[rows].cpu(), keys[rows].cpu())
        noise_values = coupled._noise_values(seeds, logits[rows])
        peaks = blocks.block_peaks(logits[rows])
        top = peaks.amax(dim=-1, keepdim=True)
        masses = coupled._block_masses(logits[rows], torch.ones_like(peaks, dtype=torch.bool), top)
        wanted = torch.rand(peaks.shape, generator=generator).to(torch_device) < 0.5
        wanted[:, vocab_size // blocks.BLOCK_SIZE :] = True  # of a last block that is not whole
        assert torch.equal(coupled._block_masses(logits[rows], wanted, top), masses * wanted)
        inside = coupled._token_scores(logits[rows], masses.argmin(dim=-1, keepdim=True), top, noise_values)
        return torch.cat([masses, inside], dim=-1)

    together = scores(slice(None))
    for rows in (*(slice(i, i + 1) for i in range(33)), slice(5, 12), slice(1, 33)):
        assert torch.equal(scores(rows), together[rows])


@pytest.mark.parametrize("vocab_size", [64 * blocks.BLOCK_SIZE, 1000])
def test_rows_without_a_number_do_no_harm(vocab_size):
    """Not to the others; and what they get does not depend on these either."""
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(2)) * 4
    keys = torch.arange(6)
    expected = keyed_sample(logits, keys, keys)
    logits[2], logits[4] = torch.nan, -torch.inf
    logits[5, 700] = torch.inf
    alone = [keyed_sample(logits[i : i + 1], keys[i : i + 1], keys[i : i + 1]) for i in range(6)]
    tokens = keyed_sample(logits, keys, keys)
    assert tokens[[0, 1, 3]].tolist() == expected[[0, 1, 3]].tolist()
    assert torch.equal(tokens, torch.cat(alone))
    assert bool(((tokens >= 0) & (tokens < vocab_size)).all())


def test_a_device_with_other_arithmetic_is_refused(monkeypatch):
    noise.check(torch.device("cpu"))
    monkeypatch.setattr(noise, "_LAST_SHIFT", 32)
    with pytest.raises(RuntimeError, match=r"int64 arithmetic on cpu gives \d+ .*; take rollout\.spec=off$"):
        noise.check(torch.device("cpu"))


def test_ties_go_to_the_lowest_token_id(monkeypatch):
    monkeypatch.setattr(noise, "exponential", lambda seeds, num, _: torch.ones(len(seeds), num))
    second = blocks.BLOCK_SIZE
    logits = torch.zeros(1, 2 * second + second // 2)
    logits[0, :3] = -torch.inf
    logits[0, second] = -torch.inf  # the third block is not whole, the first and second tie or lose
    assert int(keyed_sample(logits, tensor([1]), tensor([1]))) == second + 1
    logits[0, second + 1 : second + 3] = -torch.inf
    assert int(keyed_sample(logits, tensor([1]), tensor([1]))) == 3


@pytest.mark.parametrize("name", ["random", "whole blocks", "a higher peak", "near ties", "a steep slope"])
def test_shortfall_is_the_larger_distance_to_a_winner(name):
    """In units of (logit + Gumbel noise); also of blocks far below the row's largest logit."""
    n, logits = 200, STRUCTURED[name]
    keys, positions = torch.arange(n), torch.arange(n) % 5 + 1
    chosen = torch.arange(n) * 37 % len(logits)
    found = coupled.shortfall(logits.expand(n, -1), keys, positions, chosen)
    noise_values = noise_by_hand(keys, positions, 128 - -len(logits) // 128)
    expected = behind_by_hand(logits.expand(n, -1), noise_values, chosen)
    is_near = expected < 80  # beyond, single precision says no more than that
    np.testing.assert_allclose(found[is_near], expected[is_near], rtol=1e-3, atol=1e-3)
    assert bool((found[~is_near] > 80).all())
    # A row alone: fewer rows than blocks.
    one = coupled.shortfall(logits.unsqueeze(0), keys[20:21], positions[20:21], chosen[20:21])
    assert torch.equal(one, found[20:21])
    assert is_near.sum() > 20 and (name != "a steep slope" or expected[is_near].max() > 60)


def test_what_cannot_be_drawn_falls_short_by_infinity():
    n, first = 20, torch.zeros(20, dtype=torch.int64)
    for end in (1, blocks.BLOCK_SIZE, 600):
        logits = target(600).repeat(n, 1)
        logits[:, :end] = -torch.inf
        assert bool(coupled.shortfall(logits, torch.arange(n), first, first).isinf().all())


def test_deterministic_algorithms_give_the_same_tokens(torch_device):
    """verl's full_determinism asks torch for them; an operation that has none would raise."""
    counts, keys = [2, 0, 3, 1], torch.arange(4)
    logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(0)).to(torch_device) * 3
    asked = is_sampled(torch.tensor([1.0, 0.0, 0.7, 1.0], device=torch_device))
    outputs = []
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            step = coupled.StepNoise(keys, keys, counts)
            own = step.sample_after(logits[:4]).unsqueeze(-1)
            outputs.append(coupled.coupled_verify(logits.argmax(dim=-1), 3, logits, own, asked, step))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*outputs)


def test_argmax_takes_the_lowest_of_equal_logits():
    """Of drafted rows by `blocks.argmax`, as of plain ones by torch's; most rows tie across blocks."""
    logits = torch.randint(0, 60, (300, 1300), generator=torch.Generator().manual_seed(1)).float()
    lowest = [row.index(max(row)) for row in logits.tolist()]
    ties = (logits == logits.amax(dim=-1, keepdim=True)).nonzero().tolist()
    assert len({(row, token // blocks.BLOCK_SIZE) for row, token in ties}) > 3 * len(logits)
    assert blocks.argmax(logits).tolist() == logits.argmax(dim=-1).tolist() == lowest
