"""The vectorised verification against its definition: a loop over requests, and the exact distribution.

Chi-square tests of 60,000 samples each, with fixed seeds, so they pass or fail for good; for a choice of
other seeds the false-alarm rate is 1e-6 each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.nn.functional import one_hot

from rollout_spec.verification import blocks, prefixes, standard
from tests.test_coupled import STRUCTURED, behind_by_hand
from tests.test_coupled import sampling as metadata

FALSE_ALARM_RATE = 1e-6
NUM_SAMPLES = 60_000
TARGET = torch.tensor([0.05, 0.3, 0.0, 0.15, 0.02, 0.28, 0.2])


def run(
    drafts: list[list[int]], logits: torch.Tensor, bonus: list[int], sampling, draft_probs=None, **options
) -> torch.Tensor:
    """`standard.rejection_sample` of such drafts."""
    counts = [len(draft) for draft in drafts]
    return standard.rejection_sample(
        torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32), counts, max(counts),
        torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), draft_probs, logits,
        torch.tensor(bonus, dtype=torch.int32).unsqueeze(-1), sampling, **options,
    )  # fmt: skip


def assert_distribution(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    counts = np.bincount(tokens.numpy(), minlength=len(probs))
    expected = probs.double().numpy() / probs.double().sum().item() * len(tokens)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert chisquare(counts[kept], expected[kept]).pvalue > FALSE_ALARM_RATE


@pytest.mark.parametrize("draft", [1, 2, 5])
def test_point_mass_drafts_leave_the_targets_distribution(draft: int) -> None:
    torch.manual_seed(draft)
    n = NUM_SAMPLES
    output = run(
        [[draft]] * n, TARGET.log().repeat(n, 1), [0] * n, metadata([1.0] * n), use_fp64_gumbel=draft % 2 > 0
    )
    assert_distribution(output[:, 0], TARGET)
    accepted = output[:, 0] == draft
    # only behind an accepted draft token comes the bonus token
    assert torch.equal(output[:, 1], torch.where(accepted, 0, prefixes.PLACEHOLDER_TOKEN_ID).int())
    # behind a rejected one the target's distribution without it
    residual = TARGET.clone()
    residual[draft] = 0
    assert_distribution(output[~accepted, 0], residual)


def test_full_draft_distributions_leave_the_targets_distribution() -> None:
    torch.manual_seed(0)
    n, proposal = NUM_SAMPLES, torch.tensor([0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    drafts = torch.multinomial(proposal, n, replacement=True).unsqueeze(-1).tolist()
    output = run(drafts, TARGET.log().repeat(n, 1), [0] * n, metadata([1.0] * n), proposal.repeat(n, 1))
    assert_distribution(output[:, 0], TARGET)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("name", sorted(STRUCTURED.keys() - {"only the remainder is left"}))
def test_what_replaces_a_draft_token_wins_the_race(
    monkeypatch: pytest.MonkeyPatch, name: str, has_probs: bool, by_token: bool
) -> None:
    """All tokens of what the draft leaves race, by the same noise; nothing is accepted."""
    n, logits, drawn = 40, STRUCTURED[name], []
    fill_with_noise = standard._fill_with_noise

    def kept(noise: torch.Tensor, *args: Any) -> None:
        fill_with_noise(noise, *args)
        drawn.append(noise.double().numpy().copy())

    monkeypatch.setattr(standard, "_fill_with_noise", kept)
    monkeypatch.setattr(standard, "_uniform", lambda counts, *_: torch.ones(sum(counts), dtype=torch.float64))
    monkeypatch.setattr(blocks, "CHUNK_SIZE", 5 * len(logits) * 16)  # 16 requests at a time
    torch.manual_seed(4)
    probs, likeliest = logits.softmax(-1).double(), logits.argmax()
    proposed = logits.roll(1).div(2).softmax(-1) if has_probs else one_hot(likeliest, len(logits)).float()
    draft = int((proposed - probs).argmax())
    output = run(
        [[draft]] * n, logits.expand(n, -1), [0] * n, metadata([1.0] * n),
        proposed.expand(n, -1) if has_probs else None, use_fp64_gumbel=by_token,
    )  # fmt: skip
    assert [len(part) for part in drawn] == [16, 16, 8]
    left = (probs - proposed.double()).clamp(min=0)
    noise, tokens = np.concatenate(drawn), output[:, 0].long()
    if by_token:
        scores = left.numpy() / noise
        behind = 1 - scores[range(n), tokens] / scores.max(axis=1)
    else:
        behind = behind_by_hand(left.log().expand(n, -1), noise, tokens)
    assert behind.max() < 1e-4


def greedy_by_loop(drafts: list[list[int]], logits: torch.Tensor, bonus: list[int]) -> list[list[int]]:
    result, position = [], 0
    for draft, extra in zip(drafts, bonus, strict=True):
        best = logits[position : position + len(draft)].argmax(-1).tolist()
        position += len(draft)
        row: list[int] = []
        for token, own in zip(draft, best, strict=True):
            row.append(own)
            if token != own:
                break
        else:
            row.append(extra)
        result.append(row)
    return result


def test_greedy_ties_go_to_the_lowest_token_id() -> None:
    """Of drafted rows by `blocks.argmax`, as of plain ones by torch's; most rows tie across blocks."""
    logits = torch.randint(0, 60, (300, 1300), generator=torch.Generator().manual_seed(1)).float()
    lowest = [row.index(max(row)) for row in logits.tolist()]
    ties = (logits == logits.amax(dim=-1, keepdim=True)).nonzero()
    assert len(
        set(map(tuple, torch.stack([ties[:, 0], ties[:, 1] // blocks.BLOCK_SIZE], dim=-1).tolist()))
    ) > 3 * len(logits)
    assert blocks.argmax(logits).tolist() == logits.argmax(dim=-1).tolist() == lowest
    output = run([[token] for token in lowest], logits, [7] * len(lowest), metadata([0.0] * len(lowest)))
    assert output.tolist() == [[token, 7] for token in lowest]


drafts_strategy = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=6).filter(any)


@settings(deadline=None, max_examples=50)
@given(drafts=drafts_strategy, seed=st.integers(0, 1000), data=st.data())
def test_mixed_rows_and_ragged_lengths(drafts: list[list[int]], seed: int, data: st.DataObject) -> None:
    """Greedy rows in a mixed batch are exact; sampled rows keep a prefix of the draft and add one token."""
    torch.manual_seed(seed)
    logits = torch.randn(sum(map(len, drafts)), 3)
    bonus = [2] * len(drafts)
    kinds = data.draw(st.sampled_from([[0.0], [0.0, 1.0]]))
    temperature = data.draw(st.lists(st.sampled_from(kinds), min_size=len(drafts), max_size=len(drafts)))
    output = run(drafts, logits, bonus, metadata(temperature))
    exact = greedy_by_loop(drafts, logits, bonus)
    for i, row in enumerate(output.tolist()):
        kept = [token for token in row if token >= 0]
        assert row[: len(kept)] == kept and 1 <= len(kept) <= len(drafts[i]) + 1
        if temperature[i] == 0:
            assert kept == exact[i]
            continue
        num_accepted = len(kept) - 1
        assert kept[:num_accepted] == drafts[i][:num_accepted]
        if num_accepted < len(drafts[i]):
            assert kept[-1] != drafts[i][num_accepted]
        else:
            assert kept[-1] == bonus[i]


def sampled_by_loop(
    drafts: list[list[int]],
    probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    bonus: list[int],
    uniform: torch.Tensor,
    drawn: torch.Tensor,
) -> list[list[int]]:
    """The definition, as vLLM's kernels have it, with their random numbers given."""
    result, position = [], 0
    for request, draft in enumerate(drafts):
        row: list[int] = []
        for token in draft:
            target_row, at = probs[position], position
            position += 1
            if len(row) and row[-1] < 0:
                continue
            proposed = 1.0 if draft_probs is None else draft_probs[at, token].item()
            if proposed > 0 and uniform[at].item() < target_row[token].item() / proposed:
                row.append(token)
                continue
            left = target_row.clone() if draft_probs is None else (target_row - draft_probs[at]).clamp(min=0)
            if draft_probs is None:
                left[token] = 0
            row += [int((left / drawn[request]).argmax()), -1]
        row = row if row and row[-1] < 0 else [*row, bonus[request]]
        result.append([token for token in row if token >= 0])
    return result


@settings(deadline=None, max_examples=50)
@given(drafts=drafts_strategy, seed=st.integers(0, 1000), has_probs=st.booleans(), use_fp64=st.booleans())
def test_sampled_equals_the_loop(drafts: list[list[int]], seed: int, has_probs: bool, use_fp64: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens, n = sum(map(len, drafts)), len(drafts)
    logits = torch.randn(num_tokens, 3, generator=generator) * 2
    draft_probs = torch.randn(num_tokens, 3, generator=generator).softmax(-1) if has_probs else None
    uniform = torch.rand(num_tokens, dtype=torch.float64, generator=generator)
    dtype = torch.float64 if use_fp64 else torch.float32
    drawn = torch.empty(n, 3, dtype=dtype).exponential_(generator=generator)
    bonus = [0, 1, 2, 0, 1, 2][:n]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standard, "_uniform", lambda *_: uniform)

        def given_noise(out: torch.Tensor, requests: list[int], generators: dict) -> None:
            assert out.dtype == dtype
            out.copy_(drawn[requests])

        patch.setattr(standard, "_fill_with_noise", given_noise)
        # Requests with generators race by token; what these would draw is `drawn`.
        sampling = metadata([1.0] * n, {0: torch.Generator()})
        output = run(drafts, logits, bonus, sampling, draft_probs, use_fp64_gumbel=use_fp64)
    expected = sampled_by_loop(drafts, logits.softmax(-1), draft_probs, bonus, uniform, drawn)
    assert [[token for token in row if token >= 0] for row in output.tolist()] == expected


@pytest.mark.parametrize("has_probs", [False, True])
def test_what_has_no_probability_is_not_accepted(monkeypatch: pytest.MonkeyPatch, has_probs: bool) -> None:
    """Though a uniform number may be 0."""
    monkeypatch.setattr(standard, "_uniform", lambda counts, *_: torch.zeros(sum(counts)))
    logits, probs = torch.tensor([[0.0, -torch.inf, 0.0]]), torch.tensor([[0.5, 0.5, 0.0]])
    output = run([[1]], logits, [0], metadata([1.0]), probs if has_probs else None)
    assert output[0, 0] != 1 and output[0, 1] == prefixes.PLACEHOLDER_TOKEN_ID


def test_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))

    def draw(drafts: list[list[int]], rows: torch.Tensor, slot: int) -> list[int]:
        generators = {slot: torch.Generator().manual_seed(7)}
        return run(drafts, rows, [1] * len(drafts), metadata([1.0] * len(drafts), generators))[slot].tolist()

    alone = draw([[4, 5]], logits[:2], 0)
    assert draw([[3], [4, 5]], torch.cat([logits[2:], logits[:2]]), 1) == alone


def test_uniform_numbers_are_of_their_requests_generators() -> None:
    counts, seeds = [2, 0, 3, 1, 4], {0: 7, 1: 9, 4: 8}
    generators = {i: torch.Generator().manual_seed(seed) for i, seed in seeds.items()}
    uniform = standard._uniform(counts, generators, torch.device("cpu"))
    parts = uniform.split(counts)
    for i, seed in seeds.items():
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(counts[i], dtype=torch.float64).uniform_(generator=generator)
        assert parts[i].tolist() == drawn.tolist()
    # 24 bits of single precision would give an exact 0 in every 16,777,216 draws.
    assert uniform.dtype == torch.float64 and len(set(uniform.tolist())) == 10
    assert bool(((uniform >= 0) & (uniform < 1)).all())


@settings(deadline=None, max_examples=50)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.int32, torch.int64]),
)
def test_expand_equals_the_loop(counts: list[int], dtype: torch.dtype) -> None:
    values = torch.arange(len(counts)).to(dtype)
    expanded = standard.expand_batch_to_tokens(values, torch.tensor(counts).cumsum(0), sum(counts), 0, 9)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [i if i else 9 for i, n in enumerate(counts) for _ in range(n)]


def test_synthetic_acceptance_is_refused() -> None:
    nothing: Any = None
    with pytest.raises(ValueError, match="synthetic"):
        standard.rejection_sample(nothing, [1], 1, *[nothing] * 5, synthetic_mode=True)
