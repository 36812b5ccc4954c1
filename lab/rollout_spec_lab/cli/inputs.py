"""What several commands of the laboratory take: models, prompts (by default the demo's), recordings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import models
from rollout_spec.cli.arguments import number, path
from rollout_spec.config import UserError
from rollout_spec_lab.demo.data import make_rows
from rollout_spec_lab.demo.model import make_model

if TYPE_CHECKING:
    from rollout_spec.trace import Rollout

# Options for `add_options`.
MODEL = ("--model", path, "DIR", None, "Hugging Face folder (SmolLM2-135M)")
DTYPE = ("--dtype", str, "DTYPE", None, "of the model (bfloat16; float32 on a CPU)")
TAIL = ("--tail-threshold", number(int, 0), "N", 8,
        "the tail is what comes after the last step with more running requests")  # fmt: skip
RECORDING = (
    ("trace", path, "TRACE", None, ".jsonl or .jsonl.gz; its first `step` is taken"),
    ("--limit-groups", number(int, 1), "N", None, "only the first N lines"),
)


def recording(trace: Path, limit_groups: int | None = None) -> list[Rollout]:
    """Its first training step."""
    from rollout_spec.trace import read_trace
    from rollout_spec_lab.bench.load import first_rollout

    return first_rollout(list(read_trace(trace)), limit_groups)


def json_object(text: str) -> dict[str, Any]:
    """An argparse type."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


ENGINE: tuple[str, Any, str, Any, str] = ("--engine", json_object, "JSON", {}, "further arguments of vLLM's")


def dummy_model(config: Path | None, folder: Path) -> str:
    """A model of which only config.json is there, for load_format=dummy: a folder inside `folder`."""
    if config is None:
        raise UserError("--model-config: must name the policy's config.json")
    if not config.is_file():
        raise UserError(f"--model-config {config}: no such file")
    (folder / "model").mkdir(exist_ok=True)
    shutil.copy(config, folder / "model" / "config.json")
    return str(folder / "model")


def model_folder(model: Path | None, dtype: str) -> str:
    """`--model`, a Hugging Face folder; the demo's, made where it is missing, for None."""
    if model is None:
        return str(make_model(Path(f".cache/models/smollm2-{dtype}"), dtype=dtype))
    return models.model_folder(model)


def default_dtype() -> str:
    """bfloat16 as policies have it, float32 where there is no accelerator: most CPUs emulate bfloat16."""
    import torch

    return "bfloat16" if torch.accelerator.is_available() else "float32"


def prompt_rows(option: str, file: Path | None, num_rows: int, seed: int, split: str) -> list[dict[str, Any]]:
    """The first rows of the verl parquet file that `option` names; generated, as the demo's are, for None."""
    return make_rows(num_rows, seed, split) if file is None else models.prompt_rows(option, file, num_rows)
