"""Checks the whole configuration, on the driver, before Ray starts."""

import importlib.util
import os

from omegaconf import DictConfig, OmegaConf

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.drafting.corpus import read_corpus
from rollout_spec.verl import model_drafter
from rollout_spec.verl.check_engine import check_engine
from rollout_spec.verl.settings import (
    ENGINE,
    MTP,
    ROLLOUT,
    ROUTER_NAME,
    V1_TRAINER_ONLY,
    group_router_file,
    number,
    require,
    say,
    value,
)
from rollout_spec.vllm import OPTIONS_KEY
from rollout_spec.vllm.versions import refuse_old_version

MODES = ("sync", "colocate_async", "separate_async")  # of verl's V1 trainer
_ROUTER = f"{ROLLOUT}.router_config_path"
_OURS = "rollout.spec sets it, leave it alone"


def check_config(config: DictConfig) -> SpecConfig:
    """The options under `rollout.spec` in verl's whole configuration.

    Raises ConfigError: an option is unknown or out of range, or cannot be combined with another setting.
    """
    options, mtp = value(config, "rollout.spec"), value(config, MTP)
    if not isinstance(options, dict):
        raise ConfigError(
            f"rollout.spec={options!r}: not a configuration group. Is rollout-spec's plugin for verl loaded "
            "(VERL_USE_EXTERNAL_PLUGINS)? Run `rollout-spec doctor`."
        )
    ours = {name: option for name, option in options.items() if name != model_drafter.OPTION}
    SpecConfig.from_mapping(ours, model_drafter.OPTION)
    model_drafter.check_model_drafter(options, mtp)
    spec = SpecConfig.from_mapping(model_drafter.spec_options(options, mtp))
    refuse_old_version()
    # verl's main branch before 0.9.1: its requests do not wait for a weight sync.
    if importlib.util.find_spec("verl.workers.rollout.router") is None:
        raise ConfigError("this verl has no verl.workers.rollout.router: take verl 0.9.1 or later")
    _check_trainer(config)
    _check_routing(config, spec)
    _check_arguments(config, spec)
    if spec.enabled:
        _check_drafting(config)
    check_engine(config, spec)
    return spec


def refuse_plain_options(config: DictConfig) -> None:
    """Raise a ConfigError for our options where they are plain values, which verl does not read."""
    of_rollout = OmegaConf.select(config, "rollout")
    names = set(of_rollout) if isinstance(of_rollout, DictConfig) else set()
    found = [str(key) for key in config if str(key).startswith("rollout.spec")]
    found += ["rollout.spec"] * ("spec" in names and "checked" not in names)
    found += [f"{ROLLOUT}.spec"] * (OmegaConf.select(config, f"{ROLLOUT}.spec") is not None)
    if found:
        raise ConfigError(
            f"{found[0]} in a YAML file: a plain value there does nothing. Put `- /rollout.spec: sam` last "
            "into the file's defaults list, or +rollout.spec=sam on the command line; its options go below "
            "`rollout: {spec: ...}`"
        )


def _check_trainer(config: DictConfig) -> None:
    """The reference run needs such a trainer too: it is measured in the same way."""
    require(config, f"{ROLLOUT}.name", ("vllm",), f"rollout.spec needs vLLM: set {ROLLOUT}.name=vllm")
    require(config, f"{ROLLOUT}.pipeline_model_parallel_size", (None, 1), "must be 1 with rollout.spec")
    for section in ("async_training", "rollout.nnodes"):  # fully_async has the one, one_step_off the other
        if value(config, section) is not None:
            raise ConfigError(f"{section}: {V1_TRAINER_ONLY}")
    require(config, "trainer.use_v1", (True,), V1_TRAINER_ONLY)
    mode = value(config, "trainer.v1.trainer_mode") or "sync"
    if mode not in MODES:
        raise ConfigError(f"trainer.v1.trainer_mode={mode}: must be {', '.join(MODES)} with rollout.spec")


def _check_arguments(config: DictConfig, spec: SpecConfig) -> None:
    """The group has set the engine's arguments, and nothing else contradicts them."""
    asked = value(config, "rollout.spec"), value(config, MTP)
    if value(config, f"{ENGINE}.additional_config.{OPTIONS_KEY}") != model_drafter.spec_options(*asked):
        raise ConfigError(f"{ENGINE}.additional_config.{OPTIONS_KEY}: {_OURS}")
    speculative = model_drafter.engine_speculative_config(*asked)
    scheduler = model_drafter.engine_scheduler(*asked)
    off = f"remove it; with rollout.spec=off only rollout.spec.{model_drafter.OPTION} may draft"
    require(config, f"{ENGINE}.speculative_config", (speculative,), _OURS if spec.enabled else off)
    if scheduler is not None:
        require(config, f"{ENGINE}.scheduler_cls", (scheduler,), _OURS)
    backend = f"{ROLLOUT}.checkpoint_engine.backend"
    if speculative is not None and value(config, backend) == "delta_sharded":
        refusal = "verl's delta weight transfer refuses any speculative_config"
        raise ConfigError(f"{backend}=delta_sharded: {refusal}")


def _check_drafting(config: DictConfig) -> None:
    """What a run without drafts may have, and one with them may not."""
    blind = "disaggregated prefill is not supported: the decode engine does not see the requests' groups"
    require(config, f"{ROLLOUT}.disaggregation.enabled", (None, False), blind)
    if corpus := value(config, "rollout.spec.corpus"):
        if not os.path.isabs(corpus):
            raise ConfigError(f"rollout.spec.corpus={corpus!r}: must be an absolute path, on every node")
        read_corpus(corpus)


def _check_routing(config: DictConfig, spec: SpecConfig) -> None:
    if spec.routing == "verl" or num_places(config) == 1:
        return
    router = value(config, _ROUTER)
    if value(config, f"{ROLLOUT}.router_strategy") == ROUTER_NAME:
        router = group_router_file()
    if router is None:  # ours is never
        raise ConfigError(
            f"{_ROUTER}=null: rollout.spec had set it. In a defaults list, /rollout.spec must come after "
            "ppo_trainer; on the command line, remove your override"
        )
    if router != group_router_file():
        say(
            f"{_ROUTER}={router}: not the router of rollout.spec.routing=group (a group of Hydra, which sets "
            "it on the command line or in a defaults list). So the samples of a prompt may go to several "
            "engines, which draft less at first; engines share what was said all the same"
        )
    if value(config, f"{ROLLOUT}.full_determinism"):
        raise ConfigError(
            f"{ROLLOUT}.full_determinism: rollout.spec.routing=group (the default with sam) sends requests "
            "by load, so to other engines in every run; take rollout.spec.routing=verl"
        )


def num_places(config: DictConfig) -> int:
    """Where a request can go: the data-parallel ranks of all engines."""
    nodes = ["trainer"]
    if value(config, "trainer.v1.trainer_mode") == "separate_async":
        nodes.append(ROLLOUT)  # its engines come on top of the trainer's
    devices = sum(number(config, f"{on}.nnodes") * number(config, f"{on}.n_gpus_per_node") for on in nodes)
    return devices // number(config, f"{ROLLOUT}.tensor_model_parallel_size")
