"""Tiny policies with recurrent layers and random weights."""

from typing import Any

import torch
import transformers

from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE
from tests.engine.tiny_heads import loaded, save_as
from tests.tiny_vl import PATCH, SPECIAL, make_processor

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_DELTA: dict[str, Any] = _COMMON | {
    "head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 32,
    "mamba_expand": 2,
}  # fmt: skip
# Of a policy that sees: the numbers of its special tokens, which the scenarios' prompts do not have.
SEEN = dict(zip(SPECIAL, (0, 1, EOS_TOKEN_ID, 123, 124, 125, 126), strict=True))
_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
    "patch_size": PATCH, "num_position_embeddings": 16,
}  # fmt: skip
_MROPE = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}  # fmt: skip
_NORMS_OF_MTP = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
# By name: the stem of the class of transformers, and the fields of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _DELTA | _EXPERTS),
    "qwen3_5": ("Qwen3_5", _DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", _DELTA | _EXPERTS),
    # States so small that a block of the cache has 32 tokens: for prefix caching. Interpreted, each recurrent
    # layer takes long.
    "qwen3_5_small": ("Qwen3_5", _DELTA | {"num_key_value_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"]}),
    "nemotron_h": ("NemotronH", _COMMON | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "head_dim": 64, "mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 16, "n_groups": 1,
        "expand": 2, "chunk_size": 32, "num_nextn_predict_layers": 0}),
    "falcon_h1": ("FalconH1", _COMMON | _MAMBA | {"head_dim": 64, "mamba_d_ssm": 256}),
    "granite_hybrid": ("GraniteMoeHybrid", _COMMON | _MAMBA | {
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 256, "position_embedding_type": "nope"}),
    "zamba2": ("Zamba2", _COMMON | {"layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
        "num_key_value_heads": 2, "mamba_d_state": 16, "mamba_expand": 2, "n_mamba_heads": 4,
        "mamba_ngroups": 1, "chunk_size": 32, "num_mem_blocks": 1}),
}  # fmt: skip


def make_recurrent(name, folder, sees=False):
    """Write one of MODELS to the folder, with a vision tower and a processor if it `sees`.

    A weight matrix is drawn from N(0, 1 / fan-in): every layer then moves the residual stream about as
    much as the embedding does, so a wrong state shows in the tokens.
    """
    stem, fields = MODELS[name]
    config_class = f"{stem}TextConfig" if stem.startswith("Qwen3_5") and not sees else f"{stem}Config"
    architecture = f"{stem}ForConditionalGeneration" if sees else f"{stem}ForCausalLM"
    if sees:
        places = {f"{key}_token_id": SEEN[f"<|{key}_pad|>"] for key in ("image", "video")}
        places |= {f"vision_{key}_token_id": SEEN[f"<|vision_{key}|>"] for key in ("start", "end")}
        fields = places | {"text_config": fields | {"rope_parameters": _MROPE}, "vision_config": _VISION}
        characters = {chr(i): i for i in range(VOCAB_SIZE) if i not in SEEN.values()}
        make_processor("Qwen3VL", characters | SEEN).save_pretrained(folder)
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, config_class)(**fields))
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
        if sees:  # it gives no images: a resumed request's prompt has what it has given
            model.get_output_embeddings().weight[[*SEEN.values()][3:]] = 0
    model.config.architectures = [architecture]
    model.to(torch.float32).save_pretrained(folder)
    return str(folder)


def make_mtp(name, folder):
    """One of _DELTA's models with an MTP head, which takes what the last token alone says.

    The layers say so little that the head is often right, and so much that a wrong state shows.
    """
    make_recurrent(name, folder)
    weights, own = loaded(folder), "model.layers.1."
    for key, value in weights.items():
        if "o_proj" in key or "out_proj" in key or "down_proj" in key:
            value.mul_(0.3)
    size = _COMMON["hidden_size"]
    head = {key.removeprefix(own): value.clone() for key, value in weights.items() if key.startswith(own)}
    for key, value in head.items():
        if "o_proj" in key or "down_proj" in key:
            value.zero_()
    weights |= {f"mtp.layers.0.{key}": value for key, value in head.items()}
    weights |= {f"mtp.{key}.weight": torch.zeros(size) for key in _NORMS_OF_MTP}
    weights["mtp.fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    save_as(folder, weights)
    return str(folder)
