"""What the subcommands build their parsers of: types of arguments, tables of options, `--spec`."""

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout_spec.config import SpecConfig, UserError
from rollout_spec.files import refuse_others

MAX_ENGINES = 128
"""In a cluster, and devices, ranks or copies: a simulation of more takes minutes and says nothing new."""


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


def folder_for(*names: str) -> Callable[[str], Path]:
    """An argparse type: a folder that can be written, or made. Of these files it holds ours only."""

    def parse(text: str) -> Path:
        found = path(text)
        there = next(each for each in (found, *found.absolute().parents) if os.path.lexists(each))
        if not there.is_dir():
            raise argparse.ArgumentTypeError(f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise argparse.ArgumentTypeError(f"{there} cannot be written")
        try:
            refuse_others(found, names)
        except (UserError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return found

    return parse


def add_command(commands: Any, name: str, module: Any) -> argparse.ArgumentParser:
    """Add a subcommand to those of a parser: a module with HELP, EXAMPLE and `add_arguments`."""
    description = f"{module.HELP[0].upper()}{module.HELP[1:]}."
    about = {"help": module.HELP, "description": description, "example": module.EXAMPLE}
    parser: argparse.ArgumentParser = commands.add_parser(name, **about)
    module.add_arguments(parser)
    return parser


def add_options(group: argparse._ActionsContainer, *options: tuple[str, Any, str, Any, str]) -> None:
    """Add options: name, type, metavar, default, help. If the default is a list, it takes several values."""
    for name, kind, metavar, default, help_ in options:
        nargs = "+" if isinstance(default, list) else None
        group.add_argument(name, type=kind, metavar=metavar, default=default, help=help_, nargs=nargs)


def add_spec_argument(group: argparse._ActionsContainer, help_: str, refused: Mapping[str, str]) -> None:
    """Add `--spec`. `refused`: names that the command does not take, each with what to say of it."""
    group.add_argument("--spec", action="append", default=[], metavar="NAME=VALUE", help=help_)
    group.set_defaults(refused=refused)


def spec_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that `--spec` gives, for `SpecConfig` to check; `add_spec_argument` has added it."""
    spec: dict[str, Any] = {}
    for option in args.spec:
        name, sign, value = option.partition("=")
        if not sign:
            raise UserError(f"--spec {option}: must be NAME=VALUE")
        if name in args.refused:
            raise UserError(f"--spec {option}: {args.refused[name]}")
        spec[name] = value
        known = SpecConfig.__dataclass_fields__.get(name)
        if known is None or known.type != "str":
            with contextlib.suppress(ValueError, RecursionError):  # what is no number, true or false is text
                spec[name] = json.loads(value)
    return spec
