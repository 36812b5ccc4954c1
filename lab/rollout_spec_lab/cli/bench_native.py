"""`rollout-spec-lab bench native`: what the native core costs here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import add_example
from rollout_spec.cli.inputs import number
from rollout_spec_lab.cli.inputs import add_output, shown, write

if TYPE_CHECKING:
    from rollout_spec_lab.bench.tables import Table

HELP = "measure what indexing a token, one step and a whole engine's steps cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measured = parser.add_argument_group("what is measured")
    measured.add_argument(
        "--repeats", type=number(int, 1), default=7, metavar="N", help="take the least of N runs"
    )
    add_output(parser, "the JSON", "FILE")
    add_example(parser, "rollout-spec-lab bench native --output outputs/native.json")


def run(args: argparse.Namespace) -> int:
    from rollout_spec_lab.bench.index_costs import measure

    record = measure(args.repeats)
    if args.output:
        write(record, args.output)
    return shown(record, args.json, lambda record: [_table(record)])


def _table(record: dict[str, Any]) -> Table:
    step, whole, targets = record["step"], record["whole_steps"], record["targets"]
    figures = {
        f"{name} at {size}": figures[name]
        for name in ("us_per_token", "bytes_per_token")
        for size, figures in record["sizes"].items()
    }
    figures |= {name: step[name] for name in ("step_ms", "draft_tokens_per_row", "share_of_rows_drafting")}
    figures |= {name: whole[name] for name in ("median_ms", "p99_ms", "whole_step_p99_over_median")}
    title = (
        f"{record['text']} text, {record['environment']['cpu']}; step: the index's, {step['rows']} rows; "
        f"whole step: the drafter's, {whole['rows']} rows, requests that come and go, groups that are evicted"
    )
    return title, ["", "here", "at most"], [
        [name.replace("_", " "), f"{value:.3f}", f"{targets[name]:g}" if name in targets else ""]
        for name, value in figures.items()
    ]  # fmt: skip
