"""The functions that ours take the place of: vLLM's."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout_spec import patches
from rollout_spec.verification import coupled, standard

FUNCTIONS = ("rejection_sample", "expand_batch_to_tokens")


class Batch:
    """Ragged drafts; greedy rows among sampled ones; every request with a generator of its own."""

    def __init__(self, counts: list[int], vocab_size: int, seed: int, num_greedy: int = 0) -> None:
        torch.manual_seed(seed)
        self.counts, self.seed = counts, seed
        self.probs = (torch.randn(sum(counts), vocab_size) * 2).softmax(dim=-1)
        self.ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        likely = torch.rand(sum(counts)) < 0.6
        random = torch.randint(vocab_size, (sum(counts),))
        self.drafts = torch.where(likely, self.probs.argmax(dim=-1), random).int()
        self.draft_probs = (torch.randn(sum(counts), vocab_size) * 2).softmax(dim=-1)
        self.bonus = torch.arange(len(counts), dtype=torch.int32).unsqueeze(-1)
        self.temperature = torch.tensor([0.0] * num_greedy + [1.0] * (len(counts) - num_greedy))

    def metadata(self, generators: Any = None) -> types.SimpleNamespace:
        own = {i: torch.Generator().manual_seed(100 * self.seed + i) for i in range(len(self.counts))}
        return types.SimpleNamespace(
            temperature=self.temperature,
            all_greedy=bool((self.temperature <= 0).all()),
            all_random=bool((self.temperature > 0).all()),
            generators=own if generators is None else generators,
            top_k=None,
            top_p=None,
        )


def batches() -> Iterator[Batch]:
    for seed, (num_greedy, vocab_size) in enumerate(itertools.product((0, 3, 8), (3, 700))):
        yield Batch([3, 0, 1, 8, 2, 5, 0, 4], vocab_size, seed, num_greedy)
        yield Batch([1] * 8, vocab_size, seed, num_greedy)


@pytest.fixture
def vllms(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """vLLM's own functions, whatever this process has put in their place, with its kernels for the CPU.

    The one for recovered tokens does not know an argument that it gets; the one that expands keeps integers
    only.
    """
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    recovered = cpu_triton_utils._sample_recovered_tokens_kernel_impl

    def without_dtype(*args: Any, **kwargs: Any) -> None:
        recovered(*args, **{name: value for name, value in kwargs.items() if name != "USE_FP64_GUMBEL"})

    for name in ("rejection_greedy_sample_kernel", "rejection_random_sample_kernel", "expand_kernel"):
        monkeypatch.setattr(rejection_sampler, name, getattr(cpu_triton_utils, name))
    wrapper = cpu_triton_utils._FuncWrapper(without_dtype)
    monkeypatch.setattr(rejection_sampler, "sample_recovered_tokens_kernel", wrapper)
    functions = {name: getattr(rejection_sampler, name) for name in FUNCTIONS}
    for name in FUNCTIONS:
        while hasattr(functions[name], "__rollout_spec_patch__"):
            functions[name] = functions[name].__rollout_spec_patch__[1]
        assert functions[name].__module__ == rejection_sampler.__name__
    return types.SimpleNamespace(**functions)


@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_vllms_functions_give_the_same_tokens(has_draft_probs: bool, vllms: types.SimpleNamespace) -> None:
    for batch in batches():
        draft_probs = batch.draft_probs if has_draft_probs else None
        given = (batch.drafts, batch.counts, max(batch.counts), batch.ends, draft_probs)
        given += (batch.probs.log(), batch.bonus)
        expanding = (torch.arange(len(batch.counts)), batch.ends, len(batch.drafts), 0, 7)
        outputs = [
            (
                functions.rejection_sample(*given, batch.metadata()),
                functions.expand_batch_to_tokens(*expanding),
            )
            for functions in (vllms, standard)
        ]
        for theirs, ours in zip(*outputs, strict=True):
            assert torch.equal(theirs, ours)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signatures_are_vllms(name: str, vllms: types.SimpleNamespace) -> None:
    """So that ours can take the place in any call; what only ours takes comes last and may be left out."""
    theirs = list(inspect.signature(getattr(vllms, name)).parameters.values())
    ours = list(inspect.signature(getattr(standard, name)).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.default is not p.empty for p in ours[len(theirs) :])


def test_what_coupled_verification_does_not_know_is_refused() -> None:
    """vllm-ascend's logits with the token ids that were kept, and a form not yet seen."""
    from rollout_spec.vllm.mrv1.sampler import RowGenerators, couple_rejection_sample

    batch = Batch([2, 1], 50, 3)
    names = list(inspect.signature(standard.rejection_sample).parameters)[:8]

    def module_with(sixth: str) -> types.ModuleType:
        module, scope = types.ModuleType("other"), {}
        arguments = ", ".join([*names[:5], sixth, *names[6:]])
        exec(f"def rejection_sample({arguments}): return None", scope)
        module.rejection_sample = scope["rejection_sample"]
        return module

    step = coupled.CoupledStep(range(2), range(2), batch.counts)
    rows = RowGenerators({}, step, batch.counts)
    later = module_with("target_logits_or_tuple")
    couple_rejection_sample(later)
    given = (batch.drafts, batch.counts, 2, batch.ends, None)
    tokens = later.rejection_sample(*given, (batch.probs.log(), None), batch.bonus, batch.metadata(rows))
    assert tokens.shape == (2, 3)
    with pytest.raises(RuntimeError, match="enable_reduce_sample"):
        later.rejection_sample(*given, (batch.probs.log(), batch.drafts), batch.bonus, batch.metadata(rows))
    with pytest.raises(patches.PatchError, match=r"vllm-coupled-verification.*other\.rejection_sample"):
        couple_rejection_sample(module_with("target_scores"))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("num_logprobs", [0, 3])
@pytest.mark.parametrize("counts", [[3, 0, 1, 4], [1], [0, 2], [2] * 9])
def test_logprobs_of_what_is_kept_are_vllms(counts: list[int], num_logprobs: int, mode: str) -> None:
    """Against vLLM's own function, whose rows of rejected tokens are thrown away afterwards."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from rollout_spec.vllm.upstream.kept_logprobs import PARAMETERS, kept_logprobs

    torch.manual_seed(len(counts))
    vocab_size, batch_size, longest = 500, len(counts), max(counts)
    target, bonus = torch.randn(sum(counts), vocab_size), torch.randn(batch_size, vocab_size)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    behind = ends.long() + torch.arange(batch_size)
    logits = torch.empty(sum(counts) + batch_size, vocab_size)
    is_draft = torch.ones(len(logits), dtype=torch.bool).index_fill(0, behind, False)
    metadata = types.SimpleNamespace(
        num_draft_tokens=counts, cu_num_sampled_tokens=ends + torch.arange(1, batch_size + 1),
        target_logits_indices=is_draft.nonzero().squeeze(-1), bonus_logits_indices=behind,
    )  # fmt: skip
    verifier = RejectionSampler(Sampler(logprobs_mode=mode))
    for _ in range(5):
        nums_kept = torch.tensor([int(torch.randint(1, count + 2, ())) for count in counts])
        tokens = torch.randint(vocab_size, (batch_size, longest + 1), dtype=torch.int32)
        tokens = tokens.where(torch.arange(longest + 1) < nums_kept.unsqueeze(-1), -1)
        given = (num_logprobs, metadata, logits, target, bonus, tokens)
        assert len(given) == len(PARAMETERS)
        own, theirs = kept_logprobs(verifier, *given), verifier._get_logprobs_tensors(*given)
        is_kept = (tokens >= 0).flatten()
        for ours, expected in zip(own[:3], theirs[:3], strict=True):
            assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
            torch.testing.assert_close(ours[is_kept], expected[is_kept], rtol=0, atol=1e-6)
