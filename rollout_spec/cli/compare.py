"""`rollout-spec compare`: what two finished runs say about each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "compare two training runs, one without and one with speculation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "off", type=Path, metavar="RUN_OFF", help="run with +rollout.spec=off: folder or file"
    )
    parser.add_argument("on", type=Path, metavar="RUN_ON", help="run with +rollout.spec=sam: folder or file")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write JSON, PNG and HTML there too")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from rollout_spec.demo.looping import is_looping
    from rollout_spec.report import sentences, summary_table, write_report
    from rollout_spec.runs import compare, first_step_agreement, read_run

    off, on = read_run(args.off, "off", is_looping), read_run(args.on, "on", is_looping)
    comparison = compare(off, on, agreement=first_step_agreement(args.off, args.on))
    if args.output:
        facts = {"off": str(args.off), "on": str(args.on)}
        paths = write_report(comparison, args.output, facts)
    if args.json:
        print(json.dumps(comparison.to_dict(), indent=2, allow_nan=False))
        return 0
    console = Console()
    console.print(summary_table(comparison))
    for sentence in sentences(comparison):
        console.print(sentence, highlight=False)
    if args.output:
        console.print(f"Report: {paths['html']}", highlight=False, soft_wrap=True)
    return 0
