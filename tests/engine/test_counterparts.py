"""The functions that ours take the place of: vLLM's."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch

from rollout_spec import patches
from rollout_spec.verification import coupled, standard
from rollout_spec.vllm.upstream import cpu_expand, cpu_rejection

FUNCTIONS = {"rejection_sample": cpu_rejection, "expand_batch_to_tokens": cpu_expand}


def vllms(name: str) -> Any:
    """vLLM's own function, whatever this process has put in its place."""
    from vllm.v1.sample import rejection_sampler

    function = getattr(rejection_sampler, name)
    while hasattr(function, "__rollout_spec_patch__"):
        function = function.__rollout_spec_patch__[1]
    assert function.__module__ == rejection_sampler.__name__
    return function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signatures_are_vllms(name: str) -> None:
    """So that ours can take the place in any call; what only ours takes comes last and may be left out."""
    theirs = list(inspect.signature(vllms(name)).parameters.values())
    ours = list(inspect.signature(getattr(standard, name)).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    assert all(p.default is not p.empty for p in ours[len(theirs) :])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_that_takes_other_arguments_is_not_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other, function = types.ModuleType("other"), lambda draft_token_ids, more: None
    setattr(other, name, function)
    monkeypatch.setattr(FUNCTIONS[name], "is_right", lambda: False)
    with pytest.raises(patches.PatchError, match=f"other.{name} takes draft_token_ids, more"):
        FUNCTIONS[name].mend(other)
    assert getattr(other, name) is function


def test_what_coupled_verification_does_not_know_is_refused() -> None:
    """vllm-ascend's logits with the token ids that were kept, and a form not yet seen."""
    from rollout_spec.vllm.mrv1.sampler import RowGenerators, couple_rejection_sample

    counts = [2, 1]
    drafts, probs = torch.tensor([3, 4, 5], dtype=torch.int32), torch.rand(3, 50).softmax(dim=-1)
    bonus = torch.tensor([[0], [1]], dtype=torch.int32)
    names = list(inspect.signature(standard.rejection_sample).parameters)[:8]

    def module_with(sixth: str) -> types.ModuleType:
        module, scope = types.ModuleType("other"), {}
        arguments = ", ".join([*names[:5], sixth, *names[6:]])
        exec(f"def rejection_sample({arguments}): return None", scope)
        module.rejection_sample = scope["rejection_sample"]
        return module

    rows = RowGenerators({}, coupled.CoupledStep(range(2), range(2), counts), counts)
    metadata = types.SimpleNamespace(
        temperature=torch.ones(2), all_greedy=False, all_random=True, generators=rows, top_k=None, top_p=None
    )
    later = module_with("target_logits_or_tuple")
    couple_rejection_sample(later)
    given = (drafts, counts, 2, torch.tensor(counts).cumsum(0), None)
    tokens = later.rejection_sample(*given, (probs.log(), None), bonus, metadata)
    assert tokens.shape == (2, 3)
    with pytest.raises(RuntimeError, match="enable_reduce_sample"):
        later.rejection_sample(*given, (probs.log(), drafts), bonus, metadata)
    with pytest.raises(patches.PatchError, match=r"vllm-coupled-verification.*other\.rejection_sample"):
        couple_rejection_sample(module_with("target_scores"))
