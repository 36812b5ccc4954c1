"""`rollout-spec-lab bench`: measurements on this machine, a module each."""

import argparse

from rollout_spec.cli import add_example, sentence
from rollout_spec_lab.cli import (
    bench_drafters,
    bench_engine,
    bench_host,
    bench_native,
    bench_rollout,
    bench_specdecode,
    bench_verify,
)

HELP = "measure here: drafters side by side, rollouts in engines, the host's work, the core, SpecDecode-Bench"
KINDS = {
    "drafters": bench_drafters,
    "engine": bench_engine,
    "rollout": bench_rollout,
    "host": bench_host,
    "verify": bench_verify,
    "native": bench_native,
    "specdecode": bench_specdecode,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    for name, module in KINDS.items():
        module.add_arguments(kinds.add_parser(name, help=module.HELP, description=sentence(module.HELP)))
    add_example(parser, "rollout-spec-lab bench native")


def run(args: argparse.Namespace) -> int:
    return KINDS[args.kind].run(args)
