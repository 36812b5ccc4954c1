"""Tiny policies with recurrent layers and random weights."""

from __future__ import annotations

import pathlib
from typing import Any

from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_DELTA: dict[str, Any] = _COMMON | {
    "head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
# By name: the stem of the class of transformers, and the fields of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _DELTA | {"num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
    "qwen3_5": ("Qwen3_5", _DELTA),
    # States so small that a block of the cache has 32 tokens: for prefix caching.
    "qwen3_5_small": ("Qwen3_5", _DELTA | {"num_key_value_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32}),
    "nemotron_h": ("NemotronH", _COMMON | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "head_dim": 64, "mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 16, "n_groups": 1,
        "expand": 2, "chunk_size": 32, "num_nextn_predict_layers": 0}),
}  # fmt: skip


def make_recurrent(name: str, folder: pathlib.Path) -> str:
    """Write one of MODELS to the folder.

    A weight matrix is drawn from N(0, 1 / fan-in): every layer then moves the residual stream about as
    much as the embedding does, so a wrong state shows in the tokens.
    """
    import torch
    import transformers

    stem, fields = MODELS[name]
    config_class = f"{stem}TextConfig" if stem == "Qwen3_5" else f"{stem}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(getattr(transformers, config_class)(**fields))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "embed" in key:
                weight.normal_(0, 1, generator=generator)
            elif weight.dim() == 2:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
            elif "conv" in key and weight.dim() == 3:
                weight.normal_(0, 0.5, generator=generator)
        model.get_output_embeddings().weight.mul_(4)  # a peaked distribution, as a trained model's is
    model.config.architectures = [f"{stem}ForCausalLM"]
    model.to(torch.float32).save_pretrained(folder)
    return str(folder)
