"""vLLM's arguments for options of `rollout.spec`, and for a model that drafts beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_spec.config import SpecConfig, UserError
from rollout_spec.vllm import OPTIONS_KEY, speculative_config
from rollout_spec.vllm.options import MODEL_METHODS


def model_drafter(text: str, most: int) -> dict[str, Any]:
    """vLLM's `speculative_config` of METHOD:MODEL:NUMBER; without MODEL, of the policy's own head.

    Args:
        most: draft tokens of a row.

    Raises UserError: it is no such text, or MODEL is no model.
    """
    (method, _, rest), (_, _, given) = text.partition(":"), text.rpartition(":")
    model = rest.removesuffix(given).removesuffix(":")
    is_number = given.isascii() and given.isdigit() and 1 <= int(given) <= most
    if method not in MODEL_METHODS or not is_number or not (model or method == "mtp"):
        raise UserError(
            f"--model-drafter {text}: must be METHOD:MODEL:NUMBER. METHOD: {', '.join(MODEL_METHODS)}. "
            f"MODEL: a folder (may be empty for mtp). NUMBER: the tokens that it drafts, 1 to {most}."
        )
    if model and not (Path(model) / "config.json").is_file():
        raise UserError(f"--model-drafter {text}: no Hugging Face folder (config.json is missing)")
    found: dict[str, Any] = {"method": method, "num_speculative_tokens": int(given)}
    return found | ({"model": model} if model else {})


def drafting_arguments(
    options: Mapping[str, Any], drafter: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """vLLM's arguments for fields of `rollout.spec`; with a drafter of `model_drafter`, beside that model."""
    options = {"untested_vllm": True, **options}  # by these engines a newer vLLM is judged
    num_speculative_tokens = SpecConfig(**options).num_speculative_tokens
    if drafter is None:
        speculative = speculative_config(num_speculative_tokens)
    else:
        speculative = {**drafter, "num_speculative_tokens": num_speculative_tokens}
        options = {**options, "model_tokens": drafter["num_speculative_tokens"]}
    return {"speculative_config": speculative, "additional_config": {OPTIONS_KEY: options}}
