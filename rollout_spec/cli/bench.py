"""`rollout-spec bench`: measurements on this machine."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from rollout_spec.cli import bench_engine
from rollout_spec.config import SpecConfig

HELP = "measure on this machine: the native core, drafters side by side, whole rollouts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    native = kinds.add_parser("native", help="cost of indexing a token and of one engine step")
    native.add_argument("--trace", type=Path, help="take the text from a recorded trace")
    native.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="take the best of N runs (%(default)s)"
    )
    native.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there too")
    native.add_argument("--json", action="store_true", help="print JSON instead of a table")
    drafters = kinds.add_parser("drafters", help="drafters side by side on recorded rollouts")
    drafters.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help=".jsonl or .jsonl.gz")
    drafters.add_argument(
        "--methods", default="off,ngram,earliest,frequent,sam,suffix_policy,oracle", help="(%(default)s)"
    )
    drafters.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[3, 8, 16], metavar="K")
    drafters.add_argument(
        "--history", type=int, nargs="+", default=[0], metavar="N", help="earlier responses per group (0)"
    )
    drafters.add_argument(
        "--min-token-prob",
        type=float,
        nargs="+",
        default=[SpecConfig.min_token_prob],
        metavar="P",
        help="prices of our modes that have one, a line each (%(default)s)",
    )
    drafters.add_argument(
        "--max-cached-requests",
        type=int,
        default=10_000,
        metavar="N",
        help="of the methods suffix* (%(default)s, vLLM's default)",
    )
    drafters.add_argument(
        "--max-index-mb", type=int, default=1024, metavar="MB", help="budget of the history (%(default)s)"
    )
    drafters.add_argument(
        "--limit-groups", type=int, metavar="N", help="only the first N lines of each trace"
    )
    drafters.add_argument(
        "--cost", action="store_true", help="also time steps of 1, 8, 64 and 256 rows, and indexing"
    )
    drafters.add_argument(
        "--output", type=Path, metavar="DIR", help="write drafters.json and drafters.png there"
    )
    drafters.add_argument("--json", action="store_true", help="print JSON instead of a table")
    engine = kinds.add_parser("engine", help=bench_engine.HELP)
    bench_engine.add_arguments(engine)


def run(args: argparse.Namespace) -> int:
    runs = {"native": _run_native, "drafters": _run_drafters, "engine": bench_engine.run}
    return runs[args.kind](args)


def _run_drafters(args: argparse.Namespace) -> int:
    # Of the method ngram: the answer is on standard output.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from itertools import islice

    from rollout_spec import bench_drafters as bench
    from rollout_spec.cli import UserError
    from rollout_spec.cli.progress import tracked
    from rollout_spec.replay import TraceError, read_trace

    methods = args.methods.split(",")
    for method in methods:
        if method not in bench.METHODS:
            raise UserError(f"--methods {method}: must be one of {', '.join(bench.METHODS)}")
    for name, values, low, high in (
        ("--num-speculative-tokens", args.num_speculative_tokens, 1, bench.MAX_SPECULATIVE_TOKENS),
        ("--history", args.history, 0, 1 << 16),
        ("--limit-groups", [args.limit_groups or 1], 1, 1 << 30),
        ("--max-cached-requests", [args.max_cached_requests], 1, 1 << 30),
        ("--max-index-mb", [args.max_index_mb], 1, 1 << 20),
        ("--min-token-prob", args.min_token_prob, 0.0, 1.0),
    ):
        if not all(low <= value <= high for value in values):
            raise UserError(f"{name} {' '.join(map(str, values))}: must be between {low:g} and {high:g}")
    record: dict[str, Any] = {"environment": bench.environment(), "results": []}
    try:
        for trace in args.traces:
            lines = list(islice(read_trace(trace), args.limit_groups))
            results = bench.measure(
                tracked(lines, trace.name),
                methods,
                args.num_speculative_tokens,
                args.history,
                min_token_probs=args.min_token_prob,
                max_cached_requests=args.max_cached_requests,
                max_index_mb=args.max_index_mb,
            )
            costs = {}
            if args.cost:
                costs = {
                    (method, k): bench.measure_cost(lines, method, k, (1, 8, 64, 256))
                    | bench.measure_index(lines, method)
                    for method in methods
                    for k in args.num_speculative_tokens
                    if method not in ("off", "oracle")
                }
            for result in results:
                cost = costs.get((result["method"], result["num_speculative_tokens"]), {})
                record["results"].append({"trace": trace.name, **result, **cost})
    except (TraceError, bench.MissingError) as error:
        raise UserError(str(error)) from error
    if args.output:
        from rollout_spec.plots import plot_drafters

        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "drafters.json").write_text(json.dumps(record, indent=2) + "\n")
        plot_drafters(record["results"], args.output / "drafters.png")
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        _print_drafters(record["results"])
    return 0


def _print_drafters(results: list[dict[str, Any]]) -> None:
    from itertools import groupby

    from rollout_spec.cli.tables import make_console

    console = make_console()
    for trace, rows in groupby(results, key=lambda result: result["trace"]):
        of_trace = list(rows)
        console.print(_drafters_table(trace, of_trace))
        ratios = _ratios_table(of_trace)
        if ratios.row_count:
            console.print(ratios)


def _setting(row: dict[str, Any]) -> tuple[str, ...]:
    price = row["min_token_prob"]
    return (
        row["method"],
        "" if price is None else f"{price:g}",
        str(row["num_speculative_tokens"]),
        str(row["history"]),
    )


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title)
    for name in ("method", "P", "K", "history", *columns):
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    return table


def _drafters_table(trace: str, results: list[dict[str, Any]]) -> Any:
    table = _table(trace, "tokens/step", "drafted/step", "acceptance", "tail")
    figures = ("tokens_per_step", "draft_tokens_per_step", "acceptance_rate", "tail_tokens_per_step")
    for row in results:
        table.add_row(*_setting(row), *(f"{row[figure]:.3f}" for figure in figures))
    return table


def _ratios_table(results: list[dict[str, Any]]) -> Any:
    from rollout_spec.bench_drafters import BASELINES, OURS, over_baselines

    columns = [f"{figure} / {baseline}" for baseline in BASELINES for figure in ("tokens", "drafted")]
    table = _table("ours over vLLM's suffix, per step", *columns)
    for row in (row for row in results if row["method"] in OURS):
        found = over_baselines(row, results)
        if found:
            ratios = [found.get(baseline, (None, None)) for baseline in BASELINES]
            cells = ("" if ratio is None else f"{ratio:.3f}" for pair in ratios for ratio in pair)
            table.add_row(*_setting(row), *cells)
    return table


def _run_native(args: argparse.Namespace) -> int:
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
    from rich.table import Table

    from rollout_spec.cli.tables import make_console

    console = make_console()
    for mode, result in record["modes"].items():
        step, steps, evictions = result["step"], result["steps"], result["evictions"]
        caption = (
            f"flat within {result['flatness']:.2f}x (alone {result['flatness_alone']:.2f}x); "
            f"one step of {step['rows']} rows, {step['share_of_rows_drafting']:.0%} drafting: "
            f"{step['step_ms']:.3f} ms; "
            f"99th percentile of steps with evictions: {steps['step_p99_over_median']:.1f} x the median; "
            f"evictions add at most {evictions['max_ms']:.2f} ms to a step (99th percentile "
            f"{evictions['p99_ms']:.2f} ms), and {evictions['release_max_ms']:.2f} ms to those that follow"
        )
        table = Table(title=f"mode {mode}, {record['text']} text", caption=caption)
        for name in ("tokens", "us per token", "alone", "bytes per token"):
            table.add_column(name, justify="right")
        for size, row in result["sizes"].items():
            costs = (f"{row[name]:.3f}" for name in ("us_per_token", "us_per_token_alone"))
            table.add_row(f"{int(size):,}", *costs, f"{row['bytes_per_token']:.1f}")
        console.print(table)
