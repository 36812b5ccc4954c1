"""The vectorised verification against its definition: a loop over requests, and the exact distribution.

Chi-square tests of 60,000 samples each, with fixed seeds, so they pass or fail for good; for a choice of
other seeds the false-alarm rate is 1e-6 each. Samplers that are wrong in one place each fail them.
"""

from __future__ import annotations

import functools
import itertools
import re
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_spec import blocks, keyed, noise, verify
from tests.test_coupled import PeakMemory

FALSE_ALARM_RATE = 1e-6
NUM_SAMPLES = 60_000
TARGET = torch.tensor([0.05, 0.3, 0.0, 0.15, 0.02, 0.28, 0.2])


def metadata(temperature: list[float], generators: dict | None = None) -> types.SimpleNamespace:
    values = torch.tensor(temperature)
    return types.SimpleNamespace(
        temperature=values,
        all_greedy=bool((values == 0).all()),
        all_random=bool((values != 0).all()),
        generators=generators or {},
    )


def run(
    drafts: list[list[int]], logits: torch.Tensor, bonus: list[int], sampling, draft_probs=None, **options
) -> torch.Tensor:
    """`verify.rejection_sample` on the logits' device; what it gives, on the CPU."""
    device, counts = logits.device, [len(draft) for draft in drafts]
    return verify.rejection_sample(
        torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32, device=device),
        counts,
        max(counts),
        torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32),
        draft_probs,
        logits,
        torch.tensor(bonus, dtype=torch.int32, device=device).unsqueeze(-1),
        moved(sampling, device),
        **options,
    ).cpu()


def recovered(
    counts: list[int], drafts: torch.Tensor, draft_probs, probs: torch.Tensor, sampling, **options
) -> torch.Tensor:
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(probs.device)
    return verify.sample_recovered_tokens(
        max(counts),
        counts,
        ends,
        drafts.to(probs.device),
        draft_probs,
        probs,
        sampling,
        probs.device,
        **options,
    ).cpu()


def moved(sampling: types.SimpleNamespace, device: torch.device) -> types.SimpleNamespace:
    return types.SimpleNamespace(**vars(sampling) | {"temperature": sampling.temperature.to(device)})


def assert_distribution(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    counts = np.bincount(tokens.numpy(), minlength=len(probs))
    expected = probs.double().numpy() / probs.double().sum().item() * len(tokens)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert chisquare(counts[kept], expected[kept]).pvalue > FALSE_ALARM_RATE


# How recovered tokens race: with noise for every token, as where requests have generators, and by blocks, of
# which TARGET's tokens, so far apart, fill three.
RACES: dict[str, tuple[int, dict[str, bool]]] = {
    "by token": (1, {"use_fp64_gumbel": True}),
    "by block": (90, {}),
}


def spread(values: torch.Tensor, stride: int, fill: float, device: str) -> torch.Tensor:
    """NUM_SAMPLES rows of the values, with `fill` between them."""
    row = torch.full((len(values), stride), fill)
    row[:, 0] = values
    return row.view(-1).to(device).repeat(NUM_SAMPLES, 1)


def verify_one_token(draft: int, race: str, device: str = "cpu") -> torch.Tensor:
    torch.manual_seed(draft)
    stride, options = RACES[race]
    output = run(
        [[draft * stride]] * NUM_SAMPLES,
        spread(TARGET.log(), stride, -torch.inf, device),
        [0] * NUM_SAMPLES,
        metadata([1.0] * NUM_SAMPLES),
        **options,
    )
    return output.div(stride, rounding_mode="floor")


def verify_proposals(race: str, device: str = "cpu") -> torch.Tensor:
    torch.manual_seed(0)
    stride, options = RACES[race]
    proposal = torch.tensor([0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    drafts = torch.multinomial(proposal, NUM_SAMPLES, replacement=True) * stride
    output = run(
        [[int(draft)] for draft in drafts],
        spread(TARGET.log(), stride, -torch.inf, device),
        [0] * NUM_SAMPLES,
        metadata([1.0] * NUM_SAMPLES),
        spread(proposal, stride, 0.0, device),
        **options,
    )
    return output.div(stride, rounding_mode="floor")


@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("draft", range(len(TARGET)))
def test_point_mass_drafts_leave_the_targets_distribution(draft: int, race: str, torch_device: str) -> None:
    output = verify_one_token(draft, race, torch_device)
    assert_distribution(output[:, 0], TARGET)
    accepted = output[:, 0] == draft
    # only behind an accepted draft token comes the bonus token
    assert torch.equal(output[:, 1], torch.where(accepted, 0, verify.PLACEHOLDER_TOKEN_ID).int())


@pytest.mark.parametrize("race", RACES)
def test_full_draft_distributions_leave_the_targets_distribution(race: str, torch_device: str) -> None:
    assert_distribution(verify_proposals(race, torch_device)[:, 0], TARGET)


def hotter(masses: torch.Tensor, drawn: torch.Tensor, race: Any) -> torch.Tensor:
    return race(masses ** (1 / 1.2), drawn)


WRONG = {
    "every draft token is accepted": ("_uniform", lambda num_tokens, *_: torch.zeros(num_tokens)),
    "two in three are tried": ("_uniform", lambda num_tokens, *_: torch.rand(num_tokens) * 1.5),
    "a rejected token is drawn again": ("_without_draft", lambda probs, *_: probs),
    "no noise": ("_noise", lambda requests, length, *_: torch.ones(len(requests), length)),
}
RACE_OF = {"by token": (verify, "_race"), "by block": (keyed, "race")}


@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("name", [*WRONG, "recovered at temperature 1.2"])
def test_the_distribution_test_fails_on_a_wrong_sampler(
    monkeypatch: pytest.MonkeyPatch, name: str, race: str
) -> None:
    if name in WRONG:
        monkeypatch.setattr(verify, *WRONG[name])
    else:
        module, function = RACE_OF[race]
        monkeypatch.setattr(module, function, functools.partial(hotter, race=getattr(module, function)))
    for output in (verify_one_token(3, race), verify_proposals(race)):
        with pytest.raises(AssertionError):
            assert_distribution(output[:, 0], TARGET)


def test_recovered_tokens_follow_the_residual(torch_device: str) -> None:
    torch.manual_seed(1)
    draft = 5
    drafts = torch.full((NUM_SAMPLES,), draft, dtype=torch.int32)
    tokens = recovered(
        [1] * NUM_SAMPLES, drafts, None, TARGET.to(torch_device).repeat(NUM_SAMPLES, 1), metadata([1.0])
    )
    residual = TARGET.clone()
    residual[draft] = 0
    assert_distribution(tokens.long(), residual)


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


def test_greedy_ties_go_to_the_lowest_token_id(torch_device: str) -> None:
    """Of drafted rows by `blocks.argmax`, as of plain ones by torch's; most rows tie across blocks."""
    logits = torch.randint(0, 60, (300, 1300), generator=torch.Generator().manual_seed(1)).float()
    lowest = [row.index(max(row)) for row in logits.tolist()]
    ties = (logits == logits.amax(dim=-1, keepdim=True)).nonzero()
    assert len(
        set(map(tuple, torch.stack([ties[:, 0], ties[:, 1] // blocks.BLOCK_SIZE], dim=-1).tolist()))
    ) > 3 * len(logits)
    logits = logits.to(torch_device)
    assert blocks.argmax(logits).tolist() == logits.argmax(dim=-1).tolist() == lowest
    output = run([[token] for token in lowest], logits, [7] * len(lowest), metadata([0.0] * len(lowest)))
    assert output.tolist() == [[token, 7] for token in lowest]


drafts_strategy = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=6).filter(any)


@settings(deadline=None, max_examples=100)
@given(drafts=drafts_strategy, seed=st.integers(0, 1000))
def test_greedy_equals_the_loop(drafts: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(map(len, drafts)), 3, generator=generator)
    bonus = torch.randint(0, 3, (len(drafts),), generator=generator).tolist()
    output = run(drafts, logits, bonus, metadata([0.0] * len(drafts)))
    assert [[token for token in row if token >= 0] for row in output.tolist()] == greedy_by_loop(
        drafts, logits, bonus
    )


@settings(deadline=None, max_examples=100)
@given(drafts=drafts_strategy, seed=st.integers(0, 1000), data=st.data())
def test_mixed_rows_and_ragged_lengths(drafts: list[list[int]], seed: int, data: st.DataObject) -> None:
    """Greedy rows in a mixed batch are exact; sampled rows keep a prefix of the draft and add one token."""
    torch.manual_seed(seed)
    logits = torch.randn(sum(map(len, drafts)), 3)
    bonus = [2] * len(drafts)
    temperature = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(drafts), max_size=len(drafts)))
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
    """The definition, as vLLM's kernels and vllm-ascend's loops have it, with their random numbers given."""
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


@settings(deadline=None, max_examples=100)
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
        patch.setattr(verify, "_uniform", lambda *_: uniform)

        def noise_as_asked(
            requests: torch.Tensor, length: int, generators: dict, is_fp64: bool
        ) -> torch.Tensor:
            assert is_fp64 == use_fp64
            return drawn[requests]

        patch.setattr(verify, "_noise", noise_as_asked)
        # Requests with generators race by token; what these would draw is `drawn`.
        sampling = metadata([1.0] * n, {0: torch.Generator()})
        output = run(drafts, logits, bonus, sampling, draft_probs, use_fp64_gumbel=use_fp64)
    expected = sampled_by_loop(drafts, logits.softmax(-1), draft_probs, bonus, uniform, drawn)
    assert [[token for token in row if token >= 0] for row in output.tolist()] == expected


@pytest.mark.parametrize("vocab_size", [512, 600])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("has_probs", [False, True])
def test_bounds_decide_as_the_sums_do(
    monkeypatch: pytest.MonkeyPatch, torch_device: str, vocab_size: int, scale: float, has_probs: bool
) -> None:
    """Which draft tokens are accepted, from flat rows to ones that have one token; also beside the ratio."""
    n = 400
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(n, vocab_size, generator=generator) * scale
    logits[:, ::7] = -torch.inf
    logits[1::3, blocks.BLOCK_SIZE :] = -torch.inf  # both bounds are the sum itself
    logits[0] = -torch.inf  # as where everything is masked: no number
    random = torch.randint(vocab_size, (n,), generator=generator)
    drafts = torch.where(torch.rand(n, generator=generator) < 0.6, logits.argmax(dim=-1), random)
    draft_probs = torch.rand(n, vocab_size, generator=generator).softmax(dim=-1) if has_probs else None
    ratio = verify._ratio(
        logits.softmax(dim=-1).gather(-1, drafts.unsqueeze(-1)),
        None if draft_probs is None else draft_probs.gather(-1, drafts.unsqueeze(-1)).squeeze(-1).double(),
    )
    uniform = torch.rand(n, dtype=torch.float64, generator=generator)
    near = torch.arange(n) % 5 != 0
    # The second pair is within what a sum in another order may differ by.
    beside = torch.tensor([-1e-5, 1e-5, -3e-8, 3e-8], dtype=torch.float64).repeat(n // 4)
    uniform[near] = (ratio * (1 + beside))[near].clamp(max=1 - 1e-9)
    drafts, uniform, logits = (x.to(torch_device) for x in (drafts, uniform, logits))
    if draft_probs is not None:
        draft_probs = draft_probs.to(torch_device)
    probs_of = verify._probs_of
    outputs, num_summed = [], []
    for few in (4, 0):  # by bounds, and all by their sums
        calls: list[int] = []

        def counted(rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
            calls.append(len(rows))  # noqa: B023
            return probs_of(rows, token_ids)

        with monkeypatch.context() as patch:
            patch.setattr(verify, "FEW", few)
            patch.setattr(verify, "_probs_of", counted)
            patch.setattr(blocks, "CHUNK_SIZES", {torch_device: 1 << 14})
            outputs.append(verify._accepted(drafts, draft_probs, logits, uniform, False))
        num_summed.append(sum(calls))
    assert torch.equal(*outputs)
    assert 0 < outputs[0].sum() < n
    assert num_summed[0] < num_summed[1] == n


def test_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))

    def draw(drafts: list[list[int]], rows: torch.Tensor, slot: int) -> list[int]:
        generators = {slot: torch.Generator().manual_seed(7)}
        return run(drafts, rows, [1] * len(drafts), metadata([1.0] * len(drafts), generators))[slot].tolist()

    alone = draw([[4, 5]], logits[:2], 0)
    assert draw([[3], [4, 5]], torch.cat([logits[2:], logits[:2]]), 1) == alone


@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.int32, torch.int64]),
)
def test_expand_equals_the_loop(counts: list[int], dtype: torch.dtype) -> None:
    values = torch.arange(len(counts)).to(dtype)
    expanded = verify.expand_batch_to_tokens(values, torch.tensor(counts).cumsum(0), sum(counts), 0, 9)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [i if i else 9 for i, n in enumerate(counts) for _ in range(n)]


@pytest.mark.parametrize("chunk_size", [1 << 24, 1 << 20])
@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
@pytest.mark.parametrize("counts", [[8] + [1] * 15, [1] * 8], ids=["ragged", "small"])
@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_memory_is_at_most_one_temporary_of_the_logits_size(
    monkeypatch: pytest.MonkeyPatch,
    torch_device: str,
    has_draft_probs: bool,
    counts: list[int],
    vocab_size: int,
    chunk_size: int,
) -> None:
    """No draft token is accepted, so that every request needs a token of the target's own."""
    monkeypatch.setattr(blocks, "CHUNK_SIZES", {torch_device: chunk_size})
    logits = torch.randn(sum(counts), vocab_size, device=torch_device)
    logits[:, 0] = -torch.inf
    probs = logits.softmax(dim=-1)
    draft_probs = probs.roll(1) if has_draft_probs else None
    sampling = metadata([1.0] * len(counts))
    temporary = min(logits.nbytes, 4 * chunk_size)
    with PeakMemory() as memory:
        output = run([[0] * n for n in counts], logits, [1] * len(counts), sampling, draft_probs)
    assert bool((output[:, 1:] == verify.PLACEHOLDER_TOKEN_ID).all())
    assert 0.8 * temporary < memory.peak < 1.05 * temporary
    with PeakMemory() as memory:
        recovered(counts, torch.zeros(sum(counts), dtype=torch.int32), draft_probs, probs, sampling)
    assert 0.6 * temporary < memory.peak < 1.05 * temporary
    for draw in (
        lambda: run([[0] * n for n in counts], logits, [1] * len(counts), sampling, use_fp64_gumbel=True),
        lambda: recovered(
            counts, torch.zeros(sum(counts), dtype=torch.int32), None, probs, sampling, use_fp64_gumbel=True
        ),
    ):
        with PeakMemory() as memory:
            draw()
        assert memory.peak < 1.05 * temporary


class Operations(TorchDispatchMode):
    """The names of the operations inside, without the underscores of their variants."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(re.sub(r"^_+|_+$|^new_|_like$", "", func.overloadpacket.__name__).strip("_"))
        return func(*args, **(kwargs or {}))


VIEWS_AND_COPIES = {
    "alias", "clone", "copy", "detach", "empty", "expand", "lift_fresh", "permute", "scalar_tensor", "select",
    "slice", "split", "squeeze", "to_copy", "unbind", "unsafe_view", "unsqueeze", "view",
}  # fmt: skip


def test_the_operations_are_those_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, drafts = [2, 0, 3], torch.tensor([1, 2, 3, 4, 5])
    ends, bonus, keys = torch.tensor([2, 2, 5]), torch.zeros(3, 1, dtype=torch.int32), torch.arange(3)
    operations = Operations()
    monkeypatch.setattr(noise, "HOST_WORDS", 0)
    for chunk_size, vocab_size, use_fp64, generators in itertools.product(
        (1 << 10, 1 << 20), (512, 600), (False, True), ({}, {0: torch.Generator()})
    ):
        sampling = metadata([1.0, 0.0, 0.7], generators)
        monkeypatch.setattr(blocks, "CHUNK_SIZES", {"cpu": chunk_size})
        logits, probs = torch.randn(5, vocab_size), torch.rand(5, vocab_size).softmax(-1)
        with operations:
            step = keyed.KeyedStep(keys, keys, counts)
            step.sample_behind(logits[:3])
            verify.coupled_sample(drafts, 3, logits, bonus, sampling, step)
            keyed.shortfall(logits, drafts, drafts, drafts)
            for draft_probs in (None, probs):
                verify.rejection_sample(
                    drafts, counts, 3, ends, draft_probs, logits, bonus, sampling, use_fp64_gumbel=use_fp64
                )
                verify.sample_recovered_tokens(
                    3, counts, ends, drafts, draft_probs, probs, sampling, probs.device, use_fp64
                )
    listed = [
        re.search(r"torch_npu has[^:]*: ([\w,\s]+)\.", str(module.__doc__)) for module in (verify, noise)
    ]
    names = {name for match in listed if match for name in re.split(r",\s+", match[1])}
    assert operations.names - VIEWS_AND_COPIES == names


@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_deterministic_algorithms_give_the_same_tokens(torch_device: str, has_draft_probs: bool) -> None:
    """verl's full_determinism asks torch for them; an operation that has none would raise."""
    counts, keys = [2, 0, 3, 1], torch.arange(4)
    logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(0)).to(torch_device) * 3
    drafts = logits.argmax(dim=-1)
    draft_probs = logits.roll(1).softmax(dim=-1) if has_draft_probs else None
    sampling = moved(metadata([1.0, 0.0, 0.7, 1.0]), logits.device)
    outputs = []
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            torch.manual_seed(5)
            step = keyed.KeyedStep(keys, keys, counts)
            own = step.sample_behind(logits[:4]).unsqueeze(-1)
            coupled = verify.coupled_sample(drafts, 3, logits, own, sampling, step)
            rows = [rows.tolist() for rows in drafts.split(counts)]
            outputs.append((coupled, run(rows, logits, [1] * 4, sampling, draft_probs)))
            outputs[-1] += (recovered(counts, drafts, draft_probs, logits.softmax(dim=-1), sampling),)
    finally:
        torch.use_deterministic_algorithms(False)
    for plain, deterministic in zip(*outputs, strict=True):
        assert torch.equal(plain, deterministic)


def test_synthetic_acceptance_is_refused() -> None:
    with pytest.raises(ValueError, match="synthetic"):
        verify.rejection_sample(
            torch.zeros(1),
            [1],
            1,
            torch.ones(1),
            None,
            torch.zeros(1, 3),
            torch.zeros(1, 1),
            None,
            synthetic_mode=True,
        )
