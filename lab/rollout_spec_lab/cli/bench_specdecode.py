"""`rollout-spec-lab bench specdecode`: SpecDecode-Bench, with our drafter beside its methods."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rollout_spec.cli import add_example
from rollout_spec.cli.inputs import number, path
from rollout_spec.config import MAX_SPECULATIVE_TOKENS, SpecConfig

HELP = "replay the public SpecDecode-Bench: our drafter beside EAGLE, n-gram and their oracles"

PLOTTED = ["n-gram, 5", "EAGLE, 5", "ours, text alone", "oracle of both", "ours, text and EAGLE"]


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
    ours = parser.add_argument_group("our drafter")
    ours.add_argument("--num-speculative-tokens", type=number(int, 1, MAX_SPECULATIVE_TOKENS), default=15,
        metavar="K", help="most draft tokens of ours (15)",
    )  # fmt: skip
    ours.add_argument("--eagle-tokens", type=number(int, 1, 12), default=3, metavar="N",
        help="tokens that EAGLE drafts beside our text (3)",
    )  # fmt: skip
    ours.add_argument("--fresh", action="store_true", help="our drafter begins afresh in every request")
    output = parser.add_argument_group("output")
    output.add_argument("--plot", type=path, metavar="FILE", help="draw tokens per step, as PNG")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_example(parser, "rollout-spec-lab bench specdecode simulator --datasets gsm8k")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import make_console, make_table
    from rollout_spec.cli.progress import tracked
    from rollout_spec_lab.bench.specdecode import measure

    config = SpecConfig.from_mapping({"num_speculative_tokens": args.num_speculative_tokens, "history": 0})
    found: dict[str, list[dict[str, Any]]] = {
        name: measure(
            args.checkout, name, config, args.eagle_tokens, args.rows, limit=args.limit, is_fresh=args.fresh
        )
        for name in tracked(args.datasets, "replaying")
    }
    if args.plot:
        from rollout_spec_lab.bench.plots import plot_specdecode

        plot_specdecode(found, PLOTTED, args.plot)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    console = make_console()
    rows = [f"{n} rows" for n in args.rows]
    for name, results in found.items():
        table = make_table(
            f"{name}: tokens per step, and times the speed without drafts", "", "tokens", *rows
        )
        for each in results:
            cells = (f"{speed:.2f}" for speed in each["speed"].values())
            table.add_row(each["method"], f"{each['tokens_per_step']:.2f}", *cells)
        console.print(table)
    return 0
