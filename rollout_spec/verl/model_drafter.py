"""A model that drafts beside the text: how verl's configuration asks for it, and what vLLM is told of it.

The policy's own MTP head is asked for as verl has it; a head or a small model of the user's own by
`rollout.spec.model_drafter`. It gets as many tokens there as `model_tokens` gives it in plain vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.vllm import speculative_config
from rollout_spec.vllm.options import MODEL_METHODS, SCHEDULER

OPTION = "model_drafter"
_OWN = f"rollout.spec.{OPTION}"
MTP = "actor_rollout_ref.model.mtp"
_KEYS = ("method", "model", "num_speculative_tokens")
_DEFAULT = {"num_speculative_tokens": SpecConfig.model_tokens}
_Options = Mapping[str, Any]  # verl's, plain or of OmegaConf


def asked_drafter(spec: _Options, mtp: _Options | None) -> dict[str, Any] | None:
    """vLLM's method and model, and the model's tokens per step; None where no model drafts.

    Args:
        spec: what is under `rollout.spec`.
        mtp: what is under MTP.
    """
    if spec.get(OPTION):
        return _DEFAULT | dict(spec[OPTION])
    if mtp is not None and _drafts(mtp):
        return {name: mtp[name] for name in ("method", "num_speculative_tokens")}
    return None


def engine_options(spec: _Options, mtp: _Options | None) -> dict[str, Any]:
    """An engine's options."""
    options = {name: value for name, value in spec.items() if name != OPTION}
    drafter = asked_drafter(spec, mtp) if spec["method"] != "off" else None
    return options | ({"model_tokens": drafter["num_speculative_tokens"]} if drafter else {})


def engine_drafter(spec: _Options, mtp: _Options | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config`; None leaves it to verl."""
    drafter = asked_drafter(spec, mtp)
    if spec["method"] == "off":
        return drafter if spec.get(OPTION) else None
    num_speculative_tokens = spec["num_speculative_tokens"]
    if drafter is None:
        return speculative_config(num_speculative_tokens)
    return drafter | {"num_speculative_tokens": num_speculative_tokens}


def engine_scheduler(spec: _Options, mtp: _Options | None) -> str | None:
    """vLLM's `scheduler_cls`, which counts drafts; None leaves it to vLLM where nothing drafts."""
    return SCHEDULER if spec["method"] != "off" or asked_drafter(spec, mtp) else None


def check_drafter(spec: _Options, mtp: _Options | None) -> None:
    """See that what is asked for can be told to vLLM.

    Raises:
        ConfigError: naming the option.
    """
    default, own = SpecConfig.model_tokens, spec.get(OPTION)
    if spec.get("model_tokens", default) != default:
        raise ConfigError(
            f"rollout.spec.model_tokens={spec['model_tokens']}: with verl, set num_speculative_tokens of "
            f"{_OWN} or of {MTP}"
        )
    if own is not None:
        _check_own(own, mtp)
    elif spec["method"] == "off" or mtp is None or not _drafts(mtp):
        return
    elif mtp["method"] != "mtp":
        raise ConfigError(f"{MTP}.method={mtp['method']}: must be mtp with rollout.spec")
    num = (own or mtp or {}).get("num_speculative_tokens", default)
    most = spec["num_speculative_tokens"]
    if type(num) is not int or not 1 <= num <= most:
        raise ConfigError(
            f"{MTP if own is None else _OWN}.num_speculative_tokens={num}: must be between 1 and {most}, "
            "which is rollout.spec.num_speculative_tokens"
        )


def _check_own(own: Any, mtp: _Options | None) -> None:
    if not isinstance(own, Mapping) or {*_KEYS[:2]} - {*own} or {*own} - {*_KEYS}:
        raise ConfigError(
            f"{_OWN}={own}: must have the keys {', '.join(_KEYS)}, of which it may lack the last"
        )
    if _drafts(mtp):
        raise ConfigError(f"{_OWN}: {MTP}.enable_rollout has a model draft already, use one or the other")
    if own["method"] not in MODEL_METHODS:
        raise ConfigError(f"{_OWN}.method={own['method']}: must be one of {', '.join(MODEL_METHODS)}")
    path = str(own["model"])
    if not (os.path.isabs(path) and os.path.isfile(os.path.join(path, "config.json"))):
        raise ConfigError(f"{_OWN}.model={path}: must be the absolute path of a folder with a config.json")


def _drafts(mtp: _Options | None) -> bool:
    return bool(mtp and mtp["enable"] and mtp["enable_rollout"])
