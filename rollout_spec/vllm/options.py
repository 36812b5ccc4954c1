"""An engine's options, read from vLLM's configuration, and the names of ours there; imports no vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout_spec.config import ConfigError, SpecConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTIONS_KEY = "rollout_spec"  # in vLLM's `additional_config`
PROPOSER = "rollout_spec.vllm.SuffixProposer"
# Methods of vLLM's `speculative_config` by which a model drafts token by token.
MODEL_METHODS = ("mtp", "eagle", "eagle3", "draft_model")
SCHEDULER = "rollout_spec.vllm.scheduler.SpecScheduler"
ASYNC_SCHEDULER = "rollout_spec.vllm.scheduler.AsyncSpecScheduler"
AHEAD_SCHEDULER = "rollout_spec.vllm.mrv2.ahead.AheadScheduler"


def speculative_config(num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's option of this name, for our proposer."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_speculative_tokens}


def asked_options(additional_config: Any) -> Mapping[str, Any] | None:
    """What stands under our key in vLLM's option of this name; None where nothing does.

    Raises ConfigError: it is not a dictionary.
    """
    if not isinstance(additional_config, Mapping):
        return None
    options: Any = additional_config.get(OPTIONS_KEY)
    if options is not None and not isinstance(options, Mapping):
        asked = f"additional_config[{OPTIONS_KEY!r}]={options!r}"
        raise ConfigError(f"{asked}: must be a dictionary of options, such as {{'history': 0}}")
    return options


def check_spelling(additional_config: Any) -> None:
    """Raise a ConfigError for a key in vLLM's option of this name that is nearly ours."""
    keys = map(str, additional_config) if isinstance(additional_config, Mapping) else ()
    for key in difflib.get_close_matches(OPTIONS_KEY, keys, cutoff=0.8):
        if key != OPTIONS_KEY:
            raise ConfigError(f"additional_config has the key {key!r}: write {OPTIONS_KEY!r}")


def names_our_proposer(vllm_config: VllmConfig) -> bool:
    """Whether `speculative_config` is that of our drafter alone."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.model == PROPOSER


def has_model_drafter(vllm_config: VllmConfig) -> bool:
    """Whether `speculative_config` is that of a model, with our drafter beside it or not."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method in MODEL_METHODS


def asked_method(vllm_config: VllmConfig) -> str:
    """Our option `method`; "off" where nothing of ours is asked for."""
    options = asked_options(vllm_config.additional_config)
    return "off" if options is None else options.get("method", "sam")


def drafts_with_model(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's own model drafter and ours draft together."""
    return has_model_drafter(vllm_config) and asked_method(vllm_config) == "sam"


def has_our_drafter(vllm_config: VllmConfig) -> bool:
    """Whether our drafter drafts, alone or beside a model."""
    return names_our_proposer(vllm_config) or drafts_with_model(vllm_config)


def engine_options(vllm_config: VllmConfig) -> SpecConfig | None:
    """The options of an engine; None where neither the drafter nor an option is asked for.

    Raises ConfigError: an option is unknown or out of range, or contradicts vLLM's own.
    """
    asked, is_ours = asked_options(vllm_config.additional_config), has_our_drafter(vllm_config)
    if asked is None and not is_ours:
        return None
    options = dict(asked or {})
    if is_ours:
        num = vllm_config.speculative_config.num_speculative_tokens
        if options.setdefault("num_speculative_tokens", num) != num:
            raise ConfigError(
                f"rollout.spec.num_speculative_tokens={options['num_speculative_tokens']} differs from "
                f"speculative_config.num_speculative_tokens={num}"
            )
    config = SpecConfig.from_mapping(options)
    method, drafter = f"rollout.spec.method={config.method}", "a speculative_config that names the drafter"
    if is_ours and not config.enabled:
        raise ConfigError(f"{method} together with {drafter}")
    if config.enabled and not is_ours:
        methods = ", ".join(MODEL_METHODS)
        raise ConfigError(f"{method} without {drafter}, or one of the methods {methods}")
    return config
