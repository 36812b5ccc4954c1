"""`rollout-spec replay`: what the drafter would have done for recorded rollouts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rollout_spec.config import MODES, SpecConfig, parse_price

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
    "corpus",
    "corpus_margin",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help=".jsonl or .jsonl.gz, one group of rollouts a line"
    )
    for name in _OPTIONS:
        default = _FIELDS[name].default
        kind: dict[str, Any] = {
            "type": type(default),
            "metavar": {"num_speculative_tokens": "K", "corpus": "FILE"}.get(name, "N"),
        }
        if name == "min_token_prob":
            kind["type"] = parse_price
        elif name == "mode":
            kind = {"choices": MODES}
        elif name == "group_sharing":
            kind = {"action": argparse.BooleanOptionalAction}
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag,
            default=default,
            help=f"{_FIELDS[name].metadata['help']} ({'none' if default == '' else default})",
            **kind,
        )
    parser.add_argument(
        "--max-responses", type=int, metavar="N", help="only the first N responses of each line"
    )
    parser.add_argument("--limit-groups", type=int, metavar="N", help="only the first N lines of the trace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli import UserError
    from rollout_spec.cli.tables import print_values
    from rollout_spec.corpus import check_corpus
    from rollout_spec.replay import TraceError, read_trace, replay

    config = SpecConfig(**{name: getattr(args, name) for name in _OPTIONS})
    for name in ("max_responses", "limit_groups"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}={value}: must be at least 1")
    if config.corpus:
        check_corpus(config.corpus)
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
        print_values(_title(args.trace.name, config), result.to_dict())
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


def _title(trace: str, config: SpecConfig) -> str:
    sharing = "group sharing" if config.group_sharing else "no group sharing"
    corpus = f", corpus {config.corpus}" if config.corpus else ""
    return f"{trace}: {config.mode}, {config.num_speculative_tokens} draft tokens, {sharing}{corpus}"
