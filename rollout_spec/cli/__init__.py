"""The command `rollout-spec`, one thin module for each subcommand.

In: arguments. Out: tables, JSON, files and an exit code; a mistake of the user's is one line.
May import: `config`, `environment`, `files`, `trace`, `drafting`, `predict`, `report`, `certify`, `doctor`,
`vllm`, pyarrow, rich, torch, transformers. It reads and checks what the others are given, and plans what
they do; of figures it has counts of what it has read only (`corpus`).

A module in COMMANDS has HELP, EXAMPLE, add_arguments(parser) and run(args) -> exit code. It imports nothing
of this one, and what is slow in `run`, so that `--help` answers at once.
"""

import argparse
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rollout_spec import __version__
from rollout_spec.cli.arguments import add_command
from rollout_spec.config import SpecConfig, UserError

OPTIONAL = ("matplotlib", "jinja2", "pyarrow", "tokenizers", "tensorboard", "wandb")  # of the extra `report`
OF_ENGINES = ("torch", "transformers", "vllm")
COMMANDS = ("replay", "simulate", "compare", "certify", "corpus", "doctor")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """The help of an option ends with its default; examples stay as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str:
        help_, default = action.help or "", action.default
        if default is None or isinstance(default, bool) or default in ([], argparse.SUPPRESS):
            return help_
        return f"{help_} ({' '.join(map(str, default)) if isinstance(default, list) else default})"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage; its subparsers do likewise.

    Takes no abbreviations: `--mode` is not `--model`. `example`: a command that works as it stands.
    """

    def __init__(self, example: str, **settings: Any) -> None:
        end = f"example:\n  {example}"
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, epilog=end, **settings)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid \w+ value: '(.*)'$", message)
        takes_several = any(action.nargs == "+" and action.option_strings for action in self._actions)
        if takes_several and (message.endswith(" FILE_OR_FOLDER") or (wrong and os.path.exists(wrong[1]))):
            message += "; name files before options that take several values"
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def build_parser() -> argparse.ArgumentParser:
    about = "Model-free speculative decoding for RL rollouts with verl and vLLM."
    parser = Parser("rollout-spec doctor", prog="rollout-spec", description=about)
    add_commands(parser, "rollout_spec.cli", COMMANDS)
    return parser


def add_commands(parser: argparse.ArgumentParser, package: str, names: Sequence[str]) -> None:
    """Add `--version` and the subcommands, each a module of `package`."""
    parser.add_argument("--version", action="version", version=f"{parser.prog} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        module = importlib.import_module(f"{package}.{name.replace('-', '_')}")
        add_command(commands, name, module).set_defaults(run=module.run)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(build_parser(), argv)


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, or 1 if its answer is "no", 2 for an error, 130 for Ctrl-C, 141 if
    the reader of the output has gone."""
    args = argparse.Namespace()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may be no text, a terminal may know ASCII only
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            args, unknown = parser.parse_known_args(argv)
            if unknown:
                raise UserError(_unknown(unknown, getattr(args, "refused", None)))
            code = args.run(args)
        except SystemExit as done:  # --help and --version, or a wrong option
            code = int(done.code or 0)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        line = _user_error(error)
        if line is None:
            traceback.print_exc()
            return 2
        command = " ".join((parser.prog, args.command, *([args.kind] if "kind" in args else ())))
        print(f"{command}: {' '.join(line.split())}", file=sys.stderr)
        return 2


def _unknown(arguments: Sequence[str], refused: Mapping[str, str] | None) -> str:
    """What to say of arguments that a command does not have: of an option of the drafter, how it is set.
    `refused`: of `add_spec_argument`; None for a command without `--spec`."""
    option, sign, value = arguments[0].partition("=")
    name = option.removeprefix("--").replace("-", "_")
    if option.startswith("--") and refused is not None and name in SpecConfig.__dataclass_fields__:
        if name in refused:
            return f"{option}: {refused[name]}"
        return f"{option}: use --spec {name}={value if sign else next(iter(arguments[1:]), 'VALUE')}"
    return f"unrecognized arguments: {' '.join(arguments)}"


def _user_error(error: Exception) -> str | None:
    """What to tell the user; None for anything that is a defect of ours and deserves its traceback."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError):
        return "needs more memory than there is"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
        return f"needs {error.name}: reinstall with its extra: pip install '.[report]' in the checkout"
    if isinstance(error, ModuleNotFoundError) and error.name in OF_ENGINES:
        return f"needs {error.name}, which is not installed here: run it where vLLM is installed"
    return None
