"""The noise of vLLM's MRV2, keyed by request and position, and coupled verification with it.

vLLM draws each token with noise that is a function of a request's seed and the position. So coupled
verification is vLLM's own sampler, asked at every position of a draft, with the request's key for its seed.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from rollout_spec.patches import Patch, guard_all, guard_class, put_before
from rollout_spec.vllm.both_runners import WHY_COUPLED
from rollout_spec.vllm.keys import RequestKeys
from rollout_spec.vllm.mrv2 import sampler_24, signatures

logger = init_logger(f"vllm.{__name__}")

COUPLED = Patch(
    name="vllm-mrv2-coupled-verification",
    reason=WHY_COUPLED,
    upstream="vllm/v1/worker/gpu/spec_decode/rejection_sampler.py, RejectionSampler",
    until="vLLM verifies with the tokens that a plain step would have drawn",
)


def check_sampler() -> None:
    """Raise a PatchError if the installed MRV2 samples in another way."""
    guard_class(COUPLED, KeyedSampler, Sampler)
    guard_class(COUPLED, _VERIFIER, RejectionSampler)
    guard_all(COUPLED, signatures.OF_SAMPLER)


def couple(sampler: Sampler, verifier: RejectionSampler | None, keys: RequestKeys) -> None:
    """Let a runner's sampler, and what verifies with it, draw with the requests' keys."""
    put_before(KeyedSampler, sampler, COUPLED, keys=keys)
    if verifier is not None:
        put_before(_VERIFIER, verifier, COUPLED)
    logger.info("rollout_spec: each token's random numbers depend only on its request and position")


# Before Sampler: add_request
class KeyedSampler(Sampler):
    """It draws a request's tokens with the request's key for a seed; one that was preempted keeps it."""

    keys: RequestKeys

    def add_request(self, req_idx: int, *others: Any) -> None:
        *prompt_len, params = others  # the length before vLLM 0.32
        request_id = self.req_states.index_to_req_id.get(req_idx)
        if request_id is not None:  # else a row that 0.33 warms up with
            params = copy.copy(params)  # the scheduler's own
            params.seed = self.keys.of(request_id, params)
        super().add_request(req_idx, *prompt_len, params)


# Before RejectionSampler: _verify
class CoupledVerifier(RejectionSampler):
    """It verifies with the tokens that plain steps would draw."""

    def _verify(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given = dict(zip(signatures.VERIFY_NAMES, values, strict=True))
        # Before 0.32 nothing tells the placeholders of a padded request from drafts. They are tokens that the
        # row had before, and the model has read them: one that is right may stay.
        return verify_by_sampling(self, {"verify_draft_sampled": given["draft_sampled"], **given})


# Before RejectionSampler: __call__
class CoupledVerifier24(RejectionSampler):
    """The same on vLLM 0.24."""

    def __call__(self, logits: Any, input_batch: Any, draft_logits: Any = None) -> SamplerOutput:
        return sampler_24.verify_in_pieces(self, verify_by_sampling, logits, input_batch)


_VERIFIER = CoupledVerifier if signatures.HAS_VERIFY else CoupledVerifier24


def verify_by_sampling(
    verifier: RejectionSampler, given: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of vLLM's verification: what plain steps would draw, as far as the draft is the same.

    given: what `RejectionSampler._verify` of vLLM 0.32 is given, by name. Its `verify_draft_sampled` is int
        [num_logits], the input token of each row of logits: a request's last token, then its draft tokens;
        negative ones are never accepted.

    Returns the processed logits; int64 [num_reqs, K + 1], each request's tokens; int32 [num_reqs], how many.
    """
    sampled, processed = signatures.sample(verifier.sampler, given)
    numbers = torch.arange(len(sampled), device=sampled.device)
    rows = torch.searchsorted(given["cu_num_logits"][1:], numbers, right=True)
    places = given["expanded_local_pos"].long()
    tokens = sampled.new_zeros(len(given["idx_mapping"]), verifier.num_speculative_steps + 1)
    drafts = torch.full_like(tokens, -1)
    tokens[rows, places] = sampled
    drafts[rows, places] = given["verify_draft_sampled"].to(drafts.dtype)
    is_right = tokens[:, :-1] == drafts[:, 1:]
    num_sampled = 1 + is_right.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)
    return processed, tokens, num_sampled
