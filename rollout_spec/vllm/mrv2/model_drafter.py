"""A model that drafts with vLLM's own speculator of MRV2 (MTP, EAGLE, a draft model). An adapter.

Its tokens are drawn with the noise that the target draws with at their positions. So they are accepted as
often as two distributions that share their noise agree, which is near the most that is possible.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from rollout_spec.patches import Patch, guard_all, record
from rollout_spec.verification import coupled
from rollout_spec.vllm.mrv2 import versions
from rollout_spec.vllm.mrv2.host_drafts import HostDrafts
from rollout_spec.vllm.options import num_model_tokens

SHARED_NOISE = Patch(
    name="vllm-v2-shared-noise",
    reason="vLLM drafts the likeliest tokens, or draws with noise of their own: both are less often accepted "
    "than tokens drawn with the target's noise, which coupled verification allows; used by engines with "
    "rollout.spec.verify=coupled and a model drafter only",
    upstream="vllm/v1/worker/gpu/spec_decode/speculator.py, DraftModelSpeculator.sample_draft",
    until="vLLM verifies with the tokens that a plain step would have drawn",
)
_PROPOSE = (
    "self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states",
    "num_sampled",
)  # fmt: skip
_NUM_SAMPLED = _PROPOSE.index("num_sampled") - 2  # of what comes after the input batch


def check_speculator() -> None:
    """See that the installed vLLM's speculators draft as this module was written for.

    Raises:
        PatchError: they do not.
    """
    guard_all(SHARED_NOISE, ((DraftModelSpeculator, "propose", _PROPOSE), *versions.SAMPLE_DRAFT))


def for_the_model(vllm_config: VllmConfig) -> VllmConfig:
    """A configuration for vLLM's speculator, which drafts fewer tokens than a row may have."""
    its_own = copy.copy(vllm_config)
    its_own.speculative_config = speculative = copy.copy(vllm_config.speculative_config)
    speculative.num_speculative_tokens = num_model_tokens(vllm_config)
    speculative.draft_sample_method = "greedy"  # so that it keeps no logits, which nobody reads
    return its_own


def share_noise(speculator: DraftModelSpeculator, log_odds: torch.Tensor | None = None) -> None:
    """Let a speculator draw with the target's noise; once in its life, before its graphs are captured.

    Args:
        speculator: vLLM's.
        log_odds: float32 [max_num_reqs, m], gets ln(p / (1 - p)) of every token that is drawn, where p is its
            probability by the model itself, at temperature 1.
    """
    check_speculator()

    def sample_draft(hidden_states: torch.Tensor, *given: Any) -> torch.Tensor:
        positions, idx_mapping, temperature, seeds, draft_step, *_ = given
        # A head with a vocabulary of its own has logits of the target's here, -inf where it has no token.
        logits = speculator.model.compute_logits(hidden_states)
        tokens = versions.draw_as_target(speculator, logits, positions, idx_mapping, temperature, seeds)
        if log_odds is not None:
            log_odds[: len(tokens)].index_copy_(
                1, draft_step.view(1), coupled.log_odds(logits, tokens).unsqueeze(1)
            )
        return tokens

    speculator.sample_draft = sample_draft
    record(SHARED_NOISE)


def draft_beside(speculator: DraftModelSpeculator, host: HostDrafts) -> None:
    """Hand a speculator's drafts to the host; once in its life.

    Its first pass is that of every step, which keeps its KV cache complete. The others are left out where
    the next step is to have no drafts, or they do not pay: the scheduler tells all ranks, which must run the
    same.
    """
    num_tokens, propose = speculator.num_speculative_steps, speculator.propose
    log_odds = torch.zeros(speculator.max_num_reqs, num_tokens, device=speculator.device)
    share_noise(speculator, log_odds)
    versions.draft_pass_by_pass(speculator)

    def propose_and_take(input_batch: Any, *given: Any, dummy_run: bool = False, **others: Any) -> Any:
        others.pop("num_speculative_tokens", None)  # the engine's
        if dummy_run:
            return propose(input_batch, *given, dummy_run=True, **others)
        num = max(1, host.model_tokens) if host.has_room else 1
        speculator.num_speculative_steps, begin = num, time.perf_counter()
        try:
            drafts = propose(input_batch, *given, **others)
        finally:
            speculator.num_speculative_steps = num_tokens
        host.proposer.note_passes(num, num_tokens - num, time.perf_counter() - begin)
        taken = (drafts[:, :num], log_odds[: len(drafts), :num]) if host.has_room else ()
        return host.draft(input_batch, given[_NUM_SAMPLED], taken)

    speculator.propose = propose_and_take
    _capture_for_plain_steps(speculator)


def _capture_for_plain_steps(speculator: DraftModelSpeculator) -> None:
    """Its first pass has graphs for the steps for which the target has: see `cuda_graphs`."""
    init_cudagraph_manager = speculator.init_cudagraph_manager

    def init_for_plain_steps(cudagraph_mode: Any) -> None:
        num_tokens, speculator.num_speculative_steps = speculator.num_speculative_steps, 0
        try:
            init_cudagraph_manager(cudagraph_mode)
        finally:
            speculator.num_speculative_steps = num_tokens

    speculator.init_cudagraph_manager = init_for_plain_steps
