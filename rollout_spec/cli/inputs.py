"""What several commands take: options of `rollout.spec`; a model, prompts, the device."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.config import MAX_SPECULATIVE_TOKENS, SpecConfig, UserError

if TYPE_CHECKING:
    from rollout_spec.predict.roofline import Roofline
    from rollout_spec.trace import Rollout

logger = logging.getLogger(__name__)

MAX_ENGINES = 128
"""In a cluster, and devices, ranks or copies: a simulation of more takes minutes and says nothing new."""

# Small enough for a machine with little memory, no warm-up with thousands of tokens, and blocks so small that
# the samples of one short prompt share its prefill.
_CPU = {
    "kv_cache_memory_bytes": 1 << 29,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "block_size": 32,
}


def number(
    kind: type[int] | type[float], low: float, high: float = (1 << 31) - 1, *, above: bool = False
) -> Callable[[str], Any]:
    """An argparse type: numbers from `low`, or `above` it, to `high`."""
    bounds = f"{'above' if above else 'at least'} {low:g} and at most {high:,.10g}"

    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text} must be {bounds}")
        return value

    parse.__name__ = kind.__name__  # argparse says it of what is no number
    return parse


def path(text: str) -> Path:
    """An argparse type: a file or a folder. `Path("")` would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must name a file or a folder")
    return Path(text)


def folder(text: str) -> Path:
    """An argparse type: a folder that can be written, or made."""
    found = path(text)
    there = next(each for each in (found, *found.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{there} cannot be written")
    return found


def add_options(group: argparse._ActionsContainer, *options: tuple[str, Any, str, Any, str]) -> None:
    """Add options: name, type, metavar, default, help. If the default is a list, it takes several values."""
    for name, kind, metavar, default, help_ in options:
        nargs = "+" if isinstance(default, list) else None
        group.add_argument(name, type=kind, metavar=metavar, default=default, help=help_, nargs=nargs)


def add_rollouts_arguments(group: argparse._ActionsContainer) -> None:
    """Add the files, `--tokenizer` and `--columns`, which `read` takes."""
    group.add_argument(
        "traces", type=path, nargs="+", metavar="FILE_OR_FOLDER",
        help="rollouts: recordings, verl's dumps, or rows of prompts and responses",
    )  # fmt: skip
    add_options(
        group,
        ("--tokenizer", path, "DIR", None,
         "the policy's Hugging Face folder, or its tokenizer.json: needed where rollouts are texts"),
        ("--columns", str, "ROLE=NAME,...", None,
         "which fields are the prompt, response, group and step, where their names do not say it "
         "(step=: there is none)"),
    )  # fmt: skip


def read(args: argparse.Namespace, paths: Sequence[Path], limit: int | None = None) -> Iterator[Rollout]:
    """The rollouts of `add_rollouts_arguments`, or of some of its files, or only the first."""
    from rollout_spec.predict.dumps import NAMES, read_rollouts

    columns = {}
    for pair in filter(None, (args.columns or "").split(",")):
        role, sign, columns[role] = pair.partition("=")
        if not sign or role not in NAMES:
            raise UserError(f"--columns {pair}: must be {', '.join(f'{role}=NAME' for role in NAMES)}")
    return read_rollouts(paths, args.tokenizer, columns, limit)


def warn_of_same_texts(lines: Sequence[Rollout], corpus: str) -> None:
    """Say it where the corpus holds these responses: a training's next responses are new."""
    from rollout_spec.drafting.corpus import read_corpus
    from rollout_spec.predict.doubts import LONG

    held = {text.tobytes() for text in read_corpus(corpus)}
    texts = [text.tobytes() for line in lines for text in line.responses if len(text) >= LONG]
    num_held = sum(text in held for text in texts)
    if 10 * num_held > len(texts):  # a few are the same by chance
        logger.warning(
            "%s holds %d of %d responses of %d tokens or more word for word, so the figures promise "
            "too much: build it from other responses", corpus, num_held, len(texts), LONG,
        )  # fmt: skip


def check_steps(lines: Iterable[Rollout], trace: Path) -> None:
    """Refuse rollouts without a step: the prefill gives the first token of a response."""
    longest = max((len(response) for line in lines for response in line.responses), default=0)
    if longest == 0:
        raise UserError(f"{trace}: no token in any response")
    if longest == 1:
        raise UserError(f"{trace}: no second token in any response, so there is no step to draft in")


def add_simulated_model(group: argparse._ActionsContainer) -> None:
    """Add `--model-acceptance`, which `with_model` takes."""
    help_ = (
        "simulate a draft model beside the index: how often its first, second, ... draft token is right "
        "where those before it are; it drafts as many tokens as there are numbers"
    )
    add_options(group, ("--model-acceptance", str, "A,A,...", None, help_))


def with_model(args: argparse.Namespace, lines: Iterable[Rollout]) -> Iterable[Rollout]:
    """The rollouts with the drafts of the simulated model, or as they are."""
    if args.model_acceptance is None:
        return lines
    from rollout_spec.predict.model_drafts import simulate_model

    try:
        acceptance = [float(part) for part in args.model_acceptance.split(",")]
    except ValueError:
        acceptance = []
    if not 0 < len(acceptance) <= MAX_SPECULATIVE_TOKENS or not all(0 <= share <= 1 for share in acceptance):
        raise UserError(
            f"--model-acceptance {args.model_acceptance}: must be numbers from 0 to 1, separated by commas, "
            f"at most {MAX_SPECULATIVE_TOKENS}"
        )
    return simulate_model(lines, acceptance)


def add_device_arguments(group: Any, model_group: Any = None) -> None:
    """Add `--model-config`, to `model_group` if it is another, `--gpu` and `--tp`: what `roofline` takes."""
    (model_group or group).add_argument(
        "--model-config", type=path, metavar="FILE",
        help="the policy's config.json: with --gpu, step times are predicted by a roofline",
    )  # fmt: skip
    add_options(
        group,
        ("--gpu", str, "NAME", None, "h100, h200, a100 or 910b"),
        ("--tp", number(int, 1, MAX_ENGINES), "N", None, "tensor-parallel devices of an engine (1)"),
    )


def roofline(args: argparse.Namespace, **further: Any) -> Roofline:
    """The step times of `add_device_arguments`; `further`: fields of a Roofline."""
    from rollout_spec.predict.model import Model
    from rollout_spec.predict.roofline import DEVICES, Roofline

    if args.model_config is None:
        raise UserError("--model-config: a prediction needs the policy's config.json")
    if args.gpu not in DEVICES:
        name = "--gpu" if args.gpu is None else f"--gpu {args.gpu}"
        raise UserError(f"{name}: must be one of {', '.join(DEVICES)}")
    return Roofline(Model.read(args.model_config), DEVICES[args.gpu], args.tp or 1, **further)


def add_spec_argument(group: argparse._ActionsContainer, help_: str, refused: Mapping[str, str]) -> None:
    """Add `--spec`. `refused`: names that the command does not take, each with what to say of it."""
    group.add_argument("--spec", action="append", default=[], metavar="NAME=VALUE", help=help_)
    group.set_defaults(refused=refused)


def spec_options(given: Sequence[str], refused: Mapping[str, str]) -> dict[str, Any]:
    """The options that `--spec` gives, for `SpecConfig` to check. `refused`: as in `add_spec_argument`."""
    spec = {}
    for option in given:
        name, sign, value = option.partition("=")
        if not sign:
            raise UserError(f"--spec {option}: must be NAME=VALUE")
        if name in refused:
            raise UserError(f"--spec {option}: {refused[name]}")
        spec[name] = value if name in _TEXTS else _parsed(value)
    return spec


_TEXTS = [field.name for field in dataclasses.fields(SpecConfig) if field.type == "str"]


def _parsed(value: str) -> Any:
    """Numbers, true and false as JSON has them; anything else is text."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def add_model_drafter(parser: argparse._ArgumentGroup) -> None:
    """`--model-drafter`: a text for `certify.engine_arguments.model_drafter`."""
    help_ = "a model that drafts N tokens: eagle3:path/to/head:3; mtp::1 for the policy's own head"
    add_options(parser, ("--model-drafter", str, "METHOD:MODEL:N", None, help_))


def model_folder(model: Path) -> str:
    """`--model`, a Hugging Face folder."""
    if not (model / "config.json").exists():
        raise UserError(f"--model {model}: no Hugging Face folder (config.json is missing)")
    return str(model)


def device_arguments() -> dict[str, Any]:
    """vLLM's arguments for this machine: its own defaults where there is an accelerator."""
    import torch

    return {} if torch.accelerator.is_available() else dict(_CPU)


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
