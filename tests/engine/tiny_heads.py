"""Tiny EAGLE, EAGLE-3 and MTP heads, in the form in which vLLM's loaders take those that are published."""

import json
import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import VOCAB_SIZE, make_tiny

HIDDEN_SIZE = 128
DRAFT_TOKENS = range(0, VOCAB_SIZE, 2)  # of a head with a vocabulary of its own
LAST = "model.layers.1."  # of a tiny model's layers


def let_the_last_token_decide(weights):
    """The layers do nothing, and the norm after them, which heads lack, leaves embeddings as they are."""
    weights["model.embed_tokens.weight"].sign_()
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()


def save_as(folder, weights):
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def loaded(folder):
    return load_file(folder / "model.safetensors")


def save_head(target, folder, weights, **own):
    folder.mkdir()
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1} | own
    (folder / "config.json").write_text(json.dumps(config))
    save_as(folder, weights)


def make_bigrams(folder):
    """Let a model's last token decide: a head can then be the same model."""
    weights = loaded(folder)
    let_the_last_token_decide(weights)
    save_as(folder, weights)


def make_even(folder):
    """Let a model, or a head, take every token that it has for equally likely."""
    weights = loaded(folder)
    weights["lm_head.weight"].zero_()
    save_as(folder, weights)


def make_eagle(target, folder, reads):
    """A target's last layer after what `fc` takes of its input, the token or the state."""
    weights = loaded(target)
    zero, one = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE), torch.eye(HIDDEN_SIZE)
    head = {"embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
    head["fc.weight"] = torch.cat([one, zero] if reads == "token" else [zero, one], 1)
    for name, value in weights.items():
        if name.startswith(LAST) and "input_layernorm" not in name:
            head["layers.0." + name.removeprefix(LAST)] = value
    save_head(target, folder, head)


def make_mtp(folder, chat_model):
    """A MiMo whose last token decides, and whose MTP head is wrong; `right.safetensors` has the right one."""
    shutil.copytree(chat_model, folder)
    of_chat_model = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    make_tiny("Qwen2", folder, num_nextn_predict_layers=1, **{name: of_chat_model[name] for name in names})
    mimo = json.loads((folder / "config.json").read_text()) | {"architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(mimo))
    path, weights = folder / "model.safetensors", loaded(folder)
    let_the_last_token_decide(weights)
    head = {name.removeprefix(LAST): value for name, value in weights.items() if name.startswith(LAST)}
    head |= {f"{name}_layernorm.weight": torch.ones(HIDDEN_SIZE) for name in ("token", "hidden", "final")}
    zero, one = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE), torch.eye(HIDDEN_SIZE)
    for file, reads_state, reads_token in ((path, one, zero), (folder / "right.safetensors", zero, one)):
        head["input_proj.weight"] = torch.cat([reads_state, reads_token], 1)
        named = {f"model.mtp_layers.0.{name}": value.clone() for name, value in head.items()}
        save_file(weights | named, file, {"format": "pt"})
    (folder / "right.safetensors").rename(folder.parent / "right.safetensors")  # vLLM loads all of a folder


def make_eagle3(target, folder):
    """A head of DRAFT_TOKENS: a target's last layer after what comes out of it."""
    weights, tokens = loaded(target), torch.tensor(DRAFT_TOKENS)
    zero, one = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE), torch.eye(HIDDEN_SIZE)
    head: dict[str, Any] = {
        "fc.weight": torch.cat([zero, zero, one], 1),
        "norm.weight": weights["model.norm.weight"].clone(),
        "lm_head.weight": weights["lm_head.weight"][tokens].clone(),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN_SIZE),
        "d2t": tokens - torch.arange(len(tokens)),
    }
    for name, value in weights.items():
        if name.startswith(LAST):
            # Attention reads the token's embedding, and after it the state.
            reads_two = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            value = torch.cat([value, value], 1) if reads_two else value
            head["midlayer." + name.removeprefix(LAST)] = value
    save_head(
        target, folder, head, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(DRAFT_TOKENS),
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )  # fmt: skip
