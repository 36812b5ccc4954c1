"""A model that drafts with vLLM's own proposer of MRV1 (MTP, EAGLE, a draft model). An adapter.

As in `mrv2.speculators`: its tokens are drawn with the noise that the target draws with at their positions,
and are handed to the proposer of the suffix drafts, if the engine has one.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from rollout_spec.drafting.drafts import ModelDrafts, passes_for
from rollout_spec.patches import Patch
from rollout_spec.verification import coupled, noise
from rollout_spec.verification.blocks import argmax
from rollout_spec.verification.transfers import to_device
from rollout_spec.vllm.keys import WHY_SHARED_NOISE
from rollout_spec.vllm.mrv1.sampler import RowSampling
from rollout_spec.vllm.proposer import SuffixProposer

SHARED_NOISE = Patch(
    name="vllm-shared-noise",
    reason=WHY_SHARED_NOISE,
    upstream="vllm/v1/spec_decode/llm_base_proposer.py, SpecDecodeBaseProposer._sample_draft_tokens",
    until="vLLM verifies with the tokens that a plain step would have drawn",
)


class ModelPasses:
    """A model's passes in a step. Each draws a token for every row's draft, with the noise of the target.

    proposer: of the suffix drafts, if the model drafts beside it.
    num_model_tokens: how many it drafts for every row in this step; 0: its first pass drafts nothing.
    """

    def __init__(self, sampling: RowSampling, proposer: SuffixProposer | None) -> None:
        self._sampling, self.proposer = sampling, proposer
        self._most = self.num_model_tokens = 0 if proposer is None else proposer.most_model_tokens
        self._drafted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forget(self) -> None:
        """A step begins, and nothing is drafted yet."""
        self._drafted = []

    def plan(self, num_model_tokens: int | None) -> None:
        """Draft so many tokens in this step; None: as many as it can."""
        self.num_model_tokens = self._most if num_model_tokens is None else num_model_tokens

    def begin(self, sampled_token_ids: torch.Tensor) -> None:
        """The step has sampled int [num_rows, K + 1], -1 for nothing, which the runner does not know yet."""
        of_step, nums_sampled = self._sampling.step_noise, (sampled_token_ids >= 0).sum(1)
        self._keys, positions = to_device(np.stack([of_step.keys, of_step.positions]), nums_sampled.device)
        self._positions = positions + nums_sampled
        self._drafted = []

    def draw(self, logits: torch.Tensor, metadata: Any) -> torch.Tensor:
        """The tokens of one pass, int64 [num_rows], of logits float32 [num_rows, vocab_size]."""
        tokens = argmax(logits)
        if not metadata.all_greedy:
            is_sampled = metadata.temperature > 0
            scaled = logits / torch.where(is_sampled, metadata.temperature, 1.0).unsqueeze(1)
            seeds = noise.seeds_at(self._keys, self._positions + len(self._drafted))
            num = coupled.num_noise_values(logits.shape[1])
            noise_values = noise.exponential(seeds, num, logits.device)
            tokens = torch.where(is_sampled, coupled.race(scaled, noise_values), tokens)
        self._drafted.append((tokens, coupled.log_odds(logits, tokens)))
        return tokens

    def on_host(self) -> ModelDrafts | None:
        """All that the model has drafted, for the proposer; waits for the device. None: nothing was."""
        assert self.proposer is not None
        if not self._drafted or not self.proposer.is_used:
            return None
        tokens, log_odds = (torch.stack(each, 1).cpu().numpy() for each in zip(*self._drafted, strict=True))
        return ModelDrafts(tokens.astype(np.int32), log_odds.astype(np.float32))


# Before SpecDecodeBaseProposer, 1: _sample_draft_tokens
class SharedNoiseModel(SpecDecodeBaseProposer):
    """A model that draws its drafts with the target's noise."""

    passes: ModelPasses

    def _sample_draft_tokens(self, hidden_states: torch.Tensor, sampling_metadata: Any) -> Any:
        """Once a pass: int64 [num_rows], and no distribution."""
        # A head with a vocabulary of its own has logits of the target's here, -inf where it has no token.
        logits = self.model.compute_logits(hidden_states).float()
        return self.passes.draw(logits, sampling_metadata), None


# Before SpecDecodeBaseProposer, 1: propose
class ModelBesideDrafter(SharedNoiseModel):
    """A model that drafts beside a `SuffixProposer`.

    The first pass is that of every step, which keeps the model's KV cache complete. The others are left out
    while the gate is closed, and where they do not pay: the scheduler tells all ranks.
    """

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        proposer, num_tokens = self.passes.proposer, self.passes.num_model_tokens
        assert proposer is not None
        drafts = super().propose(num_tokens, *args, **kwargs)
        proposer.note_passes(passes_for(num_tokens))
        return drafts
