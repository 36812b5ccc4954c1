"""Temperatures of draft tokens on the CPU engine, which reads them from memory that nobody has written."""

import inspect
from typing import Any

import torch

from rollout_spec.patches import Patch, guard_parameters, replace_function
from rollout_spec.vllm.upstream import WITH_DRAFTS

WHERE = {WITH_DRAFTS: "vllm.v1.sample.rejection_sampler"}
PATCH = Patch(
    name="vllm-cpu-expand",
    reason="with draft tokens, temperature, top-k and top-p of a row are read from uninitialised memory, so "
    "tokens are drawn from the wrong distribution: _expand_kernel_impl fills an int64 copy of a float output",
    upstream="vllm/utils/cpu_triton_utils.py, _expand_kernel_impl",
    until="the CPU kernel writes its output for every dtype (the probe then finds nothing to fix)",
)


def applies(_: Any) -> bool:
    """Whether the CPU engine's expand kernel does not repeat a float value for each token."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.utils import cpu_triton_utils

    kernel = getattr(cpu_triton_utils, "_expand_kernel_impl", None)
    if kernel is None:  # Triton runs on the CPU instead
        return False
    output = torch.full((3,), -1.0)
    kernel(output, torch.tensor([0.5, 0.25]), torch.tensor([1, 3]), 0, 1, MAX_NUM_TOKENS=128)
    return output.tolist() != [0.5, 0.25, 0.25]


def fix(module: Any) -> None:
    """Repeat each request's value for its draft tokens in plain torch."""
    expected = tuple(inspect.signature(expand_batch_to_tokens).parameters)
    guard_parameters(PATCH, module, "expand_batch_to_tokens", expected)
    replace_function(module, "expand_batch_to_tokens", expand_batch_to_tokens, patch=PATCH)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """vLLM's: [batch_size] and the cumulative numbers of tokens to [num_tokens], of x's dtype."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)
