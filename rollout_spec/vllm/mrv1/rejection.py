"""Verification with our noise, in the place of a module's `rejection_sample`."""

import inspect
import sys
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

from rollout_spec.patches import Patch, misfit, wrap
from rollout_spec.verification import coupled
from rollout_spec.vllm.ascend import REJECTION_SAMPLER
from rollout_spec.vllm.both_runners import WHY_COUPLED
from rollout_spec.vllm.mrv1.row_generators import RowGenerators

COUPLED = Patch(
    name="vllm-coupled-verification",
    reason=WHY_COUPLED,
    upstream="vllm/v1/sample/rejection_sampler.py, rejection_sample",
    until="vLLM's noise is a function of the request and the position",
)
# Of `rejection_sample`. The target's logits have one name with vLLM, and another with vllm-ascend.
_ARGUMENTS = (
    "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs",
    "target_logits", "bonus_token_ids", "sampling_metadata",
)  # fmt: skip
_TARGETS = ("target_logits", "target_logits_or_tuple")


def couple_rejection_sample(module: Any) -> None:
    """Let a module's `rejection_sample` be coupled verification in steps whose rows have keys.

    Raises PatchError: it takes other arguments than vLLM's or vllm-ascend's that are known here.
    """
    target, signature = checked_target(module), inspect.signature(module.rejection_sample)

    @wrap(module, "rejection_sample", COUPLED)
    def rejection_sample(reject: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        metadata, logits = given["sampling_metadata"], given[target]
        if not isinstance(metadata.generators, RowGenerators):  # another engine's
            return reject(*args, **kwargs)
        if isinstance(logits, tuple):  # vllm-ascend's; of all tokens, as `ascend.PARTIAL_LOGITS` sees to
            logits, _ = logits
        is_sampled = not metadata.all_greedy and (metadata.all_random or metadata.temperature > 0)
        return coupled.coupled_verify(
            given["draft_token_ids"], given["max_spec_len"], logits, given["bonus_token_ids"], is_sampled,
            metadata.generators.step_noise,
        )  # fmt: skip


def checked_target(module: Any) -> str:
    """The name of the argument in which a module's `rejection_sample` takes the target's logits."""
    names = tuple(inspect.signature(module.rejection_sample).parameters)[: len(_ARGUMENTS)]
    for target in _TARGETS:
        if names == tuple(target if name == "target_logits" else name for name in _ARGUMENTS):
            return target
    raise misfit(COUPLED, f"{module.__name__}.rejection_sample takes {', '.join(names)}")


def rejection_samplers() -> list[Any]:
    """The modules whose `rejection_sample` is called: vLLM's, and vllm-ascend's sampler calls its own."""
    theirs = sys.modules.get(REJECTION_SAMPLER)
    return [rejection_sampler] if theirs is None else [rejection_sampler, theirs]


def platforms_rejection_sampler() -> Any:
    """Of these modules the one that an engine of this process uses."""
    return rejection_samplers()[-1]
