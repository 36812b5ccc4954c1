"""The command `rollout-spec`.

Each module in COMMANDS has HELP, add_arguments(parser) and run(args) -> exit code, and imports what is slow
inside `run`, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from rollout_spec import __version__

OPTIONAL = {
    "matplotlib": "report",
    "jinja2": "report",
    "tensorboard": "report",
    "wandb": "report",
    "gguf": "demo",
    "pandas": "demo",
}
_FILE_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
COMMANDS = ("demo", "replay", "corpus", "compare", "certify", "bench", "simulate", "doctor")


class UserError(Exception):
    """Something the user can put right: shown as one line, exit code 2."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollout-spec", description="Model-free speculative decoding for RL rollouts with verl and vLLM."
    )
    parser.add_argument("--version", action="version", version=f"rollout-spec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"rollout_spec.cli.{name}")
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, or 1 where a command's answer is "no", 2 for a user error, 130 for Ctrl-C.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        line = _user_error(error)
        if line is None:
            raise
        print(f"rollout-spec {args.command}: {' '.join(line.split())}", file=sys.stderr)
        return 2


def _user_error(error: Exception) -> str | None:
    """What to tell the user; None for anything that is a defect of ours and deserves its traceback."""
    from rollout_spec.config import ConfigError
    from rollout_spec.demo.model import ModelError
    from rollout_spec.logs import RunError

    if isinstance(error, (UserError, ConfigError, ModelError, RunError)):
        return str(error)
    if isinstance(error, _FILE_ERRORS):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
        return f"needs {error.name}: pip install 'rollout-spec[{OPTIONAL[error.name]}]'"
    return None
