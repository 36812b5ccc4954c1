"""Steps in which no row has a draft: vLLM 0.32 verifies them too, on MRV1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout_spec.patches import Patch

PLAIN_STEPS = Patch(
    name="vllm-step-without-drafts",
    reason="vLLM 0.32 verifies steps without draft tokens too: that takes longer than a plain step, and with "
    "top_k fails on the CPU: max(): Expected reduction dim to be specified for input.numel() == 0",
    upstream="vllm/v1/worker/gpu_model_runner.py, GPUModelRunner._sample",
    until="a step without draft tokens is a plain step, as in 0.29",
)


def sample_plainly(sample: Callable[[torch.Tensor, Any], Any], logits: torch.Tensor, metadata: Any) -> Any:
    """The model runner's `_sample`, with a plain step where no row has a draft."""
    has_drafts = metadata is not None and any(metadata.num_draft_tokens)
    return sample(logits, metadata if has_drafts else None)
