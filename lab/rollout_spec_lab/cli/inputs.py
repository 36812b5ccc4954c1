"""What several commands of the laboratory take: models, prompts (by default the demo's), methods."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import console, models
from rollout_spec.cli.arguments import add_options, add_spec_argument, folder_for, number, path, spec_options
from rollout_spec.config import SpecConfig, UserError
from rollout_spec.files import as_json, write_files
from rollout_spec_lab.bench.drafters import MissingError
from rollout_spec_lab.bench.engine import Method, require
from rollout_spec_lab.demo.data import make_rows
from rollout_spec_lab.demo.model import make_model

if TYPE_CHECKING:
    from rollout_spec.trace import Rollout

NO_MODEL = "no model drafts here"
# Options for `add_options`.
MODEL = ("--model", path, "DIR", None, "Hugging Face folder (SmolLM2-135M)")
DTYPE = ("--dtype", str, "DTYPE", None, "of the model (bfloat16; float32 on a CPU)")
TAIL = ("--tail-threshold", number(int, 0), "N", 8,
        "the tail is what comes after the last step with more running requests")  # fmt: skip
RECORDING = (
    ("trace", path, "TRACE", None, ".jsonl or .jsonl.gz; its first `step` is taken"),
    ("--limit-groups", number(int, 1), "N", None, "only the first N lines"),
)


def add_compared_arguments(
    parser: argparse.ArgumentParser, known: str, methods: Sequence[str], models: str = ""
) -> argparse._ArgumentGroup:
    """Add the methods, by default these, and their options, which `compared` reads; returns their group.

    known: the help of --methods says which there are; models: how one that drafts is given, if it is.
    """
    refused = {
        "num_speculative_tokens": "--num-speculative-tokens sets it",
        "model_tokens": models or NO_MODEL,
    }
    compared = parser.add_argument_group("what is compared")
    compared.set_defaults(default_methods=methods)
    default = f"({','.join(methods)}, without what is not installed)"
    add_options(
        compared,
        ("--methods", str, "M,M", None, f"each is compared with the first: {known} {default}"),
        ("--num-speculative-tokens", number(int, 1), "K", None,
         "of every method (each method's own default: ngram 8, suffix what vLLM takes, "
         f"sam {SpecConfig.num_speculative_tokens})"),
    )  # fmt: skip
    add_spec_argument(compared, "an option of rollout.spec for sam; as often as needed", refused)
    add_options(compared, ("--repeats", number(int, 1), "N", 3, "turns of each method"))
    return compared


def recording(trace: Path, limit_groups: int | None = None) -> list[Rollout]:
    """Its first training step."""
    from rollout_spec.trace import read_trace
    from rollout_spec_lab.bench.load import rollout_of

    return rollout_of(list(read_trace(trace)), limit_groups)


def compared(
    args: argparse.Namespace, command: str, drafting: Callable[[str], str] = str
) -> tuple[list[str], dict[str, Any]]:
    """`--methods`, as `checked_methods` reads them, and `--spec` with `--num-speculative-tokens`."""
    spec = spec_options(args.spec, args.refused)
    if args.num_speculative_tokens is not None:
        spec["num_speculative_tokens"] = args.num_speculative_tokens
    methods = checked_methods(command, args.default_methods, args.methods, spec, drafting)
    if NO_MODEL in args.refused.values() and any(Method(drafting(label)).has_model for label in methods):
        raise UserError(f"--methods {args.methods}: {NO_MODEL}")
    return methods, spec


def _file(text: str) -> Path:
    """An argparse type: a file that can be written, or replaced, as it is ours."""
    file = path(text)
    return folder_for(file.name)(str(file.parent)) / file.name


def add_output(parser: argparse.ArgumentParser, written: str, *names: str) -> None:
    """Add `--json` and `--output`, which gets what is `written`: in a folder, where these names are replaced
    if they are ours; without names, in such a file."""
    output = parser.add_argument_group("output")
    kind, metavar = (folder_for(*names), "DIR") if names else (_file, "FILE")
    add_options(output, ("--output", kind, metavar, None, f"write {written} there"))
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")


def write(record: Mapping[str, Any], file: Path) -> None:
    write_files(file.parent, {file.name: as_json(record)})


def report(args: argparse.Namespace, record: Mapping[str, Any], *parts: Any, name: str = "") -> int:
    """Write a record to `--output`, or to the file `name` there, if that is given; print it or its parts."""
    if args.output:
        write(record, args.output / name)
    console.show(record, args.json, *parts)
    return 0


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


def checked_methods(
    command: str, methods: Sequence[str], given: str | None, spec: Mapping[str, Any],
    drafting: Callable[[str], str] = str,
) -> list[str]:  # fmt: skip
    """`--methods`, or those of `methods` that are installed; `drafting`: of a label what `Method` knows.

    Raises UserError: there is no such method, one is named twice, or misses a package.
    """
    labels = installed(command, methods, require) if given is None else given.split(",")
    if len(set(labels)) < len(labels):
        raise UserError(f"--methods {given}: a method is named twice")
    for method in map(Method, map(drafting, labels)):
        if method.is_ours:
            method.options(spec)
        require(method.name)
    return labels


def installed(command: str, methods: Sequence[str], require: Callable[[str], None]) -> list[str]:
    """The methods whose packages are installed: `require` raises no MissingError. A line on standard error
    says why others are left out."""
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


def needed_model_drafter(text: str | None, labels: Sequence[str], most: int) -> dict[str, Any] | None:
    """`--model-drafter` for `--methods`, as `model_drafter` reads it; most: draft tokens of a row.

    Raises UserError: it is no drafter; a method needs one; nothing uses it.
    """
    drafter = models.model_drafter(text, most) if text else None
    using = [label for label in labels if Method(label).has_model]
    if using and drafter is None:
        raise UserError(f"--methods {','.join(labels)}: {using[0]} needs --model-drafter")
    if drafter and not using:
        raise UserError("--model-drafter: no method uses it: name model or sam+model in --methods")
    return drafter


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


@contextlib.contextmanager
def output_folder(output: Path | None) -> Iterator[Path]:
    """`--output`, made where it is missing; one that goes again for None."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="rollout_spec_") as temporary:
            yield Path(temporary)
        return
    output.mkdir(parents=True, exist_ok=True)
    yield output
