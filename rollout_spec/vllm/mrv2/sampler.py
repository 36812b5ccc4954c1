"""The noise of vLLM's MRV2, keyed by request and position, and coupled verification with it.

vLLM draws each token with noise that is a function of a request's seed and the position. So coupled
verification is vLLM's own sampler, asked at every position of a draft, with the request's key for its seed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from rollout_spec.patches import Patch, guard_all, record
from rollout_spec.vllm.keys import keys_of
from rollout_spec.vllm.mrv2 import versions

logger = init_logger(f"vllm.{__name__}")

COUPLED = Patch(
    name="vllm-v2-coupled-verification",
    reason="rejection sampling needs noise that a plain step does not, so the same seed gives other tokens "
    "with drafts than without; used by engines with rollout.spec.verify=coupled only",
    upstream="vllm/v1/worker/gpu/spec_decode/rejection_sampler.py, RejectionSampler",
    until="vLLM verifies with the tokens that a plain step would have drawn",
)

_PARAMETERS = (
    (GPUModelRunner, "finish_requests", ("self", "scheduler_output")),
    versions.ADD_REQUEST,
    versions.SAMPLE,
    *versions.VERIFY,
)


def check_sampler() -> None:
    """See that the installed MRV2 samples as this module was written for.

    Raises:
        PatchError: it does not.
    """
    guard_all(COUPLED, _PARAMETERS)


def couple(runner: Any) -> KeyedRequests:
    """Let a runner draw with noise that is a function of the request's key and the position, drafts or not.

    It takes effect when the runner has loaded its model, which makes its samplers.
    """
    load_model, keyed = runner.load_model, KeyedRequests(runner)

    @functools.wraps(load_model)
    def load_and_couple(*args: Any, **kwargs: Any) -> None:
        load_model(*args, **kwargs)
        sampler, verifier = runner.sampler, runner.rejection_sampler
        if sampler is None:
            return  # another pipeline rank samples
        sampler.add_request = functools.partial(keyed.add, sampler.add_request)
        runner.finish_requests = functools.partial(keyed.finish, runner.finish_requests)
        if verifier is not None:
            runner.rejection_sampler = versions.verifying_by(
                verifier, functools.partial(coupled_verify, verifier)
            )
        record(COUPLED)
        logger.info("rollout_spec: each token's random numbers depend only on its request and position")

    runner.load_model = load_and_couple
    return keyed


class KeyedRequests:
    """Gives each request its key for a seed; one that was preempted keeps it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.forget()

    def forget(self) -> None:
        """The next request is the first one."""
        self._keys, self._known = keys_of(self._runner), dict[str, int]()

    def add(self, add_request: Callable[..., None], req_idx: int, *others: Any) -> None:
        *prompt_len, sampling_params = others  # the length before vLLM 0.32
        request_id = self._runner.req_states.index_to_req_id[req_idx]
        if request_id not in self._known:
            self._known[request_id] = self._keys.new_key(sampling_params)
        params = copy.copy(sampling_params)  # the scheduler's own
        params.seed = self._known[request_id]
        add_request(req_idx, *prompt_len, params)

    def finish(self, finish_requests: Callable[..., None], scheduler_output: Any) -> None:
        for request_id in scheduler_output.finished_req_ids:
            self._known.pop(request_id, None)
        finish_requests(scheduler_output)


def coupled_verify(
    verifier: RejectionSampler, given: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of vLLM's verification: what plain steps would draw, as far as the draft is the same.

    Args:
        verifier: vLLM's.
        given: what `RejectionSampler._verify` of vLLM 0.32 is given, by name. Of it, `verify_draft_sampled`
            is int [num_logits], the input token of each of the rows of logits: a request's first is its last
            token, then come its draft tokens; negative ones are never accepted.

    Returns:
        The processed logits; int64 [num_reqs, K + 1], each request's tokens; int32 [num_reqs], how many.
    """
    sampled, processed = versions.sample(verifier.sampler, given)
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
