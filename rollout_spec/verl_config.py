"""Checks a verl configuration that asks for `rollout.spec`, on the driver, before Ray starts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from rollout_spec import verl_plugin
from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.corpus import check_corpus
from rollout_spec.hydra_plugin import config_file

OPTIONS_KEY = "rollout_spec"  # in vLLM's `additional_config`; see vllm_proposer
SAMPLER = "pkg://rollout_spec.verl_sampler"
_ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"
_ROUTER = "actor_rollout_ref.rollout.router_config_path"


class CheckConfig(Callback):
    """Hydra's callback, named by the `rollout.spec` group: it runs where the group is used, only there."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Tells a Ray that runs already what is asked for: its processes have not this one's environment."""
        method = OmegaConf.select(config, "rollout.spec.method")
        with open_dict(config):
            OmegaConf.update(
                config, f"{_VARIABLES}.{verl_plugin.ASKED_VARIABLE}", str(method), force_add=True
            )

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        # Hydra turns an Exception in a callback into a warning; SystemExit it lets through.
        try:
            _check_plugin()
            spec = check_config(config)
        except ConfigError as error:
            print(f"rollout_spec: {error}", file=sys.stderr)
            raise SystemExit(2) from error
        os.environ[verl_plugin.ASKED_VARIABLE] = spec.method


def _check_plugin() -> None:
    if verl_plugin.failure is not None:
        raise ConfigError(f"{verl_plugin.failure}; run `rollout-spec doctor`")


def check_config(config: DictConfig) -> SpecConfig:
    """The options under `rollout.spec`.

    Args:
        config: verl's whole configuration.

    Raises:
        ConfigError: an option is unknown or out of range, or does not go together with another setting.
    """
    node = OmegaConf.select(config, "rollout.spec")
    if not OmegaConf.is_dict(node):
        raise ConfigError(
            f"rollout.spec={node!r}: not a configuration group. Is rollout-spec's plugin for verl loaded "
            "(VERL_USE_EXTERNAL_PLUGINS)? Run `rollout-spec doctor`."
        )
    options = OmegaConf.to_container(node, resolve=True)
    if not isinstance(options, dict):
        raise ConfigError("rollout.spec: must be a mapping")
    spec = SpecConfig.from_mapping({str(key): value for key, value in options.items()})
    _check_engine(config, spec)
    if spec.coupled:
        _check_coupled(config)
    _check_sampler(config)
    _check_trainer(config)
    _check_routing(config, spec)
    if spec.enabled:
        _check_drafting(config)
        if spec.corpus:
            check_corpus(spec.corpus)
    return spec


def _check_engine(config: DictConfig, spec: SpecConfig) -> None:
    engine = OmegaConf.select(config, "actor_rollout_ref.rollout.name")
    if engine != "vllm":
        raise ConfigError(f"actor_rollout_ref.rollout.name={engine}: rollout.spec needs vllm")
    node = OmegaConf.select(config, _ENGINE)
    kwargs: Mapping[str, Any] = OmegaConf.to_container(node, resolve=True) if node is not None else {}
    options = (kwargs.get("additional_config") or {}).get(OPTIONS_KEY)
    if options is None or SpecConfig.from_mapping(options) != spec:
        raise ConfigError(f"{_ENGINE}.additional_config.{OPTIONS_KEY}: rollout.spec sets it, leave it alone")
    speculative = kwargs.get("speculative_config")
    if not spec.enabled:
        if speculative is not None:
            raise ConfigError(
                f"{_ENGINE}.speculative_config: remove it, rollout.spec=off is the run without drafts"
            )
        return
    expected = {
        "method": "custom_class",
        "model": "rollout_spec.vllm_proposer.SuffixProposer",
        "num_speculative_tokens": spec.num_speculative_tokens,
    }
    if not isinstance(speculative, Mapping):
        raise ConfigError(
            f"{_ENGINE}.speculative_config={speculative!r}: rollout.spec sets it, leave it alone"
        )
    for key, value in speculative.items():
        if key == "num_speculative_tokens_per_batch_size":
            raise ConfigError(f"{_ENGINE}.speculative_config.{key}: use rollout.spec.batch_threshold instead")
        if key not in expected or expected[key] != value:
            raise ConfigError(f"{_ENGINE}.speculative_config.{key}={value!r}: rollout.spec sets this section")
    if kwargs.get("scheduler_cls") != "rollout_spec.vllm_scheduler.CountingScheduler":
        raise ConfigError(f"{_ENGINE}.scheduler_cls={kwargs.get('scheduler_cls')!r}: rollout.spec sets it")
    if kwargs.get("logits_processors"):
        raise ConfigError(f"{_ENGINE}.logits_processors: vLLM runs none together with speculative decoding")
    for key in ("override_generation_config", "generation_config"):
        value = _parsed(kwargs.get(key))
        if isinstance(value, Mapping) and value.get("min_p"):
            raise ConfigError(f"{_ENGINE}.{key}.min_p: vLLM refuses min_p together with speculative decoding")


def _parsed(value: Any) -> Any:
    """verl takes vLLM's dictionaries as JSON text too."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(json.JSONDecodeError):  # else a path, or a mistake that vLLM names
        return json.loads(value)
    return value


def _check_coupled(config: DictConfig) -> None:
    manager = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    value = OmegaConf.select(config, manager)
    if value != "rollout_spec.verl_agent_loop.KeyedAgentLoopManager":
        raise ConfigError(
            f"{manager}={value}: rollout.spec sets it, because verify=coupled needs every sample's number; "
            "leave it alone or set rollout.spec.verify=standard"
        )


def _check_sampler(config: DictConfig) -> None:
    sampler = OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path")
    max_batches = OmegaConf.select(config, "algorithm.filter_groups.max_num_gen_batches")
    if sampler == SAMPLER and (type(max_batches) is not int or max_batches < 1):
        raise ConfigError(
            f"algorithm.filter_groups.max_num_gen_batches={max_batches}: must be at least 1 with the "
            "sampler of +rollout_spec_sampler=bounded"
        )


def _check_routing(config: DictConfig, spec: SpecConfig) -> None:
    if spec.routing == "default":
        return
    if OmegaConf.select(config, _ROUTER) != config_file(f"rollout_spec_router/{spec.routing}.yaml"):
        raise ConfigError(
            f"rollout.spec.routing={spec.routing}: does not go together with another {_ROUTER}. It is a "
            "group of Hydra: choose it on the command line, or in a defaults list (`/rollout.spec.routing`)"
        )
    if OmegaConf.select(config, "actor_rollout_ref.rollout.full_determinism"):
        raise ConfigError(
            f"rollout.spec.routing={spec.routing}: places requests by load, so in another way every time; "
            "actor_rollout_ref.rollout.full_determinism needs rollout.spec.routing=default"
        )


def _check_trainer(config: DictConfig) -> None:
    """What is measured in each step, with drafts and without, needs a trainer whose steps have their own."""
    if not OmegaConf.select(config, "trainer.use_v1"):
        raise ConfigError("trainer.use_v1=false: rollout.spec supports verl's V1 trainer only")
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    if mode not in (None, "sync"):
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode}: rollout.spec supports sync only; the rollouts of an "
            "asynchronous trainer overlap its steps, so that no step's counts would be its own"
        )


def _check_drafting(config: DictConfig) -> None:
    select = lambda key: OmegaConf.select(config, key)  # noqa: E731
    if select("actor_rollout_ref.model.mtp.enable_rollout") and select("actor_rollout_ref.model.mtp.enable"):
        raise ConfigError(
            "actor_rollout_ref.model.mtp.enable_rollout: MTP drafts already, use one or the other"
        )
    if select("actor_rollout_ref.rollout.disaggregation.enabled"):
        raise ConfigError(
            "actor_rollout_ref.rollout.disaggregation.enabled: disaggregated prefill is not supported "
            "with rollout.spec (the decode engine does not see the requests' groups)"
        )
    if select("actor_rollout_ref.rollout.checkpoint_engine.backend") == "delta_sharded":
        raise ConfigError(
            "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded: verl's delta weight transfer "
            "refuses any speculative_config"
        )
    for name in ("pipeline_model_parallel_size", "data_parallel_size"):
        if select(f"actor_rollout_ref.rollout.{name}") not in (None, 1):
            raise ConfigError(f"actor_rollout_ref.rollout.{name}: must be 1 with rollout.spec")
