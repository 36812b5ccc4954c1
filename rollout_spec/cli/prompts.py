"""Prompts that an engine serves: chats of a verl parquet file, and their token ids."""

from pathlib import Path
from typing import Any

from rollout_spec.config import UserError


def prompt_rows(option: str, file: Path, num_rows: int) -> list[dict[str, Any]]:
    """The first rows of the verl parquet file that `option` names."""
    import pyarrow.parquet

    from rollout_spec.predict.dumps import is_chat

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
    return [
        tokenizer.apply_chat_template(
            list(row["prompt"]), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in rows
    ]
