"""The speculators of vLLM's MRV2 in an engine with our drafter: ours, and vLLM's own beside it. Adapters.

A model that drafts (MTP, EAGLE, a draft model) draws its tokens with the noise that the target draws with at
their positions. So they are accepted as often as two distributions that share their noise agree, which is
near the most that is possible.
"""

import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator

from rollout_spec.drafting.drafts import passes_for
from rollout_spec.patches import Patch, guard_all, guard_class, put_before, record, temporarily
from rollout_spec.verification import coupled
from rollout_spec.vllm.both_runners import WHY_SHARED_NOISE
from rollout_spec.vllm.mrv2 import signatures
from rollout_spec.vllm.mrv2.host_drafts import HostDrafts
from rollout_spec.vllm.options import engine_options

SHARED_NOISE = Patch(
    name="vllm-mrv2-shared-noise",
    reason=WHY_SHARED_NOISE,
    upstream="vllm/v1/worker/gpu/spec_decode/speculator.py, DraftModelSpeculator.sample_draft",
    until="vLLM verifies with the tokens that a plain step would have drawn",
)

PASS_BY_PASS = Patch(
    name="vllm-mrv2-pass-by-pass",
    reason="from 0.29 on vLLM takes all passes of a model after the first in one CUDA graph, which could "
    "leave none out",
    upstream="vllm/v1/worker/gpu/spec_decode/autoregressive/speculator.py",
    until="vLLM takes as many passes as it is told in each step",
)
# Methods of a speculator (vLLM 0.29, 0.32) that choose such a graph.
_FUSES = ("_configure_fused_multi_step_decode", "_configure_decode_metadata_update")


def check_speculator() -> None:
    """Raise a PatchError if the installed vLLM's speculators draft in another way."""
    guard_class(SHARED_NOISE, ModelBesideDrafter, DraftModelSpeculator)
    guard_all(SHARED_NOISE, signatures.OF_SPECULATOR)


def for_the_model(vllm_config: VllmConfig) -> VllmConfig:
    """A configuration for vLLM's speculator, which drafts fewer tokens than a row may have."""
    its_own = copy.copy(vllm_config)
    its_own.speculative_config = speculative = copy.copy(vllm_config.speculative_config)
    options = engine_options(vllm_config)
    assert options is not None
    speculative.num_speculative_tokens = options.most_model_tokens
    speculative.draft_sample_method = "greedy"  # so that it keeps no logits, which nobody reads
    return its_own


def send_drafts_to_host(speculator: DraftModelSpeculator, host: HostDrafts) -> None:
    """Let a model draft with the target's noise, pass by pass, and hand its drafts to the host."""
    check_speculator()
    for name in (each for each in _FUSES if hasattr(speculator, each)):
        setattr(speculator, name, lambda: None)
        record(PASS_BY_PASS)
    num_rows, most = speculator.max_num_reqs, speculator.num_speculative_steps
    log_odds = torch.zeros(num_rows, most, device=speculator.device)
    put_before(ModelBesideDrafter, speculator, SHARED_NOISE, host=host, log_odds=log_odds)


class SuffixSpeculator(BaseSpeculator):
    """A speculator whose drafts are those of `BatchProposer`."""

    host: HostDrafts  # given to it when the runner is there
    supports_mm_inputs = False
    draft_logits = None

    def __init__(self) -> None:
        self.model = torch.nn.Module()  # of no layer: vLLM 0.24 prepares the communication of a speculator's

    def capture(self, *_: Any, **__: Any) -> None:
        """There is no model to capture."""

    init_cudagraph_manager = capture

    @torch.inference_mode()
    def propose(self, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
        return self.host.no_drafts(input_batch)


# Before DraftModelSpeculator: sample_draft
class SharedNoiseModel(DraftModelSpeculator):
    """A model that draws its drafts with the target's noise."""

    # float32 [max_num_reqs, m], gets ln(p / (1 - p)) of every token that is drawn, where p is its probability
    # by the model itself, at temperature 1; None: nobody asks.
    log_odds: torch.Tensor | None = None

    def sample_draft(self, hidden_states: torch.Tensor, *given: Any) -> torch.Tensor:
        positions, idx_mapping, temperature, seeds, draft_step, *_ = given
        # A head with a vocabulary of its own has logits of the target's here, -inf where it has no token.
        logits = self.model.compute_logits(hidden_states)
        # vLLM 0.24 gives the position of the input token, and has no other noise for drafts.
        where = {"pos": positions, "is_drafting": False} if signatures.HAS_SALT else {"pos": positions + 1}
        tokens = gumbel.gumbel_sample(
            logits, idx_mapping, temperature, seeds, apply_temperature=True,
            use_fp64=self.use_fp64_gumbel, **where,
        )  # fmt: skip
        if self.log_odds is not None:
            self.log_odds[: len(tokens)].index_copy_(
                1, draft_step.view(1), coupled.log_odds(logits, tokens).unsqueeze(1)
            )
        return tokens


# Before DraftModelSpeculator: init_cudagraph_manager, propose
class ModelBesideDrafter(SharedNoiseModel):
    """A model that drafts beside `BatchProposer`, which has the last word.

    Its first pass is that of every step, which keeps its KV cache complete. The others are left out where
    the next step is to have no drafts, or they do not pay: the scheduler tells all ranks, which must run the
    same.
    """

    host: HostDrafts  # gets its drafts

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        # Its first pass has graphs for the steps for which the target has: see `graphs`.
        with temporarily(self, "num_speculative_steps", 0):
            super().init_cudagraph_manager(cudagraph_mode)
        manager = getattr(self, "prefill_cudagraph_manager", None)
        if manager is not None:  # by one token a row vLLM 0.32 knows the manager of the other passes
            manager.decode_query_len = self.num_speculative_steps + 1

    def propose(self, input_batch: Any, *given: Any, dummy_run: bool = False, **more: Any) -> torch.Tensor:
        more.pop("num_speculative_tokens", None)  # the engine's
        if dummy_run:
            return super().propose(input_batch, *given, dummy_run=True, **more)
        num = passes_for(self.host.step.num_model_tokens)
        with temporarily(self, "num_speculative_steps", num):  # vLLM's own reads here how many it drafts
            drafts = super().propose(input_batch, *given, **more)
        self.host.proposer.note_passes(num)
        assert self.log_odds is not None
        self.host.take_model_drafts(drafts[:, :num], self.log_odds[: len(drafts), :num])
        return self.host.no_drafts(input_batch)
