"""vLLM's arguments for options of `rollout.spec`, and for a model that drafts beside them."""

from collections.abc import Mapping
from typing import Any

from rollout_spec.config import SpecConfig
from rollout_spec.vllm import OPTIONS_KEY, speculative_config


def drafting_arguments(
    options: Mapping[str, Any], drafter: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """vLLM's arguments for fields of `rollout.spec`.

    Args:
        drafter: vLLM's `speculative_config` of a model that drafts beside ours.
    """
    options = {"untested_vllm": True, **options}  # by these engines a newer vLLM is judged
    num_speculative_tokens = SpecConfig(**options).num_speculative_tokens
    if drafter is None:
        speculative = speculative_config(num_speculative_tokens)
    else:
        speculative = {**drafter, "num_speculative_tokens": num_speculative_tokens}
        options = {**options, "model_tokens": drafter["num_speculative_tokens"]}
    return {"speculative_config": speculative, "additional_config": {OPTIONS_KEY: options}}
