"""What engines would refuse once Ray has started them, as far as the configuration and a config.json show it.

Each engine says it again of itself, and with it what cannot be seen here (`vllm/checks.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from rollout_spec.config import SpecConfig, refuse_first
from rollout_spec.verl.model_drafter import OPTION, asked_drafter
from rollout_spec.verl.settings import (
    ENGINE,
    MTP,
    ROLLOUT,
    entry,
    is_for_npus,
    model_fields,
    of_text,
    policy_fields,
    value,
)
from rollout_spec.vllm import reasons
from rollout_spec.vllm.versions import drafts_by_modules, mrv2_has_draft_models, v2_architectures, version

# By model_type: policies whose MTP head must come in one piece, while verl syncs weights in parts.
_WHOLE_HEADS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
_GEMMA4 = ("gemma4_assistant", "gemma4_unified_assistant")
_STEP3P5 = ("step3p5", "step3p7")
# Entries of the config.json of a mixture of experts.
_NUM_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_Drafter = Mapping[str, Any]  # of `asked_drafter`: one of the user's own names its model
_Fields = Mapping[str, Any]  # of a config.json
_Row = tuple[Any, str, str]  # whether it is so, the setting, why it is refused


def check_engine(config: DictConfig, spec: SpecConfig) -> None:
    """Raise a ConfigError for what drafts cannot be combined with; warn of what hurts them."""
    options = value(config, "rollout.spec")
    drafter = asked_drafter(options, value(config, MTP))
    if not (spec.enabled or options.get(OPTION) or (spec.coupled and drafter)):
        return  # without drafts, or with those that verl configures itself
    policy = policy_fields(config)
    rows = _of_settings(config, spec, drafter, policy)
    if drafter is not None:  # first what no other setting puts right
        rows = _of_weights(config, drafter, policy) + _of_model(config, spec, drafter, policy) + rows
    refuse_first(*((is_so, f"{setting}: {reason}") for is_so, setting, reason in rows))
    mode = entry(config, f"{ENGINE}.compilation_config", "cudagraph_mode")
    if spec.enabled and mode == "FULL_DECODE_ONLY" and not is_for_npus(config):  # there, drafts are filled up
        but = "On MRV2 from vLLM 0.29 on they may have some: the engine's log says so"
        print(f"rollout_spec: {ENGINE}.{reasons.WITHOUT_GRAPHS}. {but}", file=sys.stderr)
    if drafter and not (_is_synced(config, drafter) and value(config, f"{MTP}.enable_train")):
        watch = "; watch rollout/spec_model_acceptance_rate" if spec.enabled else ""
        print(
            f"rollout_spec: {_name(drafter)}: this drafter is not trained, so it will be right less often "
            f"when the policy has changed{watch}",
            file=sys.stderr,
        )


def _of_settings(
    config: DictConfig, spec: SpecConfig, drafter: _Drafter | None, policy: _Fields
) -> tuple[_Row, ...]:
    processors, ahead = f"{ENGINE}.logits_processors", f"{ENGINE}.async_scheduling"
    overrides = f"{ENGINE}.override_generation_config"
    is_small = drafter is not None and drafter["method"] == "draft_model"
    # By default vLLM schedules ahead beside a head, not beside our drafter or a small model.
    allowed = (None, False) if spec.enabled or is_small else (False,)
    is_ahead = (spec.enabled or spec.coupled) and value(config, ahead) not in allowed
    return (
        (value(config, processors), processors, reasons.PROCESSORS),
        (entry(config, overrides, "min_p"), f"{overrides}.min_p", reasons.MIN_P),
        (is_ahead and _has_mrv1(config, policy, is_small), f"{ahead}={value(config, ahead)}",
         f"{reasons.AHEAD}, which vLLM {version()} has for this model"),
    )  # fmt: skip


def _of_weights(config: DictConfig, drafter: _Drafter, policy: _Fields) -> tuple[_Row, ...]:
    has_whole_head = "model" not in drafter and policy.get("model_type") in _WHOLE_HEADS
    load_format = value(config, f"{ROLLOUT}.load_format")
    return (
        (has_whole_head, _name(drafter),
         "vLLM updates the MTP head of this model as a whole, verl syncs it in parts"),
        (not _is_synced(config, drafter) and "dummy" in load_format, f"{ROLLOUT}.load_format={load_format}",
         "the drafter would keep random weights, because no weight sync brings its own; set auto"),
    )  # fmt: skip


def _of_model(config: DictConfig, spec: SpecConfig, drafter: _Drafter, policy: _Fields) -> tuple[_Row, ...]:
    model = model_fields(str(drafter["model"])) if "model" in drafter else policy
    policy_text = of_text(policy)
    sizes = [fields.get("vocab_size") for fields in (of_text(model), policy_text)]
    has_other_tokens = drafter["method"] == "draft_model" and None not in sizes and sizes[0] != sizes[1]
    num_positions = _num_positions(of_text(model)) if "model" in drafter else None
    most = value(config, f"{ROLLOUT}.max_model_len") or policy_text.get("max_position_embeddings")
    num_ranks = value(config, f"{ROLLOUT}.data_parallel_size") or 1
    num_tokens = (spec.to_dict() if spec.enabled else drafter)["num_speculative_tokens"]
    kind = model.get("model_type") if drafter["method"] == "mtp" else None
    of_verification = (  # whether it is so, why it is refused
        (not spec.coupled, reasons.UNCOUPLED),
        (is_for_npus(config), reasons.OWN_RUNNER),
        (_has_adapters(config), f"LoRA: {reasons.ADAPTERS}"),
        (num_ranks > 1 and any(map(policy_text.get, _NUM_EXPERTS)), reasons.EXPERTS),
        (kind in _GEMMA4, reasons.GEMMA4),
        (kind in _STEP3P5, reasons.STEP3P5),
        (drafter["method"] == "mtp" and _has_modules(model, num_tokens), reasons.MODULES),
        (num_positions and most and num_positions < most, reasons.POSITIONS.format(num_positions, most)),
    )
    is_verified, name = spec.enabled or spec.coupled, _name(drafter)
    return (
        *((is_verified and is_so, name, reason) for is_so, reason in of_verification),
        (has_other_tokens, name, f"its vocabulary is of {sizes[0]} tokens, the policy's of {sizes[1]}"),
    )


def _name(drafter: _Drafter) -> str:
    return f"rollout.spec.{OPTION}" if "model" in drafter else f"{MTP}.enable_rollout"


def _is_synced(config: DictConfig, drafter: _Drafter) -> bool:
    """verl trains MTP heads with Megatron only, and syncs their weights then."""
    return "model" not in drafter and value(config, "actor_rollout_ref.actor.strategy") == "megatron"


def _has_modules(head: _Fields, num_tokens: int) -> bool:
    """Whether vLLM takes several modules of an MTP head: of a MiMo V2 it takes one."""
    is_mimo = any(name.startswith("MiMoV2") for name in head.get("architectures") or ())
    has_several = min(head.get("num_nextn_predict_layers") or 1, num_tokens) > 1 and not is_mimo
    return has_several and version() is not None and drafts_by_modules()


def _has_mrv1(config: DictConfig, policy: _Fields, is_small: bool) -> bool:
    """Whether vLLM takes MRV1; False if that cannot be seen here. `is_small`: a small model drafts."""
    if asked := os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        return asked == "0"
    if is_for_npus(config) or _has_adapters(config):  # as `mrv2_misfits` says
        return True
    if version() is None:  # a driver without vLLM
        return False
    with_mrv2, names = v2_architectures(), policy.get("architectures")
    is_listed = with_mrv2 is None or not names or not with_mrv2.isdisjoint(names)
    return not is_listed or (is_small and not mrv2_has_draft_models())


def _has_adapters(config: DictConfig) -> bool:
    """Whether the engine has them: verl merges them into the weights where it is asked to."""
    model = value(config, "actor_rollout_ref.model")
    lora = model.get("lora") or {}
    return not lora.get("merge") and bool(lora.get("rank") or model.get("lora_rank"))


def _num_positions(fields: _Fields) -> int | None:
    """The positions that vLLM takes from a config.json; None if they are scaled, as only vLLM knows."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    is_scaled = "factor" in rope and rope.get("rope_type", rope.get("type")) != "llama3"
    return None if is_scaled else fields.get("model_max_length") or fields.get("max_position_embeddings")
