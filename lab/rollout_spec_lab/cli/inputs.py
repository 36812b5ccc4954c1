"""What several commands of the laboratory take: a model and prompts (by default the demo's), and methods."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.certify.engine_arguments import model_drafter
from rollout_spec.cli import inputs
from rollout_spec.cli.inputs import number
from rollout_spec.config import SpecConfig, UserError
from rollout_spec_lab.bench.drafters import MissingError
from rollout_spec_lab.bench.engine import Method
from rollout_spec_lab.demo.data import make_rows
from rollout_spec_lab.demo.model import make_model


def add_model_argument(group: Any) -> None:
    group.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face folder (SmolLM2-135M)")


def add_num_speculative_tokens(group: argparse._ActionsContainer) -> None:
    """Add `--num-speculative-tokens`, of every method that is compared."""
    group.add_argument(
        "--num-speculative-tokens", type=number(int, 1), metavar="K",
        help="of every method (each method's own default: ngram 8, suffix what vLLM takes, "
        f"sam {SpecConfig.num_speculative_tokens})",
    )  # fmt: skip


def installed(command: str, methods: Sequence[str], require: Callable[[str], None]) -> list[str]:
    """The methods whose packages are installed; a line on standard error says why others are left out.

    Args:
        require: raises MissingError for a method that needs something else.
    """
    found: list[str] = []
    left_out: dict[str, list[str]] = {}
    for method in methods:
        try:
            require(method)
            found.append(method)
        except MissingError as error:
            left_out.setdefault(" ".join(str(error).split()), []).append(method)
    for reason, names in left_out.items():
        print(f"rollout-spec-lab {command}: without {', '.join(names)}: {reason}", file=sys.stderr)
    return found


def needed_model_drafter(
    text: str | None, labels: Sequence[str], most: int, records: bool = False
) -> dict[str, Any] | None:
    """`--model-drafter` for `--methods`, as `certify.engine_arguments.model_drafter` reads it.

    Args:
        most: draft tokens of a row.
        records: it drafts, whatever the methods are.

    Raises:
        UserError: it is no drafter; a method needs one; nothing uses it.
    """
    drafter = model_drafter(text, most) if text else None
    using = [label for label in labels if Method(label).has_model]
    if using and drafter is None:
        raise UserError(f"--methods {','.join(labels)}: {using[0]} needs --model-drafter")
    if drafter and not (using or records):
        raise UserError("--model-drafter: no method uses it: name model or sam+model in --methods")
    return drafter


def model_folder(model: Path | None, dtype: str) -> str:
    """`--model`, a Hugging Face folder; the demo's, made where it is missing, for None."""
    if model is None:
        return str(make_model(Path(f".cache/models/smollm2-{dtype}"), dtype=dtype))
    return inputs.model_folder(model)


def default_dtype() -> str:
    """bfloat16 as policies have it, float32 where there is no accelerator: most CPUs emulate bfloat16."""
    import torch

    return "bfloat16" if torch.accelerator.is_available() else "float32"


def prompt_rows(option: str, file: Path | None, num_rows: int, seed: int, split: str) -> list[dict[str, Any]]:
    """The first rows of the verl parquet file that `option` names; generated, as the demo's are, for None."""
    return make_rows(num_rows, seed, split) if file is None else inputs.prompt_rows(option, file, num_rows)


@contextlib.contextmanager
def output_folder(output: Path | None) -> Iterator[Path]:
    """`--output`, made where it is missing; one that goes again for None."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="rollout_spec_") as temporary:
            yield Path(temporary)
        return
    output.mkdir(parents=True, exist_ok=True)
    yield output
