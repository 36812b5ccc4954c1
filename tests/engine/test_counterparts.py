"""The functions that ours take the place of: vLLM's, and vllm-ascend's as of 0.11.0.

tests/data/vllm-ascend-0.11.0 is of the package on PyPI, unchanged (Apache-2.0). Its rejection sampler imports
without an NPU but for one function that vLLM has renamed since, `compute_probs`; its plain sampler but for
two names of what only an NPU has.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rollout_spec import patches
from rollout_spec.verification import coupled, noise, standard

SOURCE = pathlib.Path(__file__).parents[1] / "data" / "vllm-ascend-0.11.0"
MODULE = "vllm_ascend.sample.rejection_sampler"
FUNCTIONS = ("rejection_sample", "expand_batch_to_tokens")
GREEDY = -1.0  # vLLM 0.11's temperature of a greedy row


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The published functions; the module that holds them has been imported with the plugin in force."""
    from vllm.v1.sample import rejection_sampler

    from rollout_spec.vllm import ascend as vllm_ascend_patches

    def compute_probs(logits: torch.Tensor, ends: torch.Tensor, sampling: Any) -> torch.Tensor:
        return rejection_sampler.apply_sampling_constraints(logits, ends, sampling).softmax(dim=-1)

    monkeypatch.setattr(patches, "_applied", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(rejection_sampler, "compute_probs", compute_probs, raising=False)
    # The module puts its own function there.
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    monkeypatch.syspath_prepend(SOURCE)
    vllm_ascend_patches.mend_ascend_sampling.__wrapped__()
    assert not patches.applied(), "nothing is done before vllm-ascend is imported"
    module = importlib.import_module(MODULE)
    originals = {name: getattr(module, name).__rollout_spec_patch__[1] for name in FUNCTIONS}
    yield types.SimpleNamespace(module=module, **originals)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]


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
        self.temperature = torch.tensor([GREEDY] * num_greedy + [1.0] * (len(counts) - num_greedy))

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
        yield Batch([1] * 8, vocab_size, seed, num_greedy)  # which vllm-ascend has a function of its own for


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
        batch.temperature = batch.temperature.clamp(min=0)
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


@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_the_replacement_gives_the_same_tokens(loops: Any, has_draft_probs: bool) -> None:
    """With the same uniform numbers and the same noise, for requests of every length and kind."""
    num_accepted = 0
    for batch in batches():
        draft_probs = batch.draft_probs if has_draft_probs else None
        given = (batch.drafts, batch.counts, max(batch.counts), batch.ends, draft_probs)
        one, other = (
            function(*given, batch.probs.clone(), batch.bonus, batch.metadata())
            for function in (loops.rejection_sample, loops.module.rejection_sample)
        )
        assert torch.equal(one, other)
        num_accepted += int((one >= 0).sum()) - len(batch.counts)
        expanded = [
            function(batch.temperature, batch.ends, sum(batch.counts), replace_from=-1, replace_to=1)
            for function in (loops.expand_batch_to_tokens, loops.module.expand_batch_to_tokens)
        ]
        assert torch.equal(*expanded)
    assert num_accepted > 0


def test_the_published_keywords_are_taken(loops: Any) -> None:
    """With the plugin's two replacements in force, the second of which is of rows with keys."""
    from rollout_spec.vllm.mrv1.sampler import couple_rejection_sample

    batch = Batch([2, 3], 50, 1)
    names = list(inspect.signature(loops.rejection_sample).parameters)
    given = (batch.drafts, batch.counts, 3, batch.ends, None, batch.probs, batch.bonus)
    expected = loops.rejection_sample(*given, batch.metadata())
    for _ in range(2):
        keywords = dict(zip(names, (*given, batch.metadata()), strict=True))
        assert torch.equal(loops.module.rejection_sample(**keywords), expected)
        couple_rejection_sample(loops.module)


def test_the_published_sampler_uses_the_replacement(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([2, 3], 50, 1)
    expected = loops.rejection_sample(
        batch.drafts, batch.counts, 3, batch.ends, None, batch.probs, batch.bonus, batch.metadata()
    )
    for name in ("rejection_random_sample_pytorch", "expand_pytorch", "sample_recovered_tokens_pytorch"):
        monkeypatch.delattr(loops.module, name)
    sampler = loops.module.AscendRejectionSampler.__new__(loops.module.AscendRejectionSampler)
    torch.nn.Module.__init__(sampler)
    metadata = types.SimpleNamespace(
        max_spec_len=3, num_draft_tokens=batch.counts, cu_num_draft_tokens=batch.ends,
        draft_token_ids=batch.drafts,
    )  # fmt: skip
    tokens = sampler(metadata, None, batch.probs.log(), batch.bonus, batch.metadata())
    assert torch.equal(tokens, expected)


def test_the_replacement_is_listed_and_put_in_place_once(loops: Any) -> None:
    from rollout_spec.vllm import ascend as vllm_ascend_patches

    assert [patch.name for patch in patches.applied()] == ["vllm-ascend-rejection-sample"]
    in_place = [getattr(loops.module, name) for name in FUNCTIONS]
    vllm_ascend_patches.replace_loops(loops.module)
    assert [getattr(loops.module, name) for name in FUNCTIONS] == in_place


def test_another_signature_is_refused_and_a_later_version_left_alone(loops: Any) -> None:
    from rollout_spec.vllm import ascend as vllm_ascend_patches

    def changed(draft_token_ids: Any, target_probs: Any, sampling_metadata: Any) -> None: ...

    def later(draft_token_ids: Any, target_logits: Any, sampling_metadata: Any) -> None: ...

    loops.module.rejection_sample = changed
    with pytest.raises(patches.PatchError, match=r"vllm-ascend-rejection-sample.*signature"):
        vllm_ascend_patches.replace_loops(loops.module)
    loops.module.rejection_sample = later
    vllm_ascend_patches.replace_loops(loops.module)
    assert loops.module.rejection_sample is later


def test_rows_with_keys_are_coupled(loops: Any) -> None:
    from rollout_spec.vllm.mrv1.sampler import RowGenerators, couple_rejection_sample

    couple_rejection_sample(loops.module)
    batch = Batch([2, 4, 0, 3], 600, 5, num_greedy=1)
    keys = [noise.make_key(i) for i in range(4)]
    step = coupled.CoupledStep(keys, [7, 8, 9, 10], batch.counts)
    given = (batch.drafts, batch.counts, 4, batch.ends)
    rows = RowGenerators({}, step, batch.counts)
    tokens = loops.module.rejection_sample(*given, None, batch.probs, batch.bonus, batch.metadata(rows))
    expected = coupled.coupled_sample(batch.drafts, 4, batch.probs.log(), batch.bonus, batch.metadata(), step)
    assert torch.equal(tokens, expected)
    plain = loops.module.rejection_sample(*given, None, batch.probs, batch.bonus, batch.metadata())
    assert torch.equal(
        plain, loops.rejection_sample(*given, None, batch.probs, batch.bonus, batch.metadata())
    )


@pytest.fixture
def ascend_sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vllm-ascend's plain sampler, as on its 310P, whose top-k and top-p are of plain torch."""
    utils = types.ModuleType("vllm_ascend.utils")
    utils.is_310p = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    monkeypatch.syspath_prepend(SOURCE)
    sampler = importlib.import_module("vllm_ascend.sample.sampler").AscendSampler()
    # vLLM chooses this one on any platform that it does not know.
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    yield sampler
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (20, None), (None, 0.8), (20, 0.8)])
def test_vllm_ascends_plain_sampler_draws_with_keyed_noise(
    ascend_sampler: Any, monkeypatch: pytest.MonkeyPatch, top_k: int | None, top_p: float | None
) -> None:
    """Sampled rows with keys, greedy ones among them; and as it is where there are no requests: a warm-up."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    from rollout_spec.vllm.keys import KEY, key_of_name
    from rollout_spec.vllm.mrv1.sampler import RowSampling

    monkeypatch.setattr(patches, "_applied", {})
    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sampler.rejection_sample)
    names, positions = ["a", "b", "c", "d", "e"], [9, 4, 7, 9, 30]
    live = {
        name: types.SimpleNamespace(sampling_params=types.SimpleNamespace(extra_args={KEY: name}, seed=None))
        for name in names
    }
    batch = types.SimpleNamespace(
        num_reqs=len(names), req_ids=names, num_tokens_no_spec=np.array(positions), generators={}
    )
    runner = types.SimpleNamespace(
        sampler=ascend_sampler, input_batch=batch, requests=live, device=torch.device("cpu"),
        model_config=types.SimpleNamespace(seed=0),
        parallel_config=types.SimpleNamespace(data_parallel_index=0),
    )  # fmt: skip
    own = ascend_sampler.topk_topp_sampler
    RowSampling(runner, is_coupled=True).install()

    logits = torch.randn(len(names), 700, generator=torch.Generator().manual_seed(2)) * 2
    temperature = torch.tensor([1.0, 0.6, 0.0, 1.0, 0.7])
    k = None if top_k is None else torch.full((len(names),), top_k)
    p = None if top_p is None else torch.full((len(names),), top_p)
    sampling = SamplingMetadata(
        temperature=temperature, all_greedy=False, all_random=False, top_p=p, top_k=k, generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=torch.zeros(5), presence_penalties=torch.zeros(5),
        repetition_penalties=torch.ones(5), output_token_ids=[[]] * 5, allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    output = ascend_sampler(logits=logits.clone(), sampling_metadata=sampling)
    scaled = logits / torch.where(temperature == 0, 1.0, temperature).unsqueeze(-1)
    keys = torch.tensor([key_of_name(name) for name in names])
    expected = coupled.keyed_sample(apply_top_k_top_p(scaled.clone(), k, p), keys, torch.tensor(positions))
    expected[2] = logits[2].argmax()
    assert output.sampled_token_ids.view(-1).tolist() == expected.tolist()

    batch.num_reqs = 0
    torch.manual_seed(3)
    warm_up = ascend_sampler(logits=logits.clone(), sampling_metadata=sampling)
    torch.manual_seed(3)
    drawn = own(scaled.clone(), {}, k, p)[0]
    drawn[2] = logits[2].argmax()
    assert warm_up.sampled_token_ids.view(-1).tolist() == drawn.tolist()


def test_what_coupled_verification_does_not_know_is_refused() -> None:
    """The two later forms of the function: logits with the token ids that were kept, and one not yet seen."""
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
