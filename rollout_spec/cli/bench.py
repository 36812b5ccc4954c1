"""`rollout-spec bench`: measurements on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HELP = "measure on this machine: the native core"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    native = kinds.add_parser("native", help="cost of indexing a token and of one engine step")
    native.add_argument("--trace", type=Path, help="take the text from a recorded trace")
    native.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="take the best of N runs (%(default)s)"
    )
    native.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there too")
    native.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.bench_native import MODES, measure
    from rollout_spec.cli import UserError
    from rollout_spec.cli.progress import tracked
    from rollout_spec.replay import TraceError

    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: must be at least 1")
    try:
        record = measure(args.trace, args.repeats, tracked(MODES, "measuring"))
    except TraceError as error:
        raise UserError(str(error)) from error
    rendered = json.dumps(record, indent=2)
    if args.output:
        args.output.write_text(rendered + "\n")
    if args.json:
        print(rendered)
    else:
        _print(record)
    return 0


def _print(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for mode, result in record["modes"].items():
        step = result["step"]
        table = Table(
            title=f"mode {mode}, {record['text']} text",
            caption=f"flat within {result['flatness']:.2f}x; one step of {step['rows']} rows, "
            f"{step['share_of_rows_drafting']:.0%} drafting: {step['step_ms']:.3f} ms",
        )
        for name in ("tokens", "us per token", "bytes per token"):
            table.add_column(name, justify="right")
        for size, row in result["sizes"].items():
            table.add_row(f"{int(size):,}", f"{row['us_per_token']:.3f}", f"{row['bytes_per_token']:.1f}")
        console.print(table)
