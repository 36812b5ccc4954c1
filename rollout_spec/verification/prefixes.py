"""From the target's own tokens to the tokens that each request gets; verification ends here.

It runs on the host, in numpy. These arrays are tiny, and on an accelerator each operation on them would be a
launch.
"""

from collections.abc import Callable

import numpy as np
import torch

from rollout_spec.verification.transfers import to_device, to_host

PLACEHOLDER_TOKEN_ID = -1  # vLLM's, where a row has no token


def matching_prefixes(
    own: torch.Tensor,
    draft_token_ids: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    before_wait: Callable[[], None],
) -> torch.Tensor:
    """The target's own tokens, up to and with the first that differs from the draft.

    Args:
        own: int64 [num_tokens], at the draft positions of all requests, one request after the other.
        the others: as in `coupled_verify` and `StepNoise`.

    Returns int32 [batch_size, max_spec_len + 1] where `own` is; PLACEHOLDER_TOKEN_ID after the tokens.
    """
    at_drafts, after, drafts = to_host(own, bonus_token_ids, draft_token_ids, before_wait=before_wait)
    tokens = np.concatenate([at_drafts, after])
    counts, requests = np.array(num_draft_tokens)[:, np.newaxis], np.arange(len(num_draft_tokens))
    is_same = np.zeros(len(tokens), np.bool_)  # False at the bonus: argmin finds each row's first mismatch
    is_same[: len(own)] = at_drafts == drafts
    offsets = np.arange(max_spec_len + 1)
    places = np.where(
        offsets < counts, counts.cumsum(axis=0) - counts + offsets, len(own) + requests[:, np.newaxis]
    )
    num_accepted = is_same[places].argmin(axis=1)
    rows = tokens[places]
    rows[offsets > num_accepted[:, np.newaxis]] = PLACEHOLDER_TOKEN_ID
    return to_device(rows, own.device)
