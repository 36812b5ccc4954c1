"""`rollout-spec bench`: measurements on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from rollout_spec.cli import bench_engine

HELP = "measure on this machine: the native core, drafters side by side, whole rollouts"
DEFAULT_METHODS = (
    *("off", "ngram", "suffix", "suffix_tuned"),
    *("earliest", "frequent", "sam", "suffix_policy", "oracle"),
)


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
        "--methods",
        metavar="M,M",
        help=f"by commas ({','.join(DEFAULT_METHODS)}, without what is not installed; also suffix_server, "
        "suffix_server_tuned, earliest_single, sam_single)",
    )
    drafters.add_argument(
        "--num-speculative-tokens", type=int, nargs="+", default=[3, 8, 16], metavar="K", help="(3 8 16)"
    )
    drafters.add_argument(
        "--history", type=int, nargs="+", default=[0], metavar="N", help="earlier responses per group (0)"
    )
    drafters.add_argument(
        "--min-token-prob",
        type=float,
        nargs="+",
        default=[],
        metavar="P",
        help="prices of our modes that have one, a line each (as rollout.spec.min_token_prob=auto)",
    )
    drafters.add_argument(
        "--equal-drafts",
        action="store_true",
        help="sam also at the prices, found by trial, at which it drafts no more than each of suffix*, and "
        "than two thirds of suffix_tuned",
    )
    drafters.add_argument(
        "--max-cached-requests",
        type=int,
        default=10_000,
        metavar="N",
        help="of the methods suffix* (%(default)s, vLLM's default)",
    )
    drafters.add_argument(
        "--max-index-mb",
        type=int,
        default=1024,
        metavar="MB",
        help="budget of our index and of the history, MiB each (%(default)s)",
    )
    drafters.add_argument(
        "--limit-groups", type=int, metavar="N", help="only the first N lines of each trace"
    )
    drafters.add_argument(
        "--no-cost",
        action="store_true",
        help="do not time steps of 1, 8, 64 and 256 rows, and indexing",
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
    # Of vLLM's methods: the answer is on standard output.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from rollout_spec import bench_drafters as bench
    from rollout_spec.cli import UserError
    from rollout_spec.native import BudgetExceeded
    from rollout_spec.replay import TraceError

    methods = _methods(args)
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
    if args.equal_drafts and not set(methods) & set(bench.SUFFIX):
        raise UserError(f"--equal-drafts: needs one of {', '.join(bench.SUFFIX)} among the methods")
    record: dict[str, Any] = {"environment": bench.environment(), "results": []}
    try:
        for trace in args.traces:
            record["results"] += _of_trace(args, trace, methods)
    except (TraceError, bench.MissingError) as error:
        raise UserError(str(error)) from error
    except BudgetExceeded as error:
        raise UserError(f"--max-index-mb {args.max_index_mb}: a line needs more ({error})") from error
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


def _methods(args: argparse.Namespace) -> list[str]:
    """The methods asked for; by default those of DEFAULT_METHODS whose packages are installed."""
    from rollout_spec.bench_drafters import METHODS, MissingError, require
    from rollout_spec.cli import UserError

    if args.methods is not None:
        methods = args.methods.split(",")
        for method in methods:
            if method not in METHODS:
                raise UserError(f"--methods {method}: must be one of {', '.join(METHODS)}")
        return methods
    found: list[str] = []
    left_out: dict[str, list[str]] = {}
    for method in DEFAULT_METHODS:
        try:
            require(method)
            found.append(method)
        except MissingError as error:
            left_out.setdefault(" ".join(str(error).split()), []).append(method)
    for reason, names in left_out.items():
        print(f"rollout-spec bench drafters: without {', '.join(names)}: {reason}", file=sys.stderr)
    return found


def _of_trace(args: argparse.Namespace, trace: Path, methods: list[str]) -> list[dict[str, Any]]:
    from itertools import islice

    from rollout_spec import bench_costs
    from rollout_spec import bench_drafters as bench
    from rollout_spec.cli.progress import tracked
    from rollout_spec.replay import read_trace

    lines = list(islice(read_trace(trace), args.limit_groups))
    if not args.no_cost:
        bench_costs.check(lines)
    results = bench.measure(
        tracked(lines, trace.name),
        methods,
        args.num_speculative_tokens,
        args.history,
        min_token_probs=args.min_token_prob,
        max_cached_requests=args.max_cached_requests,
        max_index_mb=args.max_index_mb,
    )
    if args.equal_drafts:
        wanted = tracked(bench.equal_drafts(results), f"{trace.name}: equal drafts")
        results += [
            bench.at_equal_drafts(lines, name, baseline, max_index_mb=args.max_index_mb)
            for name, baseline in wanted
        ]
    if not args.no_cost:
        bench_costs.add_costs(lines, results, tracked(args.num_speculative_tokens, f"{trace.name}: costs"))
    return [{"trace": trace.name, **result} for result in results]


def _print_drafters(results: list[dict[str, Any]]) -> None:
    from itertools import groupby

    from rollout_spec.cli.tables import make_console

    console = make_console()
    for trace, rows in groupby(results, key=lambda result: result["trace"]):
        of_trace = list(rows)
        console.print(_drafters_table(trace, of_trace))
        ratios = (_ratios_table(of_trace, with_earlier) for with_earlier in (False, True))
        for table in (*ratios, _steps_table(of_trace), _index_table(of_trace)):
            if table.row_count:
                console.print(table)


def _setting(row: dict[str, Any]) -> tuple[str, ...]:
    price = row["min_token_prob"]
    return (
        row["method"] if row["equal_drafts"] is None else f"{row['method']} as {row['equal_drafts']}",
        "" if price is None else price if isinstance(price, str) else f"{price:.3g}",
        str(row["num_speculative_tokens"]),
        str(row["history"]),
    )


def _table(title: str, *columns: str, caption: str | None = None) -> Any:
    from rich.table import Table

    table = Table(title=title, caption=caption)
    for name in ("method", "P", "K", "history", *columns):
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    return table


def _drafters_table(trace: str, results: list[dict[str, Any]]) -> Any:
    from rollout_spec.bench_drafters import FIGURES

    table = _table(trace, "tokens/step", "drafted/step", "acceptance", "tail")
    for row in results:
        table.add_row(*_setting(row), *(f"{row[figure]:.3f}" for figure in FIGURES))
    return table


def _ratios_table(results: list[dict[str, Any]], with_earlier: bool) -> Any:
    from rollout_spec.bench_drafters import OURS, SUFFIX, over_baselines

    baselines = [name for name in SUFFIX if any(row["method"] == name for row in results)]
    columns = [f"{figure} / {baseline}" for baseline in baselines for figure in ("tokens", "drafted")]
    where = ", where the prompt had earlier responses" if with_earlier else ""
    table = _table(f"ours over vLLM's suffix, per step{where}", *columns)
    for row in (row for row in results if row["method"] in OURS):
        found = over_baselines(row, results, with_earlier=with_earlier)
        if found:
            ratios = [found.get(baseline, (None, None)) for baseline in baselines]
            cells = ("" if ratio is None else f"{ratio:.3f}" for pair in ratios for ratio in pair)
            table.add_row(*_setting(row), *cells)
    return table


def _steps_table(results: list[dict[str, Any]]) -> Any:
    """Of the first history: what a step costs does not depend on it."""
    rows = [row for row in results if "us_per_row" in row and row["history"] == results[0]["history"]]
    batches, lengths = (
        list(rows[0][name]) if rows else [] for name in ("us_per_row", "us_per_row_by_length")
    )
    table = _table(
        "microseconds per row of a step, by the rows of a batch",
        *batches,
        *(f"suffix over it, {batch}" for batch in batches[-2:]),
        "p99",
        *(f"1 row of {int(size) >> 10} k" for size in lengths),
        caption="suffix over it: of the same steps, median and 10th to 90th percentile; p99: of a step over "
        f"its median, {', '.join(batches)} rows",
    )
    for row in rows:
        if row["us_per_row"][batches[0]] is not None:
            costs = (f"{row['us_per_row'][batch]:.2f}" for batch in batches)
            ratios = (_spread(row["suffix_over_us_per_row"][batch]) for batch in batches[-2:])
            p99 = ", ".join(f"{row['p99_over_median'][batch]:.1f}" for batch in batches)
            of_lengths = (f"{row['us_per_row_by_length'][size]:.1f}" for size in lengths)
            table.add_row(*_setting(row), *costs, *ratios, p99, *of_lengths)
    return table


def _spread(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.1f} ({ratio['p10']:.1f} to {ratio['p90']:.1f})"


def _index_table(results: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    rows = {row["method"]: row for row in results if "bytes_per_token" in row}
    sizes = list(next(iter(rows.values()))["bytes_per_token"]) if rows else []
    table = Table(title="a token in the index, by the tokens of the text")
    for name in ("method", *(f"{unit}, {int(size) >> 10} k" for unit in ("ns", "bytes") for size in sizes)):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, row in rows.items():
        costs = [row[name][size] for name in ("ns_per_indexed_token", "bytes_per_token") for size in sizes]
        if None not in costs:
            table.add_row(method, *(f"{cost:.0f}" for cost in costs))
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
