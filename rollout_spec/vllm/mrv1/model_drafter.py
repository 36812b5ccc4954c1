"""A model that drafts with vLLM's own proposer of MRV1 (MTP, EAGLE, a draft model). An adapter.

As `model_drafter` on MRV2: its tokens are drawn with the noise that the target draws with at their positions,
and are handed to the proposer of the suffix drafts, if the engine has one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rollout_spec.drafting.index import ModelDrafts
from rollout_spec.patches import guard_all, record
from rollout_spec.verification import coupled, noise
from rollout_spec.verification.blocks import argmax
from rollout_spec.vllm.mrv1.sampler import SHARED_NOISE, RowSampling
from rollout_spec.vllm.options import drafts_with_model, num_model_tokens
from rollout_spec.vllm.proposer import BESIDE_MODEL, SuffixProposer
from rollout_spec.vllm.scheduler import MODEL_TOKENS_KEY

_PARAMETERS = (
    (SpecDecodeBaseProposer, "_sample_draft_tokens", ("self", "hidden_states", "sampling_metadata")),
    (SpecDecodeBaseProposer, "propose", ("self", "num_speculative_tokens")),
    (GPUModelRunner, "propose_draft_token_ids", ("self", "scheduler_output", "sampled_token_ids")),
    (GPUModelRunner, "sample_tokens", ("self", "grammar_output")),
    (GPUModelRunner, "take_draft_token_ids", ("self",)),
)


def check_drafter() -> None:
    """Raise a PatchError if the installed vLLM's MRV1 does not draft as this module was written for."""
    guard_all(SHARED_NOISE, _PARAMETERS)


def bind_model_drafter(runner: Any, rows: RowSampling) -> None:
    """Let a runner's model draft with the target's noise, and beside our drafter, if the engine has it."""
    if not drafts_with_model(runner.vllm_config):
        SharedNoise(runner, rows)
        return
    proposer = SuffixProposer(runner.vllm_config)
    setattr(runner, BESIDE_MODEL, proposer)
    proposer.bind(runner)
    ModelDrafter(runner, rows, proposer)


class SharedNoise:
    """Lets a runner's drafter draw with the target's noise.

    Args:
        runner: whose drafter is a model's.
        rows: knows its rows' noise.
    """

    def __init__(self, runner: Any, rows: RowSampling) -> None:
        check_drafter()
        self._runner, self._rows, self._drafter = runner, rows, runner.drafter
        self._drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._propose = runner.propose_draft_token_ids
        runner.propose_draft_token_ids = self.propose
        runner.drafter._sample_draft_tokens = self._draw
        record(SHARED_NOISE)

    def propose(self, scheduler_output: Any, sampled_token_ids: torch.Tensor, *others: Any) -> Any:
        """The runner's, before it knows what the step has sampled: int [num_rows, K + 1], -1 for nothing."""
        self._keys, self._ends = self._rows.keys_and_ends((sampled_token_ids >= 0).sum(1))
        self._drawn = []
        return self._propose(scheduler_output, sampled_token_ids, *others)

    def _draw(self, hidden_states: torch.Tensor, sampling: Any) -> tuple[torch.Tensor, None]:
        """The drafter's `_sample_draft_tokens`, once a pass: int64 [num_rows], and no distribution."""
        # A head with a vocabulary of its own has logits of the target's here, -inf where it has no token.
        logits = self._drafter.model.compute_logits(hidden_states).float()
        tokens = argmax(logits)
        if not sampling.all_greedy:
            is_sampled = sampling.temperature > 0
            scaled = logits / torch.where(is_sampled, sampling.temperature, 1.0).unsqueeze(1)
            seeds = noise.seeds_at(self._keys, self._ends + len(self._drawn))
            drawn = noise.exponential(seeds, coupled.num_drawn(logits.shape[1]), logits.device)
            tokens = torch.where(is_sampled, coupled.race(scaled, drawn), tokens)
        self._drawn.append((tokens, coupled.log_odds(logits, tokens)))
        return tokens, None


class ModelDrafter(SharedNoise):
    """A model's drafts beside those of a `SuffixProposer`, which has the last word.

    The first pass is that of every step, which keeps the model's KV cache complete. The others are left out
    while the gate is closed, and where they do not pay: the scheduler tells all ranks.
    """

    def __init__(self, runner: Any, rows: RowSampling, proposer: SuffixProposer) -> None:
        super().__init__(runner, rows)
        self._proposer = proposer
        self._num_tokens = num_model_tokens(runner.vllm_config)
        self._num_now = self._num_tokens  # in this step; 0: the first pass drafts nothing
        self._drafts: DraftTokenIds | None = None
        self._propose_model, self._sample_tokens = runner.drafter.propose, runner.sample_tokens
        runner.drafter.propose = self._propose_fewer
        runner.sample_tokens = self._sample_and_draft
        runner.take_draft_token_ids = lambda: self._drafts

    def propose(self, scheduler_output: Any, *others: Any) -> list[list[int]]:
        """Nothing, for the scheduler: it gets what `take_draft_token_ids` gives."""
        told = getattr(scheduler_output, MODEL_TOKENS_KEY, None)
        self._num_now = self._num_tokens if told is None else told
        return [[] for _ in range(len(super().propose(scheduler_output, *others)))]

    def _propose_fewer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = self._propose_model(*args, **kwargs | {"num_speculative_tokens": self._num_now})
        num = max(self._num_now, 1)  # the first pass, for no token
        self._proposer.note_passes(num, self._num_tokens - num)
        return drafts

    def _sample_and_draft(self, *args: Any, **kwargs: Any) -> Any:
        """The runner's `sample_tokens`; after it tokens and model's drafts are on the host."""
        self._drawn, self._drafts = [], None
        output = self._sample_tokens(*args, **kwargs)
        if getattr(output, "req_ids", None):
            nums = list(map(len, output.sampled_token_ids))
            self._drafts = DraftTokenIds(list(output.req_ids), self._draft_rows(nums))
            setattr(output, MODEL_TOKENS_KEY, self._proposer.model_tokens)
        return output

    def _draft_rows(self, nums_new_tokens: list[int]) -> list[list[int]]:
        batch = self._runner.input_batch
        drafts = None
        if self._drawn and self._proposer.is_used:
            tokens, log_odds = (torch.stack(each, 1).cpu().numpy() for each in zip(*self._drawn, strict=True))
            drafts = ModelDrafts(tokens.astype(np.int32), log_odds.astype(np.float32))
        return self._proposer.draft(
            nums_new_tokens, batch.token_ids_cpu, batch.num_tokens_no_spec, in_time=self._num_now > 0,
            model_drafts=drafts,
        )  # fmt: skip
