"""Policies with recurrent layers: which of them can have drafts, and what their states take of the memory.

A recurrent layer keeps one state per request instead of keys and values per token. With drafts it keeps 1 +
K: the state after each token that may be the last accepted one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rollout_spec.config import ConfigError, SpecConfig

# Draft tokens (K). CUDA's fused kernel takes 8 tokens of a row, and each of them costs a state of each layer.
DEFAULT_RECURRENT_TOKENS = 3
MAX_RECURRENT_TOKENS = 7
CACHE_MODES = ("none", "align")  # of vLLM's mamba_cache_mode

# Architectures, as config.json names them, and the first minor version of vLLM (0.N) that keeps their states
# for drafts.
_GATED_DELTA = {
    "Qwen3NextForCausalLM": 24,
    "Qwen3_5ForCausalLM": 29,
    "Qwen3_5MoeForCausalLM": 29,
    "Qwen3_5ForConditionalGeneration": 29,
    "Qwen3_5MoeForConditionalGeneration": 29,
    "OlmoHybridForCausalLM": 29,
}
_MAMBA_2 = {
    "NemotronHForCausalLM": 29,
    "FalconH1ForCausalLM": 32,
    "GraniteMoeHybridForCausalLM": 32,
    "Zamba2ForCausalLM": 32,
}
_SUPPORTED = _GATED_DELTA | _MAMBA_2
_REFUSED = {
    "Mamba": "has no attention, and vLLM counts no accepted tokens for such models",
    "FalconMamba": "has no attention, and vLLM counts no accepted tokens for such models",
    "Jamba": "has layers of Mamba 1, which drop the number of accepted tokens",
    "Lfm2": "gives tokens that depend on the batch, without drafts too",
    "Kimi": "has not been tested with drafts, and vLLM 0.24 counts no accepted tokens for it",
}


def refusal(architecture: str, minor: int | None) -> str | None:
    """Why a policy with recurrent layers has no drafts; None where it can have them. `architecture`: as
    config.json names it; `minor`: N of vLLM 0.N, None: newer than all releases."""
    oldest = _SUPPORTED.get(architecture)
    if oldest is None:
        known = (reason for start, reason in _REFUSED.items() if architecture.startswith(start))
        reason = next(known, "has recurrent layers that have not been tested with drafts")
        return f"{architecture} {reason}; run it with off"
    if minor is not None and minor < oldest:
        needed = f"vLLM 0.{oldest} or later, this is 0.{minor}"
        return f"{architecture} has recurrent layers whose drafts need {needed}; run it with off"
    return None


def check_settings(config: SpecConfig, cache_mode: str | None, states: States | None = None) -> None:
    """Raise a ConfigError that names a setting which a policy with recurrent layers cannot have with drafts.
    `cache_mode`: vLLM's mamba_cache_mode; None: vLLM decides."""
    k, most = config.num_speculative_tokens, MAX_RECURRENT_TOKENS
    if k > most:
        cost = ""
        if states is not None:
            plain, drafted = (mib(states.num_bytes(num)) for num in (0, k))
            cost = f" (a request's take {drafted} MiB, {plain} without drafts)"
        raise ConfigError(
            f"rollout.spec.num_speculative_tokens={k}: must be at most {most} with a policy that has "
            f"recurrent layers, which keep a state for each draft token{cost}; {DEFAULT_RECURRENT_TOKENS} "
            "is a good start"
        )
    if cache_mode is not None and cache_mode not in CACHE_MODES:
        wanted = f"{' or '.join(CACHE_MODES)} with drafts of ours: align with prefix caching, none without"
        raise ConfigError(f"mamba_cache_mode={cache_mode}: must be {wanted}")


def mib(num_bytes: float) -> int:
    return round(num_bytes / 2**20)


def has_mamba_2(architecture: str) -> bool:
    """Whether the recurrent layers are of Mamba 2, not of the gated delta rule."""
    return architecture in _MAMBA_2


@dataclasses.dataclass(frozen=True)
class States:
    """What a request's states take, by the number of its draft tokens."""

    num_layers: int
    recurrent_bytes: int  # of one state of one layer
    channel_bytes: int  # of one token in the window of one layer's convolution
    width: int  # of the convolution

    def num_bytes(self, num_speculative_tokens: int, cached: bool = False) -> int:
        """Of one request with K draft tokens at most: 1 + K states in each layer, each with its window; one
        more where there is prefix caching (`cached`: vLLM's mode `align`)."""
        k = num_speculative_tokens
        size = self.recurrent_bytes + self.channel_bytes * (self.width - 1 + k)
        return self.num_layers * (1 + k + cached) * size


def states_of(
    fields: Mapping[str, Any], state_dtype: str = "auto", tensor_parallel_size: int = 1, dtype_bytes: int = 2
) -> States | None:
    """The states of a text model, by its config.json; None where that does not say how large one is.

    Args:
        fields: of config.json, or of its text_config.
        state_dtype: vLLM's mamba_ssm_cache_dtype.
        tensor_parallel_size: ranks that share each layer's heads.
        dtype_bytes: of what the model computes in.
    """
    if fields.get("linear_num_value_heads"):  # the gated delta rule
        heads = fields["linear_num_value_heads"]
        values = heads * fields["linear_value_head_dim"]
        channels = values + 2 * fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
        size, width = values * fields["linear_key_head_dim"], fields.get("linear_conv_kernel_dim", 4)
    elif heads := _first(fields, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads"):  # Mamba 2
        size_of_state = _first(fields, "ssm_state_size", "mamba_d_state")
        values = heads * _first(fields, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
        if not size_of_state or not values:
            return None
        groups = _first(fields, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
        channels, size = values + 2 * groups * size_of_state, values * size_of_state
        width = _first(fields, "conv_kernel", "mamba_d_conv") or 4
    else:
        return None
    if state_dtype == "auto":  # as vLLM decides it
        for_nemotron = "float32" if "ssm_state_size" in fields else "auto"
        state_dtype = fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype") or for_nemotron
    state_bytes = {"auto": dtype_bytes, "float32": 4}.get(state_dtype, 2)
    ranks = tensor_parallel_size
    return States(
        num_layers=_num_layers(fields),
        recurrent_bytes=state_bytes * size // ranks,
        channel_bytes=dtype_bytes * channels // ranks,
        width=width,
    )


def _num_layers(fields: Mapping[str, Any]) -> int:
    """Recurrent ones."""
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    if kinds:
        return sum(kind in ("linear_attention", "mamba", "hybrid") for kind in kinds)
    if pattern := fields.get("hybrid_override_pattern"):  # Nemotron-H
        return pattern.count("M")
    num, interval = fields.get("num_hidden_layers", 0), fields.get("full_attention_interval")
    return num - num // interval if interval else num


def _first(fields: Mapping[str, Any], *names: str) -> int:
    """The first of these that is given; 0 if none is."""
    return next((fields[name] for name in names if fields.get(name)), 0)
