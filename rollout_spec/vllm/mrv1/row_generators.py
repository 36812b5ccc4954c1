"""The noise of a step's rows, in the place of the generators that vLLM hands to all that draws."""

from typing import Any

import torch
from vllm.v1.sample.metadata import SamplingMetadata

from rollout_spec.patches import Patch, wrap
from rollout_spec.verification import coupled

KEYED = Patch(
    name="vllm-keyed-sampler",
    reason="vLLM draws from generators whose state depends on what was drafted, so the same seed gives other "
    "tokens with drafts than without (the runner's sampler gets our top-k-top-p sampler and a hook)",
    upstream="vllm/v1/sample/ops/topk_topp_sampler.py, TopKTopPSampler",
    until="vLLM's noise is a function of the request and the position",
)


class RowGenerators(dict[int, torch.Generator]):
    """Has none of vLLM's generators: the rows have keys."""

    def __init__(self, step_noise: coupled.StepNoise) -> None:
        super().__init__()
        self.step_noise = step_noise


def keep_from_fused_kernel(module: Any) -> None:
    """Let no kernel draw for rows that have keys: from 0.33 on one of ROCm's does, before all samplers."""
    if not hasattr(module, "mixed_sample_eligible"):
        return

    @wrap(module, "mixed_sample_eligible", KEYED)
    def has_no_keys(is_eligible: Any, sm: SamplingMetadata, predict_bonus_token: bool) -> bool:
        return not isinstance(sm.generators, RowGenerators) and is_eligible(sm, predict_bonus_token)
