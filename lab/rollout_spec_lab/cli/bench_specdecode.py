"""`rollout-spec-lab bench specdecode`: SpecDecode-Bench, with our drafter beside its methods."""

from __future__ import annotations

import argparse
from itertools import starmap
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import add_example
from rollout_spec.cli.inputs import number, path
from rollout_spec_lab.cli.inputs import add_output, shown

if TYPE_CHECKING:
    from rollout_spec_lab.bench.tables import Table

HELP = "replay the public SpecDecode-Bench: our drafter beside EAGLE, n-gram and their oracles"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from rollout_spec_lab.bench.specdecode import MATCHED, ROWS

    count = number(int, 1)
    served = parser.add_argument_group("what is replayed")
    served.add_argument(
        "checkout", type=path, metavar="CHECKOUT", help="of github.com/SpecDecode-Bench/simulator"
    )
    served.add_argument("--datasets", nargs="+", choices=MATCHED, default=list(MATCHED), metavar="NAME",
        help=f"of its sets ({' '.join(MATCHED)})",
    )  # fmt: skip
    served.add_argument("--limit", type=count, metavar="N", help="only the first N requests of a set")
    served.add_argument("--rows", type=count, nargs="+", default=list(ROWS), metavar="N",
        help="requests that decode at a time, in the speeds",
    )  # fmt: skip
    served.add_argument("--fresh", action="store_true", help="our drafter begins afresh in every request")
    add_output(parser, None)
    add_example(parser, "rollout-spec-lab bench specdecode simulator --datasets gsm8k")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import tracked
    from rollout_spec_lab.bench.specdecode import measure

    found: dict[str, list[dict[str, Any]]] = {
        name: measure(args.checkout, name, args.rows, args.limit, args.fresh)
        for name in tracked(args.datasets, "replaying")
    }
    return shown(found, args.json, lambda found: starmap(_table, found.items()))


def _table(name: str, results: list[dict[str, Any]]) -> Table:
    title = f"{name}: tokens per step, and times the speed without drafts"
    rows = [
        [each["method"], *(f"{figure:.2f}" for figure in (each["tokens_per_step"], *each["speed"].values()))]
        for each in results
    ]
    return title, ["", "tokens", *(f"{n} rows" for n in results[0]["speed"])], rows
