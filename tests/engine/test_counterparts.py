"""The functions of vLLM's that ours take the place of, or wrap."""

import inspect
import types

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from rollout_spec import patches
from rollout_spec.verification import coupled
from rollout_spec.vllm.mrv1 import rejection, row_generators
from rollout_spec.vllm.upstream import cpu_expand

NAME = "expand_batch_to_tokens"


def test_one_that_takes_other_arguments_is_not_replaced():
    other, function = types.ModuleType("other"), lambda draft_token_ids, more: None
    setattr(other, NAME, function)
    with pytest.raises(patches.PatchError, match=f"other.{NAME} takes draft_token_ids, more"):
        cpu_expand.fix(other)
    assert getattr(other, NAME) is function


def test_what_coupled_verification_does_not_know_is_refused():
    """vllm-ascend's logits with the token ids that were kept, and a form not yet seen."""
    counts = [2, 1]
    drafts, probs = torch.tensor([3, 4, 5], dtype=torch.int32), torch.rand(3, 50).softmax(dim=-1)
    bonus = torch.tensor([[0], [1]], dtype=torch.int32)
    names = list(inspect.signature(rejection_sampler.rejection_sample).parameters)[:8]

    def module_with(sixth):
        module, scope = types.ModuleType("other"), {}
        arguments = ", ".join([*names[:5], sixth, *names[6:]])
        exec(f"def rejection_sample({arguments}): return None", scope)
        module.rejection_sample = scope["rejection_sample"]
        return module

    rows = row_generators.RowGenerators(coupled.StepNoise(range(2), range(2), counts))
    metadata = types.SimpleNamespace(
        temperature=torch.ones(2), all_greedy=False, all_random=True, generators=rows, top_k=None, top_p=None
    )
    later = module_with("target_logits_or_tuple")
    rejection.couple_rejection_sample(later)
    given = (drafts, counts, 2, torch.tensor(counts).cumsum(0), None)
    assert later.rejection_sample(*given, (probs.log(), None), bonus, metadata).shape == (2, 3)
    with pytest.raises(patches.PatchError, match=r"vllm-coupled-verification.*other\.rejection_sample"):
        rejection.couple_rejection_sample(module_with("target_scores"))
