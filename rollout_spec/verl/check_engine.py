"""What engines would refuse once Ray has started them, as far as the configuration and a config.json show it.

Each engine says it again of itself, and with it what cannot be seen here (`vllm/refusals/checks.py`).
"""

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from omegaconf import DictConfig

from rollout_spec import recurrent
from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.verl.model_drafter import OPTION, asked_model
from rollout_spec.verl.recurrent_policy import has_recurrent_state, states_of
from rollout_spec.verl.settings import (
    ENGINE,
    MTP,
    ROLLOUT,
    entry,
    is_for_npus,
    model_fields,
    of_text,
    policy_fields,
    say,
    value,
)
from rollout_spec.vllm.both_runners import WITHOUT_GRAPHS
from rollout_spec.vllm.refusals.table import facts_both_see, refuse
from rollout_spec.vllm.versions import drafts_by_modules, mrv2_architectures, mrv2_has_draft_models, version

# By model_type: policies whose MTP head must come in one piece, while verl syncs weights in parts.
_WHOLE_HEADS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
_GEMMA4 = ("gemma4_assistant", "gemma4_unified_assistant")
_STEP3P5 = ("step3p5", "step3p7")
# Entries of the config.json of a mixture of experts.
_NUM_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_Fields = Mapping[str, Any]  # of a config.json


class ModelDrafter(NamedTuple):
    """A model that drafts, as it is asked for."""

    method: str
    num_speculative_tokens: int
    model: str | None = None  # the folder of the user's own; None: it is the policy's MTP head

    @property
    def option(self) -> str:
        """What asks for it."""
        return f"rollout.spec.{OPTION}" if self.model else f"{MTP}.enable_rollout"


def check_engine(config: DictConfig, spec: SpecConfig) -> None:
    """Raise a ConfigError for what drafts cannot be combined with; warn of what hurts them."""
    options = value(config, "rollout.spec")
    asked = asked_model(options, value(config, MTP))
    model = ModelDrafter(**asked) if asked else None
    if not (spec.enabled or options.get(OPTION) or (spec.keyed and model)):
        return  # without drafts, or with those that verl configures itself
    policy = policy_fields(config)
    if model is not None:  # first what no other setting puts right
        _refuse_weights(config, model, policy)
    refuse(_facts(config, spec, model, policy), model.option if model else "", f"{ENGINE}.")
    if spec.enabled and has_recurrent_state(config):
        recurrent.check_settings(spec, value(config, f"{ENGINE}.mamba_cache_mode"), states_of(config))
    mode = entry(config, f"{ENGINE}.compilation_config", "cudagraph_mode")
    if spec.enabled and mode == "FULL_DECODE_ONLY" and not is_for_npus(config):  # there, drafts are padded
        but = "On MRV2 from vLLM 0.29 on they may have some: the engine's log says so"
        say(f"{ENGINE}.{WITHOUT_GRAPHS}. {but}")
    if model and not (_is_synced(config, model) and value(config, f"{MTP}.enable_train")):
        watch = "; watch rollout/spec_model_acceptance_rate" if spec.enabled else ""
        doubt = "this drafter is not trained, so it will be right less often when the policy has changed"
        say(f"{model.option}: {doubt}{watch}")


def _facts(
    config: DictConfig, spec: SpecConfig, model: ModelDrafter | None, policy: _Fields
) -> dict[str, Any]:
    facts = {
        "processors": value(config, f"{ENGINE}.logits_processors"),
        "min_p": entry(config, f"{ENGINE}.override_generation_config", "min_p"),
        "ahead": _ahead(config, spec, model, policy),
    }
    if spec.enabled:
        named = (policy.get("architectures") or ("This policy",))[0] if has_recurrent_state(config) else None
        longest_piece = value(config, f"{ENGINE}.long_prefill_token_threshold")
        facts |= facts_both_see(spec, named, is_for_npus(config), longest_piece)
    if model is not None and spec.keyed:
        facts |= _of_model(config, spec, model, policy)
    return facts


def _ahead(config: DictConfig, spec: SpecConfig, model: ModelDrafter | None, policy: _Fields) -> str | None:
    """Which MRV1 is asked to schedule ahead, in words."""
    is_small = model is not None and model.method == "draft_model"
    # By default vLLM schedules ahead beside a head, not beside our drafter or a small model.
    allowed = (None, False) if spec.enabled or is_small else (False,)
    is_ahead = spec.keyed and value(config, f"{ENGINE}.async_scheduling") not in allowed
    is_so = is_ahead and _has_mrv1(config, policy, is_small)
    return f"vLLM's MRV1, which vLLM {version()} has for this model" if is_so else None


def _of_model(config: DictConfig, spec: SpecConfig, model: ModelDrafter, policy: _Fields) -> dict[str, Any]:
    fields = model_fields(model.model) if model.model else policy
    num_positions = _num_positions(of_text(fields)) if model.model else None
    most = value(config, f"{ROLLOUT}.max_model_len") or of_text(policy).get("max_position_embeddings")
    num_ranks = value(config, f"{ROLLOUT}.data_parallel_size") or 1
    num_tokens = (spec if spec.enabled else model).num_speculative_tokens
    are_few = num_positions and most and num_positions < most
    is_mtp, kind = model.method == "mtp", fields.get("model_type")
    return {
        "model_on_own_runner": is_for_npus(config),
        "gemma4_head": is_mtp and kind in _GEMMA4,
        "step3p5_head": is_mtp and kind in _STEP3P5,
        "several_modules": is_mtp and _has_modules(fields, num_tokens),
        "adapters": "LoRA" if _has_adapters(config) else None,
        "parallel_experts": num_ranks > 1 and any(map(of_text(policy).get, _NUM_EXPERTS)),
        "few_positions": SimpleNamespace(most=num_positions, asked=most) if are_few else None,
    }


def _refuse_weights(config: DictConfig, model: ModelDrafter, policy: _Fields) -> None:
    """Raise for a model whose weights cannot come, or do not go with the policy's tokens."""
    if not model.model and policy.get("model_type") in _WHOLE_HEADS:
        whole = "vLLM updates the MTP head of this model as a whole, verl syncs it in parts"
        raise ConfigError(f"{model.option}: {whole}")
    load_format = value(config, f"{ROLLOUT}.load_format") or ""
    if "dummy" in load_format and not _is_synced(config, model):
        random = "the drafter would keep random weights, because no weight sync brings its own; set auto"
        raise ConfigError(f"{ROLLOUT}.load_format={load_format}: {random}")
    if model.method == "draft_model":
        own, other = (of_text(each).get("vocab_size") for each in (model_fields(str(model.model)), policy))
        if own and other and own != other:
            raise ConfigError(f"{model.option}: its vocabulary is of {own} tokens, the policy's of {other}")


def _is_synced(config: DictConfig, model: ModelDrafter) -> bool:
    """verl trains MTP heads with Megatron only, and syncs their weights then."""
    return not model.model and value(config, "actor_rollout_ref.actor.strategy") == "megatron"


def _has_modules(head: _Fields, num_tokens: int) -> bool:
    """Whether vLLM takes several modules of an MTP head: of a MiMo V2 it takes one."""
    is_mimo = any(name.startswith("MiMoV2") for name in head.get("architectures") or ())
    has_several = min(head.get("num_nextn_predict_layers") or 1, num_tokens) > 1 and not is_mimo
    return has_several and version() is not None and drafts_by_modules()


def _has_mrv1(config: DictConfig, policy: _Fields, is_small: bool) -> bool:
    """Whether vLLM takes MRV1; False if that cannot be seen here. `is_small`: a small model drafts."""
    if asked := os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        return asked == "0"
    if is_for_npus(config) or _has_adapters(config):  # as `unsupported_on_mrv2` says
        return True
    if version() is None:  # a driver without vLLM
        return False
    with_mrv2, names = mrv2_architectures(), policy.get("architectures")
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
