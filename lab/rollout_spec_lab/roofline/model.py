"""What a policy's config.json says of its size: layers, parameters, bytes, states; others are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rollout_spec.config import UserError
from rollout_spec.recurrent import States, states_of

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WHY_NOT = {
    "kv_lora_rank": "MLA is not modelled: its attention computes for as long as it reads, or longer",
    "quantization_config": "quantized weights are not modelled, fp8 among them",
}
_OF_RECURRENT_LAYERS = {  # by a field that says there are some: the others of their size
    "linear_num_value_heads": ("linear_value_head_dim", "linear_num_key_heads", "linear_key_head_dim"),
    "ssm_state_size": ("mamba_num_heads", "mamba_head_dim", "n_groups"),
}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class RooflineError(UserError):
    """A model or a layout that cannot be modelled; the message names the field or the option."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a decoder with grouped-query attention, dense or a mixture of experts."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of one expert, where there are experts
    vocab_size: int
    num_experts: int = 0
    num_experts_per_token: int = 0
    ties_embeddings: bool = False
    bytes_per_value: int = 2
    shared_expert_size: int = 0  # width of the shared experts, together: every token takes them too
    num_dense_layers: int = 0  # those without experts, where there are experts
    dense_size: int = 0  # width of these layers
    states: States | None = None  # of its recurrent layers
    num_projected: int = 0  # a token's queries, keys, values, gates and outputs in one of these
    gates_queries: bool = False  # Qwen beside such layers: the queries have a gate of their size

    @classmethod
    def read(cls, path: str | Path) -> Model:
        """From a Hugging Face config.json, or its folder; an OSError where it cannot be opened.

        Raises RooflineError: a field is missing or wrong, or says that the model is of another kind.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            fields = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise RooflineError(f"{path}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise RooflineError(f"{path}: must be a JSON object")
        where, nested = str(path), fields.get("text_config")
        try:
            if isinstance(nested, dict) and "hidden_size" not in fields:  # it reads images or audio too
                where = f"{path}: text_config"
                if not fields.get("model_type"):
                    raise RooflineError("is read only beside a model_type, as Hugging Face writes it")
                fields = {**fields, **nested}
            return cls._of(fields)
        except RooflineError as error:
            raise RooflineError(f"{where}: {error}") from None

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Model:
        _refuse_other_kinds(fields)
        dtype = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
        if dtype not in _BYTES:
            raise RooflineError(f"torch_dtype: {dtype!r} must be one of {', '.join(_BYTES)}")
        hidden_size, states = _whole(fields, "hidden_size"), _states(fields, _BYTES[dtype])
        fields = _with_mixers_and_mlps(fields)
        num_heads = _whole(fields, "num_attention_heads")
        return cls(
            hidden_size=hidden_size,
            num_layers=_whole(fields, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_whole(fields, "num_key_value_heads", num_heads),
            head_dim=_whole(fields, "head_dim", hidden_size // num_heads),
            vocab_size=_whole(fields, "vocab_size"),
            ties_embeddings=bool(fields.get("tie_word_embeddings")),
            bytes_per_value=_BYTES[dtype],
            states=states,
            num_projected=_num_projected(fields, states, _BYTES[dtype]),
            gates_queries=bool(fields.get("linear_num_value_heads")),
            **_mlps(fields),
        )

    @property
    def num_recurrent_layers(self) -> int:
        return 0 if self.states is None else self.states.num_layers

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def expert_params(self) -> int:
        """Parameters of one expert, in all layers that have experts."""
        return self.num_expert_layers * 3 * self.hidden_size * self.intermediate_size

    @property
    def shared_params(self) -> int:
        """Parameters that every token takes: attention, router, shared experts, dense layers and output."""
        gate = self.num_heads if self.gates_queries else 0
        attention = self.head_dim * (2 * (self.num_heads + self.num_kv_heads) + gate)
        expert_layer = self.num_experts + 3 * self.shared_expert_size
        dense_layer = 3 * (self.dense_size or self.intermediate_size)
        return self.hidden_size * (
            self.num_recurrent_layers * self.num_projected
            + (self.num_layers - self.num_recurrent_layers) * attention
            + self.num_expert_layers * expert_layer
            + (self.num_layers - self.num_expert_layers) * dense_layer
            + self.vocab_size
        )

    @property
    def num_params(self) -> int:
        embeddings = 0 if self.ties_embeddings else self.vocab_size * self.hidden_size
        return self.shared_params + self.num_experts * self.expert_params + embeddings


def _refuse_other_kinds(fields: dict[str, Any]) -> None:
    """What these formulas would get wrong, by the field that says so."""
    is_linear = bool(fields.get("linear_num_value_heads"))
    kinds = {"full_attention", "linear_attention"} if is_linear else {"full_attention"}
    harmless = {
        "kv_lora_rank": False,
        "quantization_config": False,
        "ssm_state_size": set(fields.get("hybrid_override_pattern") or "?") <= {*"M*-"},  # no experts
        "mamba_d_state": False,
        "layer_types": set(fields.get("layer_types") or ()) <= kinds,
        "sliding_window": fields.get("use_sliding_window") is False,
        "full_attention_interval": is_linear or fields.get("full_attention_interval") == 1,
        "moe_layer_freq": fields.get("moe_layer_freq") == 1,
        "decoder_sparse_step": fields.get("decoder_sparse_step") == 1,
        "mlp_only_layers": False,
    }
    for name, is_harmless in harmless.items():
        if fields.get(name) and not is_harmless:
            raise RooflineError(f"{name}: {_WHY_NOT.get(name, 'such models are not modelled')}")
    if all(fields.get(name) is None for name in _NUM_EXPERTS):
        for name in (name for name, value in fields.items() if "expert" in name and value):
            raise RooflineError(f"{name}: needs the number of experts, one of {', '.join(_NUM_EXPERTS)}")


def _states(fields: dict[str, Any], dtype_bytes: int) -> States | None:
    """The states of the recurrent layers, whose fields must be whole numbers."""
    for kind, names in _OF_RECURRENT_LAYERS.items():
        for name in (kind, *names) if fields.get(kind) else ():
            _whole(fields, name, 1 if name == "n_groups" else None)
    return states_of(fields, dtype_bytes=dtype_bytes)


def _num_projected(fields: dict[str, Any], states: States | None, dtype_bytes: int) -> int:
    if states is None:
        return 0
    channels, heads = states.channel_bytes // dtype_bytes, fields.get("linear_num_value_heads")
    if heads:
        return channels + 2 * heads * (fields["linear_value_head_dim"] + 1)
    return channels + fields["mamba_num_heads"] * (2 * fields["mamba_head_dim"] + 1)


def _with_mixers_and_mlps(fields: dict[str, Any]) -> dict[str, Any]:
    """Nemotron-H's layers are either a mixer or an MLP of two matrices: taken for as many layers as there are
    mixers, each with its share of the MLPs."""
    pattern = fields.get("hybrid_override_pattern")
    if not fields.get("ssm_state_size") or not pattern:
        return fields
    num_mlps, size = pattern.count("-"), _whole(fields, "intermediate_size")
    num_mixers = len(pattern) - num_mlps
    kept = {name: value for name, value in fields.items() if "expert" not in name}
    return kept | {
        "num_hidden_layers": num_mixers,
        "intermediate_size": round(2 * size * num_mlps / (3 * num_mixers)),
    }


def _mlps(fields: dict[str, Any]) -> dict[str, int]:
    """Fields of a Model: the width of its MLPs, or its experts."""
    experts = next((name for name in _NUM_EXPERTS if fields.get(name)), None)
    if experts is None:
        return {"intermediate_size": _whole(fields, "intermediate_size")}
    width = "moe_intermediate_size" if "moe_intermediate_size" in fields else "intermediate_size"
    size, num_dense_layers = _whole(fields, width), _whole(fields, "first_k_dense_replace", 0)
    num_experts, num_of_token = _whole(fields, experts), _whole(fields, "num_experts_per_tok")
    if num_of_token > num_experts:
        raise RooflineError(f"num_experts_per_tok: must be at most {experts}, {num_experts}")
    return {
        "intermediate_size": size,
        "num_experts": num_experts,
        "num_experts_per_token": num_of_token,
        "shared_expert_size": _shared_expert_size(fields, width),
        "num_dense_layers": num_dense_layers,
        "dense_size": _whole(fields, "intermediate_size") if num_dense_layers else 0,
    }


def _shared_expert_size(fields: dict[str, Any], width: str) -> int:
    """The width of all shared experts; where only their number is given, each is as wide as the others."""
    number = next((name for name in ("n_shared_experts", "num_shared_experts") if fields.get(name)), None)
    size = _whole(fields, "shared_expert_intermediate_size", 0)
    return size or (_whole(fields, number) * _whole(fields, width) if number else 0)


def _whole(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    """A field; a default of 0 allows 0."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise RooflineError(f"{name}: is missing")
    least = 0 if default == 0 else 1
    if type(value) is not int or value < least:
        raise RooflineError(f"{name}: {value!r} must be a whole number from {least}")
    return value
