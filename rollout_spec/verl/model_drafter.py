"""A model that drafts beside the text: how verl's configuration asks for it, and what vLLM is told of it.

The policy's own MTP head is asked for by verl's options, a head or a small model of the user's own by
`rollout.spec.model_drafter`. What goes with such a model, `check_engine` says.
"""

import os
from collections.abc import Mapping
from typing import Any

from rollout_spec.config import ConfigError, SpecConfig
from rollout_spec.verl.settings import MTP
from rollout_spec.vllm import speculative_config
from rollout_spec.vllm.options import MODEL_METHODS, SCHEDULER

OPTION = "model_drafter"
_OWN = f"rollout.spec.{OPTION}"
MODEL_TOKENS = f"with verl, set num_speculative_tokens of {_OWN} or of {MTP}"
_KEYS = ("method", "model", "num_speculative_tokens")
_Options = Mapping[str, Any]  # plain, or OmegaConf's


def asked_model(spec: _Options, mtp: _Options | None) -> dict[str, Any] | None:
    """vLLM's method and model, and the model's tokens per step; None where no model drafts. `spec` is what is
    under `rollout.spec`, `mtp` what is under `actor_rollout_ref.model.mtp`."""
    if spec.get(OPTION):
        return {"num_speculative_tokens": SpecConfig.model_tokens, **spec[OPTION]}
    if mtp is not None and _mtp_drafts(mtp):
        return {name: mtp[name] for name in ("method", "num_speculative_tokens")}
    return None


def spec_options(spec: _Options, mtp: _Options | None) -> dict[str, Any]:
    """The options of our drafter in an engine, for `SpecConfig`."""
    options = {name: value for name, value in spec.items() if name != OPTION}
    asked = asked_model(spec, mtp) if spec["method"] == "sam" else None
    return options | ({"model_tokens": asked["num_speculative_tokens"]} if asked else {})


def engine_speculative_config(spec: _Options, mtp: _Options | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config`; None leaves it to verl."""
    asked = asked_model(spec, mtp)
    if spec["method"] != "sam":
        return asked if spec.get(OPTION) else None
    num = {"num_speculative_tokens": spec["num_speculative_tokens"]}
    return (asked or speculative_config(**num)) | num


def engine_scheduler(spec: _Options, mtp: _Options | None) -> str | None:
    """vLLM's `scheduler_cls`, which counts drafts; None leaves it to vLLM where nothing drafts."""
    return SCHEDULER if spec["method"] == "sam" or asked_model(spec, mtp) else None


def check_model_drafter(options: _Options, mtp: _Options | None) -> None:
    """Raise a ConfigError for a model that is asked for in a wrong way; the arguments are `asked_model`'s."""
    if "model_tokens" in options:
        raise ConfigError(f"rollout.spec.model_tokens={options['model_tokens']}: {MODEL_TOKENS}")
    own = options.get(OPTION)
    if own is not None:
        _check_own(own, mtp)
        where, asked = _OWN, own
    elif options["method"] == "sam" and mtp and _mtp_drafts(mtp):
        if mtp["method"] != "mtp":
            raise ConfigError(f"{MTP}.method={mtp['method']}: must be mtp with rollout.spec")
        where, asked = MTP, mtp
    else:
        return
    num = asked.get("num_speculative_tokens", SpecConfig.model_tokens)
    most = options["num_speculative_tokens"]
    if type(num) is not int or not 1 <= num <= most:
        bounds = f"must be between 1 and {most}, the value of rollout.spec.num_speculative_tokens"
        raise ConfigError(f"{where}.num_speculative_tokens={num}: {bounds}")


def _check_own(own: Any, mtp: _Options | None) -> None:
    if not isinstance(own, Mapping) or {*_KEYS[:2]} - {*own} or {*own} - {*_KEYS}:
        raise ConfigError(f"{_OWN}={own}: must have the keys {', '.join(_KEYS)}; the last may be left out")
    if _mtp_drafts(mtp):
        both = f"{MTP}.enable_rollout asks for a model that drafts too"
        raise ConfigError(f"{_OWN}: {both}; use one of the two")
    if own["method"] not in MODEL_METHODS:
        raise ConfigError(f"{_OWN}.method={own['method']}: must be one of {', '.join(MODEL_METHODS)}")
    path = str(own["model"])
    if not (os.path.isabs(path) and os.path.isfile(os.path.join(path, "config.json"))):
        raise ConfigError(f"{_OWN}.model={path}: must be the absolute path of a folder with a config.json")


def _mtp_drafts(mtp: _Options | None) -> bool:
    return bool(mtp and mtp["enable"] and mtp["enable_rollout"])
