"""What an engine gets: a model, one that drafts beside it, prompts, arguments for this machine."""

import json
from pathlib import Path
from typing import Any

from rollout_spec.config import UserError
from rollout_spec.vllm.options import MODEL_METHODS

# Small enough for a machine with little memory, no warm-up with thousands of tokens, and blocks so small that
# the samples of one short prompt share its prefill.
_CPU = {
    "kv_cache_memory_bytes": 1 << 29, "max_num_batched_tokens": 512, "enforce_eager": True, "block_size": 32
}  # fmt: skip
MODEL_DRAFTER = (  # for `add_options`; `model_drafter` reads it
    "--model-drafter", str, "METHOD:MODEL:N", None,
    "a model that drafts N tokens: eagle3:path/to/head:3; mtp::1 for the policy's own head",
)  # fmt: skip


def model_drafter(text: str, most: int) -> dict[str, Any]:
    """vLLM's `speculative_config` of METHOD:MODEL:NUMBER; without MODEL, of the policy's own head.
    `most`: the largest NUMBER.

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
    found: dict[str, Any] = {"method": method, "num_speculative_tokens": int(given)}
    return found | ({"model": model_folder(Path(model), f"--model-drafter {text}")} if model else {})


def model_folder(model: Path, option: str = "") -> str:
    """A Hugging Face folder, of `--model` or of another option."""
    if not (model / "config.json").is_file():
        option = option or f"--model {model}"
        raise UserError(f"{option}: no Hugging Face folder (config.json is missing)")
    return str(model)


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. Raises UserError: it is no JSON object."""
    try:
        fields = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{model}/config.json: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{model}/config.json: must be a JSON object")
    return fields


def device_arguments() -> dict[str, Any]:
    """vLLM's arguments for this machine: its own defaults where there is an accelerator."""
    import torch

    return {} if torch.accelerator.is_available() else dict(_CPU)


def prompt_rows(option: str, file: Path, num_rows: int) -> list[dict[str, Any]]:
    """The first rows of the verl parquet file that `option` names."""
    import pyarrow.parquet

    from rollout_spec.predict.row_fields import is_chat

    if not file.is_file():
        raise UserError(f"{option} {file}: no such file")
    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (ValueError, OSError) as error:
        raise UserError(f"{option} {file}: cannot be read as parquet: {error}") from error
    if not rows or "prompt" not in rows[0]:
        raise UserError(f"{option} {file}: no column `prompt`, or no row")
    for number, row in enumerate(rows[:num_rows], start=1):
        if not is_chat(row["prompt"]) or not all("role" in message for message in row["prompt"]):
            raise UserError(f"{option} {file}: row {number}: prompt: must be a list of messages")
    return rows[:num_rows]


def tokenized(model: str, rows: list[dict[str, Any]]) -> list[list[int]]:
    """The token ids of the rows' chats, each ready for the answer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model}: its tokenizer cannot be read: {error}") from error
    if not tokenizer.chat_template:
        raise UserError(f"--model {model}: its tokenizer has no chat template")
    chats = [list(row["prompt"]) for row in rows]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=False)
