"""`rollout-spec-lab bench`: measurements on this machine, a module each."""

import argparse
import importlib

from rollout_spec.cli.arguments import add_command

HELP = "measure here: drafters side by side, rollouts in engines, the host's work, the core"
EXAMPLE = "rollout-spec-lab bench native"
KINDS = {
    name: importlib.import_module(f"rollout_spec_lab.cli.bench_{name}")
    for name in ("drafters", "engine", "rollout", "gate", "host", "verify", "native", "memory")
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    for name, module in KINDS.items():
        add_command(kinds, name, module)


def run(args: argparse.Namespace) -> int:
    return KINDS[args.kind].run(args)
