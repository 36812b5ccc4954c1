"""Checks a verl configuration that asks for `rollout.spec`, on the driver, before Ray starts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.drafting.corpus import check_corpus
from rollout_spec.verl import launch
from rollout_spec.verl.launch import config_file
from rollout_spec.verl.model_drafter import (
    MTP,
    OPTION,
    asked_drafter,
    check_drafter,
    engine_drafter,
    engine_options,
    engine_scheduler,
)
from rollout_spec.vllm import OPTIONS_KEY
from rollout_spec.vllm.versions import (
    drafts_by_modules,
    refuse_old_version,
    v2_architectures,
    v2_has_draft_models,
    version,
)
from rollout_spec.vllm.options import GEMMA4, MODULES, RECURRENT, STEP3P5, refuse_long_drafts

REPLAY_BUFFER = "pkg://rollout_spec.verl.replay_buffer"
MODES = ("sync", "colocate_async", "separate_async")  # of verl's V1 trainer
MANAGER = "rollout_spec.verl.agent_loop.KeyedAgentLoopManager"
_LEGACY = "verl.trainer.main_ppo_v0"  # which verl's own command imports after this check only
_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"
_VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"
_ROUTER = f"{_ROLLOUT}.router_config_path"
_OURS = "rollout.spec sets it, leave it alone"
_WITH_DRAFTS = "together with speculative decoding"
# Of models whose MTP head refuses weights that come without its own, as verl's buckets do.
_WHOLE_HEADS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
_REFUSED_HEADS = {  # by their model_type
    "gemma4_assistant": GEMMA4,
    "gemma4_unified_assistant": GEMMA4,
    "step3p5": STEP3P5,
    "step3p7": STEP3P5,
}
# Of a mixture's configuration.
_NUM_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_STATES = (  # of a recurrent model's
    "linear_num_value_heads",  # Qwen3-Next, Qwen3.5, OLMo hybrid
    "mamba_d_state",  # Bamba, Falcon-H1, Granite, Jamba, Zamba2
    "ssm_state_size",  # Nemotron-H
    "state_size",  # Mamba
    "conv_L_cache",  # LFM2
    "linear_attn_config",  # Kimi Linear
)


class CheckConfig(Callback):
    """Hydra's callback, named by the `rollout.spec` group: it runs where the group is used, only there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Name the method for a Ray that runs already: its processes do not have this one's environment."""
        method = OmegaConf.select(config, "rollout.spec.method")
        with open_dict(config):
            OmegaConf.update(config, f"{_VARIABLES}.{launch.ASKED_VARIABLE}", str(method), force_add=True)
            if _value(config, _ROUTER) == _group_router():
                _fit_router(config)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        # Hydra turns an Exception in a callback into a warning; SystemExit it lets through.
        with one_line_errors():
            if launch.failure is not None:
                raise ConfigError(f"{launch.failure}; run `rollout-spec doctor`")
            if _LEGACY in sys.modules:  # whatever trainer.use_v1 says
                raise ConfigError(f"this command runs {_LEGACY}, not verl.trainer.main_ppo: {launch.V1_ONLY}")
            os.environ[launch.ASKED_VARIABLE] = check_config(config).method


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A ConfigError ends the command: its message on stderr, exit code 2."""
    try:
        yield
    except ConfigError as error:
        print(f"rollout_spec: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def check_overrides(arguments: Sequence[str]) -> None:
    """Refuse `rollout.spec.NAME=VALUE` of a NAME that is no option.

    Hydra would do so too, before any callback of ours, and advise to add the name with a `+`.

    Raises:
        ConfigError: the name is unknown.
    """
    known = {field.name for field in dataclasses.fields(SpecConfig)} | {OPTION}
    for argument in arguments:
        override = re.match(r"\+{0,2}rollout\.spec\.([^.=@]+)=(.*)", argument)
        if override and override[1] not in known:
            SpecConfig.from_mapping({override[1]: override[2]})


def check_config(config: DictConfig) -> SpecConfig:
    """The options under `rollout.spec`.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: an option is unknown or out of range, or does not go together with another setting.
    """
    options = _value(config, "rollout.spec")
    if not isinstance(options, dict):
        raise ConfigError(
            f"rollout.spec={options!r}: not a configuration group. Is rollout-spec's plugin for verl loaded "
            "(VERL_USE_EXTERNAL_PLUGINS)? Run `rollout-spec doctor`."
        )
    mtp = _value(config, MTP)
    SpecConfig.from_mapping({name: value for name, value in options.items() if name != OPTION})
    check_drafter(options, mtp)
    spec = SpecConfig.from_mapping(engine_options(options, mtp))
    refuse_old_version()
    _check_trainer(config, spec)
    _check_replay_buffer(config)
    _check_routing(config, spec)
    _check_engine(config, spec)
    if spec.enabled:
        if _is_for_npus(config):
            refuse_long_drafts(spec)
        _check_drafting(config)
    if spec.enabled or options.get(OPTION):
        _check_speculating(config)
    if drafter := asked_drafter(options, mtp):
        _check_model_drafter(config, spec, drafter)
    return spec


def _check_trainer(config: DictConfig, spec: SpecConfig) -> None:
    """What is measured, with drafts and without, needs a trainer with verl's hooks for it."""
    _require(config, f"{_ROLLOUT}.name", ("vllm",), "rollout.spec needs vllm")
    _require(config, f"{_ROLLOUT}.pipeline_model_parallel_size", (None, 1), "must be 1 with rollout.spec")
    # Sections that fully_async and one_step_off have and ppo_trainer has not.
    for section in ("async_training", "rollout.nnodes"):
        if _value(config, section) is not None:
            raise ConfigError(f"{section}: {launch.V1_ONLY}")
    _require(config, "trainer.use_v1", (True,), launch.V1_ONLY)
    mode = _value(config, "trainer.v1.trainer_mode") or "sync"
    if mode not in MODES:
        raise ConfigError(f"trainer.v1.trainer_mode={mode}: must be {', '.join(MODES)} with rollout.spec")
    if not spec.coupled and mode == "sync":
        return
    needs = (
        "verify=coupled needs every sample's number; leave it alone or set rollout.spec.verify=standard"
        if spec.coupled
        else "an asynchronous trainer's validation and training are told apart by their samples' names"
    )
    key = f"{_ROLLOUT}.agent.agent_loop_manager_class"
    _require(config, key, (MANAGER,), f"rollout.spec sets it, because {needs}")
    if mode != "sync" and launch.verl_is_older():
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode}: this verl lets requests into an engine in the middle of a "
            "weight sync, and rollout.spec cannot tell which weights they are of; verl 0.9.1 has them wait"
        )


def _check_engine(config: DictConfig, spec: SpecConfig) -> None:
    """What the group puts into the engine's arguments is there, and nothing that contradicts it."""
    options = _value(config, f"{_ENGINE}.additional_config.{OPTIONS_KEY}")
    if options is None or SpecConfig.from_mapping(options) != spec:
        raise ConfigError(f"{_ENGINE}.additional_config.{OPTIONS_KEY}: {_OURS}")
    key, schedule = f"{_ENGINE}.speculative_config", "num_speculative_tokens_per_batch_size"
    if schedule in (_value(config, key) or {}):
        raise ConfigError(f"{key}.{schedule}: use rollout.spec.batch_threshold instead")
    asked = _value(config, "rollout.spec"), _value(config, MTP)
    drafter, scheduler = engine_drafter(*asked), engine_scheduler(*asked)
    off = f"remove it, rollout.spec=off is the run without drafts, or with those of {OPTION}"
    _require(config, key, (drafter,), _OURS if spec.enabled else off)
    if scheduler is not None:
        _require(config, f"{_ENGINE}.scheduler_cls", (scheduler,), _OURS)


def _check_drafting(config: DictConfig) -> None:
    """What goes without drafts and not with them."""
    if _has_recurrent_state(config):
        raise ConfigError(f"rollout.spec=sam: {RECURRENT}")
    if _value(config, f"{_ENGINE}.async_scheduling") and _has_v1(config):
        only_v1 = (
            f"vLLM {version()} has model runner V1 for this model, which does not schedule asynchronously"
        )
        _require(config, f"{_ENGINE}.async_scheduling", (None, False), f"{only_v1} {_WITH_DRAFTS}")
    mode = _entry(config, f"{_ENGINE}.compilation_config", "cudagraph_mode")
    if mode == "FULL_DECODE_ONLY" and not _is_for_npus(config):  # there, drafts are filled up
        print(
            f"rollout_spec: {_ENGINE}.compilation_config.cudagraph_mode=FULL_DECODE_ONLY: steps with drafts "
            "run without CUDA graphs; take FULL_AND_PIECEWISE",
            file=sys.stderr,
        )
    blind = "disaggregated prefill is not supported: the decode engine does not see the requests' groups"
    _require(config, f"{_ROLLOUT}.disaggregation.enabled", (None, False), blind)
    if corpus := _value(config, "rollout.spec.corpus"):
        check_corpus(corpus)


def _check_speculating(config: DictConfig) -> None:
    """What verl and vLLM refuse with any `speculative_config`."""
    _require(config, f"{_ENGINE}.logits_processors", (None, []), f"vLLM runs none {_WITH_DRAFTS}")
    for name in ("override_generation_config", "generation_config"):
        if _entry(config, f"{_ENGINE}.{name}", "min_p"):
            raise ConfigError(f"{_ENGINE}.{name}.min_p: vLLM refuses min_p {_WITH_DRAFTS}")
    if _value(config, f"{_ROLLOUT}.checkpoint_engine.backend") == "delta_sharded":
        raise ConfigError(
            f"{_ROLLOUT}.checkpoint_engine.backend=delta_sharded: verl's delta weight transfer refuses any "
            "speculative_config"
        )


def _check_model_drafter(config: DictConfig, spec: SpecConfig, drafter: Mapping[str, Any]) -> None:
    own = _value(config, f"rollout.spec.{OPTION}")
    name = f"rollout.spec.{OPTION}" if own else f"{MTP}.enable_rollout"
    is_ours = spec.enabled or spec.coupled
    if not own and not is_ours:
        return  # verl's own run
    if not own and _model_fields(config).get("model_type") in _WHOLE_HEADS:
        raise ConfigError(f"{name}: vLLM's MTP head of this model takes no weight sync in parts")
    if is_ours:
        _refuse_beside_model(config, spec, name)
        _refuse_head(config, spec, drafter, name)
    if own:
        _check_sizes(config, own, name, needs_positions=is_ours)
    trains_heads = _value(config, "actor_rollout_ref.actor.strategy") == "megatron"
    load_format = _value(config, f"{_ROLLOUT}.load_format")
    if (own or not trains_heads) and "dummy" in load_format:
        raise ConfigError(
            f"{_ROLLOUT}.load_format={load_format}: no weight sync brings the drafter's weights, so it would "
            "draft with random ones; set auto"
        )
    if own or not trains_heads or not _value(config, f"{MTP}.enable_train"):
        print(
            f"rollout_spec: {name}: this drafter is not trained, so it is right less often as the policy "
            "changes" + (": see rollout/spec_model_acceptance_rate" if spec.enabled else ""),
            file=sys.stderr,
        )


def _refuse_beside_model(config: DictConfig, spec: SpecConfig, name: str) -> None:
    """What an engine with a model that drafts refuses too, as its own vllm/checks.py says."""
    # Beside a small model vLLM 0.24 switches it off by itself, beside a head not.
    synchronous = (None, False) if _drafts_by_small_model(config) else (False,)
    for is_so, reason in (
        (
            not spec.coupled,
            "its drafts share the target's noise, which rollout.spec.verify=standard does not have",
        ),
        (_is_for_npus(config), "vllm-ascend has a model runner of its own"),
        (_has_adapters(config), "LoRA: a draft's token has no adapter of its own"),
        (_has_ranks_of_experts(config), "data-parallel ranks of experts would not run the same passes of it"),
        (
            not spec.enabled
            and _value(config, f"{_ENGINE}.async_scheduling") not in synchronous
            and _has_v1(config),
            f"set {_ENGINE}.async_scheduling=False: vLLM {version()} has model runner V1 for this model",
        ),
    ):
        if is_so:
            raise ConfigError(f"{name}: {reason}")


def _refuse_head(config: DictConfig, spec: SpecConfig, drafter: Mapping[str, Any], name: str) -> None:
    """As above, what the config.json of an MTP head shows; engines say so of one that cannot be looked at."""
    if drafter["method"] != "mtp":
        return
    head = _fields(str(drafter["model"])) if "model" in drafter else _model_fields(config)
    num_tokens = spec.num_speculative_tokens if spec.enabled else drafter["num_speculative_tokens"]
    has_modules = drafts_by_modules() and min(_num_modules(head), num_tokens) > 1
    reason = _REFUSED_HEADS.get(head.get("model_type", ""), MODULES if has_modules else None)
    if reason:
        raise ConfigError(f"{name}: {reason}")


def _num_modules(head: Mapping[str, Any]) -> int:
    """As vLLM counts them: of a MiMo V2 it takes one."""
    [architecture, *_] = head.get("architectures") or [""]
    return 1 if architecture.startswith("MiMoV2") else head.get("num_nextn_predict_layers") or 1


def _check_sizes(config: DictConfig, own: Mapping[str, Any], name: str, needs_positions: bool) -> None:
    """See that a model of the user's own fits the policy; engines say so of what cannot be looked at."""
    drafter, policy = _of_text(_fields(str(own["model"]))), _of_text(_model_fields(config))
    sizes = [fields.get("vocab_size") for fields in (drafter, policy)]
    if own["method"] == "draft_model" and None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(f"{name}: its vocabulary is of {sizes[0]} tokens, the policy's of {sizes[1]}")
    num, most = _num_positions(drafter), _value(config, f"{_ROLLOUT}.max_model_len")
    most = most or policy.get("max_position_embeddings")  # as verl has it
    if needs_positions and num and most and num < most:
        raise ConfigError(
            f"{name}: its {num} positions are fewer than {_ROLLOUT}.max_model_len={most}: lower that"
        )


def _num_positions(fields: Mapping[str, Any]) -> int | None:
    """As vLLM reads them; None where it reads more than this does."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    is_scaled = "factor" in rope and rope.get("rope_type", rope.get("type")) != "llama3"
    return None if is_scaled else fields.get("model_max_length") or fields.get("max_position_embeddings")


def _has_v1(config: DictConfig) -> bool:
    """Whether vLLM takes model runner V1; its engine says so where the model cannot be looked at."""
    if asked := os.environ.get("VLLM_USE_V2_MODEL_RUNNER"):
        return asked == "0"
    if _is_for_npus(config) or _has_adapters(config):
        return True  # as `mrv2_misfits` says
    if _drafts_by_small_model(config) and not v2_has_draft_models():
        return True
    fields, with_v2 = _model_fields(config), v2_architectures()
    return bool(fields) and with_v2 is not None and with_v2.isdisjoint(fields.get("architectures") or ())


def _drafts_by_small_model(config: DictConfig) -> bool:
    return bool(_value(config, f"rollout.spec.{OPTION}.method") == "draft_model")


def _has_adapters(config: DictConfig) -> bool:
    """Whether the engine has them: verl merges them into the weights where it is asked to."""
    model = _value(config, "actor_rollout_ref.model")
    lora = model.get("lora") or {}
    return not lora.get("merge") and bool(lora.get("rank") or model.get("lora_rank"))


def _has_ranks_of_experts(config: DictConfig) -> bool:
    num_ranks = _value(config, f"{_ROLLOUT}.data_parallel_size") or 1
    return num_ranks > 1 and any(map(_of_text(_model_fields(config)).get, _NUM_EXPERTS))


def _has_recurrent_state(config: DictConfig) -> bool:
    fields = _of_text(_model_fields(config))
    only_attends = set(fields.get("layer_types") or ()) == {"attention"}  # as the smallest Granite
    return not only_attends and any(map(fields.get, _STATES))


def _model_fields(config: DictConfig) -> dict[str, Any]:
    """The policy's config.json; nothing where it cannot be looked at."""
    return _fields(str(_value(config, "actor_rollout_ref.model.path")))


def _fields(model: str) -> dict[str, Any]:
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(os.path.expanduser(model))[0] or {}
    except (OSError, ValueError):
        return {}


def _of_text(fields: dict[str, Any]) -> dict[str, Any]:
    """Of a model that also sees, the part that reads text."""
    return fields.get("text_config") or fields


def _is_for_npus(config: DictConfig) -> bool:
    return _value(config, "trainer.device") == "npu" or importlib.util.find_spec("torch_npu") is not None


def _entry(config: DictConfig, key: str, name: str) -> Any:
    """Of a dictionary of vLLM's; verl takes these as JSON text too."""
    value = _value(config, key)
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):  # else a path, or a mistake that vLLM names
            value = json.loads(value)
    return value.get(name) if isinstance(value, Mapping) else None


def _require(config: DictConfig, key: str, allowed: Sequence[Any], reason: str) -> None:
    value = _value(config, key)
    if value not in allowed:
        raise ConfigError(f"{key}={value}: {reason}")


def _value(config: DictConfig, key: str) -> Any:
    """Plain Python; None where there is no such key."""
    node = OmegaConf.select(config, key)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _check_replay_buffer(config: DictConfig) -> None:
    buffer = _value(config, "trainer.v1.sampler.custom_sampler.path")
    max_batches = _value(config, "algorithm.filter_groups.max_num_gen_batches")
    if buffer == REPLAY_BUFFER and (type(max_batches) is not int or max_batches < 1):
        raise ConfigError(
            f"algorithm.filter_groups.max_num_gen_batches={max_batches}: must be at least 1 with the "
            "replay buffer of +rollout_spec_replay_buffer=bounded"
        )


def _check_routing(config: DictConfig, spec: SpecConfig) -> None:
    if spec.routing == "verl" or _num_places(config) == 1:
        return
    group = "rollout.spec.routing=group, the default with sam,"
    if not launch.verl_is_older() and _value(config, _ROUTER) != _group_router():
        raise ConfigError(
            f"{_ROUTER}: {group} sets it; for another router take rollout.spec.routing=verl. "
            "It is a group of Hydra: choose it on the command line, or in a defaults list "
            "(`/rollout.spec.routing`)"
        )
    if _value(config, f"{_ROLLOUT}.full_determinism"):
        raise ConfigError(
            f"{_ROLLOUT}.full_determinism: {group} places requests by load, so in another way every time; "
            "take rollout.spec.routing=verl"
        )


def _fit_router(config: DictConfig) -> None:
    """Take our router out where there is nothing to choose, or nothing in verl that would ask it."""
    if launch.verl_is_older():
        del OmegaConf.select(config, _ROLLOUT)[_ROUTER.rpartition(".")[2]]
        if _num_places(config) > 1:
            print(
                "rollout_spec: this verl has no router, so it spreads the samples of a prompt over the "
                "engines; rollout.spec.routing=group holds within an engine only",
                file=sys.stderr,
            )
    elif _num_places(config) == 1:
        OmegaConf.update(config, _ROUTER, None)


def _group_router() -> str:
    return config_file("rollout_spec_router/group.yaml")


def _num_places(config: DictConfig) -> int:
    """Where a request can go: the data-parallel ranks of all engines."""
    nodes = ["trainer"]
    if _value(config, "trainer.v1.trainer_mode") == "separate_async":
        nodes.append(_ROLLOUT)  # these engines are there beside the trainer's
    num_devices = sum(
        _value(config, f"{on}.nnodes") * _value(config, f"{on}.n_gpus_per_node") for on in nodes
    )
    sizes = [_value(config, f"{_ROLLOUT}.{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline")]
    return num_devices // math.prod(sizes)
