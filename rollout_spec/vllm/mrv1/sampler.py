"""From the target's logits to a step's tokens: vLLM's two samplers, with our noise. An adapter, no algorithm.

A plain step calls vLLM's `Sampler`. A step with drafts calls its `RejectionSampler`, which asks `Sampler` for
the tokens after the drafts, then calls `rejection_sample`. Both get `SamplingMetadata`, whose `generators`
say what noise a row has: `KeyedSampler` and `CoupledVerifier` put a `RowGenerators` there. With it
`KeyedTopKTopPSampler` draws in plain steps and after drafts, and `coupled_verify`, by way of
`couple_rejection_sample`, at the draft positions. Penalties, masks, temperature and log-probabilities stay
vLLM's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from rollout_spec.patches import guard_class, guard_parameters, put_before, record
from rollout_spec.verification import coupled, noise
from rollout_spec.verification.transfers import just_wait
from rollout_spec.vllm.keys import keys_of
from rollout_spec.vllm.mrv1 import rejection
from rollout_spec.vllm.mrv1.kept_logprobs import KEPT_LOGPROBS, KeptVerifier
from rollout_spec.vllm.mrv1.min_tokens import MIN_TOKENS, counting_drafts
from rollout_spec.vllm.mrv1.row_generators import KEYED, RowGenerators, keep_from_fused_kernel

logger = init_logger(f"vllm.{__name__}")

# What an engine's processes apply to its samplers.
SAMPLER_PATCHES = (KEYED, rejection.COUPLED, MIN_TOKENS, KEPT_LOGPROBS)


class RowSampling:
    """Gives a model runner's samplers a `RowGenerators`, step by step; before_wait: see `StepNoise`."""

    def __init__(self, runner: Any, before_wait: Callable[[], None] = just_wait) -> None:
        self._runner, self._before_wait = runner, before_wait
        self._keys = keys_of(runner)

    def install(self) -> None:
        """Stand before the runner's samplers; once in a runner's life. Raises PatchError; RuntimeError: the
        device cannot compute the noise."""
        sampler, verifier = self._runner.sampler, getattr(self._runner, "rejection_sampler", None)
        put_before(KeyedSampler, sampler, KEYED, sampling=self)
        if verifier is not None:
            put_before(CoupledVerifier, verifier, rejection.COUPLED, sampling=self)
            record(MIN_TOKENS)
            put_before(KeptVerifier, verifier, KEPT_LOGPROBS)
        _check_top_k_top_p(type(sampler.topk_topp_sampler))
        noise.check(self._runner.device)
        for module in rejection.rejection_samplers():
            rejection.couple_rejection_sample(module)
        keep_from_fused_kernel(vllm_sampler)
        sampler.topk_topp_sampler = KeyedTopKTopPSampler(sampler.logprobs_mode)
        logger.info("rollout_spec: each token's random numbers depend only on its request and position")

    def generators_of_step(self, num_draft_tokens: list[int]) -> RowGenerators:
        """The noise of the rows that a step samples. The batch's own generators are cleared."""
        rows = self.keys_and_positions(len(num_draft_tokens))
        # Nothing draws from the generators, and on the CPU vLLM fails on a seeded request whose prompt
        # comes in chunks: it sets the generator back, and a CPU generator has no offset.
        self._runner.input_batch.generators.clear()
        return RowGenerators(coupled.StepNoise(*rows, num_draft_tokens, self._before_wait))

    def keys_and_positions(self, num_rows: int) -> tuple[list[int], npt.NDArray[np.int32]]:
        """Of each row of the step that runs: its key, and the position of the first token that it samples."""
        batch = self._runner.input_batch
        if batch.num_reqs not in (0, num_rows):  # 0: a warm-up, which takes what a step does
            raise RuntimeError(
                f"rollout_spec: {num_rows} rows are sampled, the batch has {batch.num_reqs}; "
                "take rollout.spec=off, and run `rollout-spec doctor`"
            )
        keys = self._keys.rows(batch.req_ids, self._runner.requests) or [0] * num_rows
        # A warm-up may have more rows than there are.
        return keys, np.resize(batch.num_tokens_no_spec, num_rows)


# Before Sampler: forward
class KeyedSampler(Sampler):
    """It gives a plain step its `RowGenerators`, and the tokens after drafts the number of these drafts."""

    sampling: RowSampling

    def forward(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool = False,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        generators = sampling_metadata.generators
        if not isinstance(generators, RowGenerators):
            generators = self.sampling.generators_of_step([0] * logits.shape[0])
            sampling_metadata = dataclasses.replace(sampling_metadata, generators=generators)
        elif predict_bonus_token:
            sampling_metadata = counting_drafts(sampling_metadata, generators.step_noise.num_draft_tokens)
        return super().forward(logits, sampling_metadata, predict_bonus_token, *args, **kwargs)


# Before RejectionSampler, 1: forward
class CoupledVerifier(RejectionSampler):
    """It gives a step with drafts its `RowGenerators`."""

    sampling: RowSampling

    def forward(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> Any:
        generators = self.sampling.generators_of_step(metadata.num_draft_tokens)
        sampling_metadata = dataclasses.replace(sampling_metadata, generators=generators)
        return super().forward(metadata, draft_probs, logits, sampling_metadata)


class KeyedTopKTopPSampler(torch.nn.Module):
    """In place of vLLM's top-k-top-p sampler; it draws with keyed noise."""

    def __init__(self, logprobs_mode: str) -> None:
        super().__init__()
        self.logprobs_mode = logprobs_mode

    def forward(
        self, logits: torch.Tensor, generators: RowGenerators, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [batch_size] tokens of logits [batch_size, vocab_size], and what log-probabilities are of."""
        # That of verification, so that both keep the same tokens.
        logits = rejection.platforms_rejection_sampler().apply_top_k_top_p(logits, k, p)
        processed = None
        if self.logprobs_mode == "processed_logits":
            processed = logits
        elif self.logprobs_mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        return generators.step_noise.sample_after(logits), processed


def check_samplers() -> None:
    """Raise a PatchError if one of `SAMPLER_PATCHES` does not fit the installed packages; needs no engine."""
    guard_class(KEYED, KeyedSampler, Sampler)
    guard_class(rejection.COUPLED, CoupledVerifier, RejectionSampler)
    guard_parameters(
        MIN_TOKENS, MinTokensLogitsProcessor, "apply_with_spec_decode", ("self", "logits", "num_draft_tokens")
    )
    guard_class(KEPT_LOGPROBS, KeptVerifier, RejectionSampler)
    _check_top_k_top_p(TopKTopPSampler)
    for module in rejection.rejection_samplers():
        rejection.checked_target(module)


def _check_top_k_top_p(kind: type) -> None:
    guard_parameters(KEYED, kind, "forward_native", ("self", "logits", "generators", "k", "p"))
