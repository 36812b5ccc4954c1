"""min_tokens after a draft: vLLM counts the tokens before the draft only."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

from rollout_spec.patches import Patch

MIN_TOKENS = Patch(
    name="vllm-min-tokens-bonus",
    reason="after an accepted draft that reaches min_tokens, vLLM forbids the stop tokens once more: the "
    "bonus token is masked by the number of tokens before the draft",
    upstream="vllm/v1/sample/logits_processor/builtin.py, MinTokensLogitsProcessor.apply",
    until="MinTokensLogitsProcessor counts the draft tokens for the bonus token",
)


def counting_drafts(sampling: Any, num_draft_tokens: list[int]) -> Any:
    """The sampling metadata of a step's bonus tokens, with the draft tokens counted for min_tokens."""
    processors = sampling.logitsprocs.non_argmax_invariant
    if not any(isinstance(p, MinTokensLogitsProcessor) and p.min_toks for p in processors):
        return sampling
    counting = copy.copy(sampling.logitsprocs)
    counting.non_argmax_invariant = [
        _after_drafts(p, num_draft_tokens) if isinstance(p, MinTokensLogitsProcessor) else p
        for p in processors
    ]
    return dataclasses.replace(sampling, logitsprocs=counting)


def _after_drafts(plain: MinTokensLogitsProcessor, num_draft_tokens: list[int]) -> Any:
    """vLLM's processor for the tokens after whole drafts: its `apply` of logits, [batch_size, vocab_size]."""
    counting = copy.copy(plain)
    counting.min_toks = {
        row: (min_tokens - num_draft_tokens[row], *rest)
        for row, (min_tokens, *rest) in plain.min_toks.items()
    }
    # By `min_toks`, where vLLM's own `apply` reads what the batch has prepared.
    return SimpleNamespace(apply=lambda logits: counting.apply_with_spec_decode(logits, [1] * len(logits)))
