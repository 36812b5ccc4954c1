"""Log-probabilities of the tokens that a verification keeps, in place of vLLM's of all that it could keep."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.rejection_sampler import RejectionSampler

from rollout_spec.patches import Patch
from rollout_spec.verification.prefixes import PLACEHOLDER_TOKEN_ID

KEPT_LOGPROBS = Patch(
    name="vllm-kept-logprobs",
    reason="with logprobs, vLLM pads a verification's logits to batch size x (longest draft + 1) rows and "
    "takes the logarithms of all: most of its time and memory, and mostly for tokens that were rejected",
    upstream="vllm/v1/sample/rejection_sampler.py, RejectionSampler._get_logprobs_tensors",
    until="vLLM gathers the rows of the tokens that are kept",
)
PARAMETERS = (
    "max_num_logprobs", "metadata", "logits", "target_logits", "bonus_logits", "sampled_token_ids",
)  # fmt: skip


def kept_logprobs(
    verifier: RejectionSampler,
    max_num_logprobs: int,
    metadata: Any,
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    bonus_logits: torch.Tensor,
    sampled_token_ids: torch.Tensor,
) -> LogprobsTensors:
    """vLLM's `RejectionSampler._get_logprobs_tensors`; zeros where no token is.

    Args:
        metadata: vLLM's SpecDecodeMetadata; `cu_num_draft_tokens`, int32 [batch_size], is read.
        logits: not used.
        target_logits: [num_tokens, vocab_size], at the draft positions.
        bonus_logits: [batch_size, vocab_size], behind the drafts.
        sampled_token_ids: int32 [batch_size, longest draft + 1], -1 behind the tokens that are kept.

    Returns:
        A row for each place of `sampled_token_ids`.

    Memory: two temporaries of as many rows of logits as tokens are kept.
    """
    requests, columns = (sampled_token_ids != PLACEHOLDER_TOKEN_ID).nonzero().unbind(-1)
    ends = metadata.cu_num_draft_tokens.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    at = starts[requests] + columns
    is_draft = at < ends[requests]
    drafted, behind = is_draft.nonzero().squeeze(-1), is_draft.logical_not().nonzero().squeeze(-1)
    kept = torch.cat([target_logits[at[drafted]].float(), bonus_logits[requests[behind]].float()])
    if not verifier.is_logits_logprobs_mode:
        kept = verifier.sampler.compute_logprobs(kept)
    places = (requests * sampled_token_ids.shape[1] + columns)[torch.cat([drafted, behind])]
    tokens = sampled_token_ids.flatten()[places].long()
    found = verifier.sampler.gather_logprobs(kept, max_num_logprobs, tokens)
    num_places = sampled_token_ids.numel()
    return LogprobsTensors(
        *(
            part.new_zeros(num_places, *part.shape[1:]).index_copy_(0, places, part)
            for part in (found.logprob_token_ids, found.logprobs, found.selected_token_ranks)
        )
    )
