"""vllm-ascend's rejection sampling without its loops over requests and positions, where it still has them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from rollout_spec.patches import Patch, replace_function, when_imported
from rollout_spec.verification import standard

MODULE = "vllm_ascend.sample.rejection_sampler"
_LOOPS = Patch(
    name="vllm-ascend-rejection-sample",
    reason="vllm-ascend 0.11 verifies drafts in Python loops over requests and positions, with transfers to "
    "the host in each",
    upstream="vllm_ascend/sample/rejection_sampler.py",
    until="vllm-ascend hands logits on instead of probabilities, as 0.18 does: it has no such loops then",
)
_SIGNATURES = {
    "rejection_sample": "(draft_token_ids: torch.Tensor, num_draft_tokens: list[int], max_spec_len: int, "
    "cu_num_draft_tokens: torch.Tensor, draft_probs: Optional[torch.Tensor], target_probs: torch.Tensor, "
    "bonus_token_ids: torch.Tensor, sampling_metadata: vllm.v1.sample.metadata.SamplingMetadata) "
    "-> torch.Tensor",
    "expand_batch_to_tokens": "(x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, "
    "replace_from: int = 0, replace_to: int = 0) -> torch.Tensor",
}


@functools.cache
def mend_ascend_sampling() -> None:
    """Replace the loops as soon as vllm-ascend's module is imported; where it is not installed, never."""
    when_imported(MODULE, replace_loops)


def replace_loops(module: Any) -> None:
    """Let `standard` stand in for the functions of vllm-ascend 0.11; later ones are left alone.

    Raises:
        PatchError: they are gone, or called in another way than in 0.11.
    """
    from vllm.v1.sample import rejection_sampler

    found = getattr(module, "rejection_sample", None)
    if found is not None and "target_probs" not in inspect.signature(found).parameters:
        return
    # The module puts its own into vLLM's.
    owners = [(module, name) for name in _SIGNATURES] + [(rejection_sampler, "expand_batch_to_tokens")]
    for owner, name in owners:
        replacement = _in_place_of(getattr(owner, name, None), name)
        replace_function(owner, name, replacement, patch=_LOOPS, expected_signature=_SIGNATURES[name])


def _in_place_of(published: Any, name: str) -> Any:
    function = getattr(standard, name)
    signature = inspect.signature(published or function)

    @functools.wraps(published or function)
    def replacement(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if "target_probs" in bound.arguments:  # ours takes logits, in the same place
            bound.arguments["target_probs"] = bound.arguments["target_probs"].log()
        return function(*bound.args)

    return replacement
