"""`rollout-spec-lab bench native`: what the native core costs here."""

import argparse

from rollout_spec.cli.arguments import add_options, number
from rollout_spec_lab.cli.outputs import add_output, report

HELP = "measure what indexing a token, one step and a whole engine's steps cost"
EXAMPLE = "rollout-spec-lab bench native --output outputs/native.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measured = parser.add_argument_group("what is measured")
    add_options(measured, ("--repeats", number(int, 1), "N", 7, "take the least of N runs"))
    add_output(parser, "the JSON")


def run(args: argparse.Namespace) -> int:
    from rollout_spec_lab.bench.index_costs import measure_index
    from rollout_spec_lab.bench.tables import native_tables

    record = measure_index(args.repeats)
    return report(args, record, *native_tables(record))
