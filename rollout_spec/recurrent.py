"""Policies with recurrent layers: how long their drafts may be, and what their states take of the memory.

A recurrent layer keeps one state per request instead of keys and values per token. With drafts it keeps 1 +
K: the state behind each token that may be the last accepted one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rollout_spec.config import ConfigError, SpecConfig

# Draft tokens (K). CUDA's fused kernel takes 8 tokens of a row, and each of them costs a state of each layer.
DEFAULT_SPECULATIVE_TOKENS = 3
MAX_SPECULATIVE_TOKENS = 7


def check_settings(config: SpecConfig) -> None:
    """Raise for longer drafts than a policy with recurrent layers can have.

    Raises:
        ConfigError: naming the setting.
    """
    k, most = config.num_speculative_tokens, MAX_SPECULATIVE_TOKENS
    if k > most:
        raise ConfigError(
            f"rollout.spec.num_speculative_tokens={k}: must be at most {most} with a policy that has "
            f"recurrent layers, which keep a state for each draft token; {DEFAULT_SPECULATIVE_TOKENS} "
            "is a good start"
        )


@dataclasses.dataclass(frozen=True)
class States:
    """What a request's states take, by the number of its draft tokens."""

    num_layers: int
    recurrent_bytes: int  # of one state of one layer
    channel_bytes: int  # of one token in the window of one layer's convolution
    width: int  # of the convolution

    def num_bytes(self, num_speculative_tokens: int, cached: bool = False) -> int:
        """Of one request with K draft tokens at most: 1 + K states in each layer, each with its window.

        Args:
            num_speculative_tokens: K; 0 without drafts.
            cached: there is prefix caching (vLLM's mode `align`), which takes one state more.
        """
        k = num_speculative_tokens
        size = self.recurrent_bytes + self.channel_bytes * (self.width - 1 + k)
        return self.num_layers * (1 + k + cached) * size


def states_of(
    fields: Mapping[str, Any],
    state_dtype: str = "auto",
    tensor_parallel_size: int = 1,
    dtype_bytes: int = 2,
) -> States | None:
    """Of a text model's config.json; None where its fields do not say how large a state is.

    Args:
        fields: of config.json, or of its text_config.
        state_dtype: vLLM's mamba_ssm_cache_dtype.
        tensor_parallel_size: ranks that share each layer's heads.
        dtype_bytes: of what the model computes in.
    """
    if fields.get("linear_num_value_heads"):  # the gated delta rule
        values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
        channels = values + 2 * fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
        size, width = values * fields["linear_key_head_dim"], fields.get("linear_conv_kernel_dim", 4)
    elif heads := fields.get("mamba_num_heads") or fields.get("mamba_n_heads"):
        size_of_state = fields.get("ssm_state_size") or fields.get("mamba_d_state")
        values = heads * (fields.get("mamba_head_dim") or fields.get("mamba_d_head") or 0)
        groups = fields.get("n_groups") or fields.get("mamba_n_groups") or 1
        if not size_of_state or not values:
            return None
        channels, size = values + 2 * groups * size_of_state, values * size_of_state
        width = fields.get("conv_kernel") or fields.get("mamba_d_conv") or 4
    else:
        return None
    if state_dtype == "auto":  # as vLLM decides it
        for_nemotron = "float32" if "ssm_state_size" in fields else "auto"
        state_dtype = fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype") or for_nemotron
    state_bytes = {"auto": dtype_bytes, "float32": 4}.get(state_dtype, 2)
    ranks = tensor_parallel_size
    return States(_num_layers(fields), state_bytes * size // ranks, dtype_bytes * channels // ranks, width)


def _num_layers(fields: Mapping[str, Any]) -> int:
    """Recurrent ones."""
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    if kinds:
        return sum(kind in ("linear_attention", "mamba", "hybrid") for kind in kinds)
    if pattern := fields.get("hybrid_override_pattern"):  # Nemotron-H
        return pattern.count("M")
    num, interval = fields.get("num_hidden_layers", 0), fields.get("full_attention_interval")
    return num - num // interval if interval else num
