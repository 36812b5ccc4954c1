"""Readers of verl's configuration and of models' config.json; our names in it; why the plugin has failed."""

import contextlib
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollout_spec.config import ConfigError

CONFIGS = "rollout_spec_configs"  # our package of them, for Hydra and for verl's router
MTP = "actor_rollout_ref.model.mtp"
ROLLOUT = "actor_rollout_ref.rollout"
ROUTER_NAME = "rollout_spec_group"  # in the registry of verl's branches, `configs/rollout_spec_registry`
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
V1_TRAINER_ONLY = (
    "rollout.spec supports verl's V1 trainer only; to roll out beside the training take "
    "trainer.use_v1=True with trainer.v1.trainer_mode=separate_async"
)

plugin_failure: str | None = None  # why this process has no plugin for verl


def group_router_file() -> str:
    """The absolute path of the packaged configuration with which verl takes `GroupRouter`."""
    return str(resources.files(CONFIGS).joinpath("rollout_spec_router/group.yaml"))


def value(config: DictConfig, key: str) -> Any:
    """Plain Python; None where there is no such key."""
    node = OmegaConf.select(config, key)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def require(config: DictConfig, key: str, allowed: Sequence[Any], reason: str) -> None:
    """Raise a ConfigError that names the key, unless its value is one of these."""
    found = value(config, key)
    if found not in allowed:
        raise ConfigError(f"{key}={found}: {reason}")


def number(config: DictConfig, key: str) -> int:
    """1 where there is none. Raises a ConfigError for text, such as `${oc.env:NAME}` gives."""
    found = value(config, key)
    if found is None:
        return 1
    if type(found) is not int:
        wanted = "must be a whole number, not text (`${oc.decode:...}` makes one)"
        raise ConfigError(f"{key}={found!r}: {wanted}")
    return found


@functools.cache
def say(text: str) -> None:
    """Once: a configuration is checked whenever it is resolved."""
    print(f"rollout_spec: {text}", file=sys.stderr)


def is_for_npus(config: DictConfig) -> bool:
    return value(config, "trainer.device") == "npu" or importlib.util.find_spec("torch_npu") is not None


def entry(config: DictConfig, key: str, name: str) -> Any:
    """An entry of a dictionary for vLLM, which verl also takes as JSON text; None if it has no such entry."""
    found = value(config, key)
    if isinstance(found, str):
        with contextlib.suppress(json.JSONDecodeError):  # else a path, or a mistake that vLLM names
            found = json.loads(found)
    return found.get(name) if isinstance(found, Mapping) else None


def policy_fields(config: DictConfig) -> Mapping[str, Any]:
    return model_fields(str(value(config, "actor_rollout_ref.model.path")))


def model_fields(model: str) -> Mapping[str, Any]:
    """A model's config.json; nothing where it cannot be read here."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(os.path.expanduser(model))[0] or {}
    except (OSError, ValueError):
        return {}


def of_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the language model, also of a model that takes images."""
    return fields.get("text_config") or fields
