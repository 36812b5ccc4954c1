"""`rollout-spec-lab bench specdecode`: SpecDecode-Bench, with our drafter beside its methods."""

import argparse
from typing import Any

from rollout_spec.cli import add_example
from rollout_spec.cli.arguments import add_options, number, path
from rollout_spec_lab.cli.inputs import add_output, shown

HELP = "replay the public SpecDecode-Bench: our drafter beside EAGLE, n-gram and their oracles"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from rollout_spec_lab.bench.specdecode import MATCHED, ROWS

    count = number(int, 1)
    served = parser.add_argument_group("what is replayed")
    add_options(served, ("checkout", path, "CHECKOUT", None, "of github.com/SpecDecode-Bench/simulator"))
    served.add_argument("--datasets", nargs="+", choices=MATCHED, default=list(MATCHED), metavar="NAME",
        help=f"of its sets ({' '.join(MATCHED)})",
    )  # fmt: skip
    add_options(
        served,
        ("--limit", count, "N", None, "only the first N requests of a set"),
        ("--rows", count, "N", list(ROWS), "requests that decode at a time, in the speeds"),
    )
    served.add_argument("--fresh", action="store_true", help="our drafter begins afresh in every request")
    add_output(parser, None)
    add_example(parser, "rollout-spec-lab bench specdecode simulator --datasets gsm8k")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import tracked
    from rollout_spec_lab.bench.specdecode import measure
    from rollout_spec_lab.bench.tables import specdecode_tables

    found: dict[str, list[dict[str, Any]]] = {
        name: measure(args.checkout, name, args.rows, args.limit, args.fresh)
        for name in tracked(args.datasets, "replaying")
    }
    return shown(found, args.json, specdecode_tables)
