"""Log-probabilities of the tokens that a verification keeps, in place of vLLM's of all that it could keep."""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.rejection_sampler import RejectionSampler

from rollout_spec.patches import Patch
from rollout_spec.verification.prefixes import PLACEHOLDER_TOKEN_ID
from rollout_spec.verification.transfers import to_device

KEPT_LOGPROBS = Patch(
    name="vllm-kept-logprobs",
    reason="with logprobs, vLLM pads a verification's logits to batch size x (longest draft + 1) rows and "
    "takes the logarithms of all: most of its time and memory, and mostly for tokens that were rejected",
    upstream="vllm/v1/sample/rejection_sampler.py, RejectionSampler._get_logprobs_tensors",
    until="vLLM gathers the rows of the tokens that are kept",
)


# Before RejectionSampler, 2: _get_logprobs_tensors
class KeptVerifier(RejectionSampler):
    """It takes the logarithms of the tokens that are kept."""

    def _get_logprobs_tensors(
        self, max_num_logprobs: int, metadata: Any, logits: torch.Tensor, target_logits: torch.Tensor,
        bonus_logits: torch.Tensor, sampled_token_ids: torch.Tensor,
    ) -> LogprobsTensors:  # fmt: skip
        """A row for each place of `sampled_token_ids`; zeros where no token is.

        target_logits, bonus_logits: a row for each draft position, and for each request after its draft.
        sampled_token_ids: int32 [batch_size, longest draft + 1], -1 after the tokens that are kept.

        Memory: two temporaries of as many rows of logits as tokens are kept.
        """
        rows = sampled_token_ids.cpu().numpy()  # the one wait: on the device, each `nonzero` would be another
        requests, columns = (rows != PLACEHOLDER_TOKEN_ID).nonzero()
        counts = np.array(metadata.num_draft_tokens)
        is_draft = columns < counts[requests]
        at = (counts.cumsum() - counts)[requests] + columns
        order = np.argsort(~is_draft, kind="stable")  # of drafts, then of what comes after them
        places, tokens = (requests * rows.shape[1] + columns)[order], rows[requests, columns][order]
        arrays = at[is_draft], requests[~is_draft], places, tokens
        together = to_device(np.concatenate(arrays, dtype=np.int64), target_logits.device)  # in one copy
        drafted, after, places, tokens = together.split([len(array) for array in arrays])
        kept = torch.cat([target_logits[drafted].float(), bonus_logits[after].float()])
        if not self.is_logits_logprobs_mode:
            kept = self.sampler.compute_logprobs(kept)
        found = self.sampler.gather_logprobs(kept, max_num_logprobs, tokens)
        parts = found.logprob_token_ids, found.logprobs, found.selected_token_ranks
        placed = [each.new_zeros(rows.size, *each.shape[1:]).index_put_((places,), each) for each in parts]
        return LogprobsTensors(*placed)
