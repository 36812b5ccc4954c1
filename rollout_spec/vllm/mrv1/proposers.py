"""A model that drafts with vLLM's own proposer of MRV1 (MTP, EAGLE, a draft model). An adapter.

As in `mrv2.speculators`: its tokens are drawn with the noise that the target draws with at their positions,
and are handed to the proposer of the suffix drafts, if the engine has one.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from rollout_spec.drafting.drafts import ModelDrafts
from rollout_spec.patches import Patch
from rollout_spec.verification import coupled, noise
from rollout_spec.verification.blocks import argmax
from rollout_spec.verification.transfers import to_device
from rollout_spec.vllm.both_runners import WHY_SHARED_NOISE
from rollout_spec.vllm.mrv1.sampler import RowSampling

SHARED_NOISE = Patch(
    name="vllm-shared-noise",
    reason=WHY_SHARED_NOISE,
    upstream="vllm/v1/spec_decode/llm_base_proposer.py, SpecDecodeBaseProposer._sample_draft_tokens",
    until="vLLM verifies with the tokens that a plain step would have drawn",
)


class ModelPasses:
    """A model's passes in one step. Each draws a token for every row's draft, with the noise of the target.

    A runner makes them before it asks its model, which draws, and beside our drafter takes what was drawn
    once the step's tokens are on the host. The next `sample_tokens` begins without them.

    sampled: int [num_rows, K + 1], -1 for nothing; the runner's batch does not have them yet.
    num_model_tokens: that the model drafts for every row beside our drafter; 0: the first pass drafts
        nothing. Alone it drafts as many as vLLM asks for.
    """

    def __init__(self, sampling: RowSampling, sampled: torch.Tensor, num_model_tokens: int = 0) -> None:
        self.num_model_tokens = num_model_tokens
        nums_sampled = (sampled >= 0).sum(1)
        rows = sampling.keys_and_positions(len(sampled))
        self._keys, first = to_device(np.array(rows, np.int64), nums_sampled.device)
        self._positions = first + nums_sampled
        self._drafted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def draw(self, logits: torch.Tensor, metadata: Any) -> torch.Tensor:
        """The tokens of one pass, int64 [num_rows], of logits float32 [num_rows, vocab_size]."""
        tokens = argmax(logits)
        if not metadata.all_greedy:
            is_sampled = metadata.temperature > 0
            scaled = logits / torch.where(is_sampled, metadata.temperature, 1.0).unsqueeze(1)
            seeds = noise.seeds_at(self._keys, self._positions + len(self._drafted))
            drawn = coupled.race(scaled, coupled.race_noise(seeds, logits))
            tokens = torch.where(is_sampled, drawn, tokens)
        self._drafted.append((tokens, coupled.log_odds(logits, tokens)))
        return tokens

    def on_host(self) -> ModelDrafts | None:
        """All that the model has drafted; waits for the device. None: nothing."""
        if not self._drafted:
            return None
        tokens, log_odds = (torch.stack(each, 1).cpu().numpy() for each in zip(*self._drafted, strict=True))
        return ModelDrafts(tokens.astype(np.int32), log_odds.astype(np.float32))


# Before SpecDecodeBaseProposer: _sample_draft_tokens
class SharedNoiseModel(SpecDecodeBaseProposer):
    """A model that draws its drafts with the target's noise."""

    passes: ModelPasses | None = None  # of the step that runs; None: it has none yet

    def _sample_draft_tokens(self, hidden_states: torch.Tensor, sampling_metadata: Any) -> Any:
        """Once a pass: int64 [num_rows], and no distribution."""
        assert self.passes is not None
        # A head with a vocabulary of its own has logits of the target's here, -inf where it has no token.
        logits = self.model.compute_logits(hidden_states).float()
        return self.passes.draw(logits, sampling_metadata), None


# Before SpecDecodeBaseProposer: propose
class ModelBesideDrafter(SharedNoiseModel):
    """A model that drafts beside a `BatchProposer`.

    The first pass is that of every step, which keeps the model's KV cache complete. The others are left out
    while the gate is closed, and where they do not pay: the scheduler tells all ranks.
    """

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.passes is not None
        return super().propose(self.passes.num_model_tokens, *args, **kwargs)
