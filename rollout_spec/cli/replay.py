"""`rollout-spec replay`: what the drafter would have done for recorded rollouts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rollout_spec.config import MODES, SpecConfig

HELP = "replay recorded rollouts through the drafter, without a model"

_FIELDS = {field.name: field for field in dataclasses.fields(SpecConfig)}
_OPTIONS = (
    "num_speculative_tokens",
    "mode",
    "min_match_len",
    "max_spec_factor",
    "min_token_prob",
    "group_sharing",
    "history",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help=".jsonl or .jsonl.gz, one group of rollouts a line"
    )
    for name in _OPTIONS:
        default = _FIELDS[name].default
        kind: dict[str, Any] = {
            "type": type(default),
            "metavar": "K" if name == "num_speculative_tokens" else "N",
        }
        if name == "mode":
            kind = {"choices": MODES}
        elif name == "group_sharing":
            kind = {"action": argparse.BooleanOptionalAction}
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, default=default, help=f"{_FIELDS[name].metadata['help']} ({default})", **kind
        )
    parser.add_argument(
        "--max-responses", type=int, metavar="N", help="only the first N responses of each line"
    )
    parser.add_argument("--limit-groups", type=int, metavar="N", help="only the first N lines of the trace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli import UserError
    from rollout_spec.replay import TraceError, read_trace, replay

    config = SpecConfig(**{name: getattr(args, name) for name in _OPTIONS})
    for name in ("max_responses", "limit_groups"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}={value}: must be at least 1")
    try:
        with _progress() as progress:
            task = progress.add_task(args.trace.name, total=args.limit_groups)
            result = replay(
                read_trace(args.trace),
                config,
                max_responses=args.max_responses,
                limit_groups=args.limit_groups,
                on_group=lambda so_far: progress.update(task, completed=so_far.num_groups),
            )
    except TraceError as error:
        raise UserError(str(error)) from error
    if args.json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        _print_table(args.trace.name, config, result.to_dict())
    return 0


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} groups"))
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _print_table(title: str, config: SpecConfig, values: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    sharing = "group sharing" if config.group_sharing else "no group sharing"
    console = Console()
    options = f"{config.mode}, {config.num_speculative_tokens} draft tokens, {sharing}"
    console.print(f"{title}: {options}", soft_wrap=True)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in values.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
        table.add_row(name.removeprefix("num_").replace("_", " "), text)
    console.print(table)
