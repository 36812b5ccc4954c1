"""`rollout-spec simulate`: whole rollouts on clusters one does not have."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from rollout_spec.cli.inputs import add_spec_argument, spec_options
from rollout_spec.config import AUTO, SpecConfig, parse_threshold

HELP = "recorded rollouts through drafter and gate under a table of step times: makespan, threshold to choose"
REFUSED = {  # as --spec, and why
    "method": "off and sam are both simulated",
    "num_speculative_tokens": "--num-speculative-tokens sets it",
    "batch_threshold": "--batch-thresholds sets it",
    "routing": "--routing sets it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help=".jsonl or .jsonl.gz; the lines of one `step` are one rollout",
    )
    parser.add_argument(
        "--step-times",
        required=True,
        metavar="TABLE",
        help="engine.json of `bench engine`, or verified tokens:seconds of a step: 1:0.02,64:0.021,256:0.04",
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1], metavar="N", help="engines (1)")
    parser.add_argument(
        "--max-num-seqs", type=int, nargs="+", default=[64], metavar="N", help="of an engine (64)"
    )
    parser.add_argument(
        "--group-size", type=int, nargs="+", metavar="N", help="the first N responses of each line (all)"
    )
    parser.add_argument(
        "--batch-thresholds",
        nargs="+",
        default=["4", "8", "16", "32", AUTO],
        metavar="T",
        help="(%(default)s)",
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=SpecConfig.num_speculative_tokens, metavar="K"
    )
    add_spec_argument(
        parser,
        "another option of rollout.spec: mode, min_token_prob, corpus, ... history=N: a line drafts from the "
        "last N responses of its `group` in earlier steps of the trace, whichever engine gave them",
    )
    parser.add_argument("--routing", choices=("default", "group"), default="default", help="(%(default)s)")
    parser.add_argument("--limit-groups", type=int, metavar="N", help="only the first N lines of the trace")
    parser.add_argument(
        "--tail-rows", type=int, default=8, metavar="N", help="the tail: at most N requests run (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli import UserError
    from rollout_spec.corpus import check_corpus
    from rollout_spec.replay import TraceError, read_trace
    from rollout_spec.simulate import Cluster, StepTimes, StepTimesError, comes_back, requests_of

    for name in ("replicas", "max_num_seqs", "group_size", "limit_groups", "tail_rows"):
        value = getattr(args, name)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if any(number < 1 for number in numbers):
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    spec = spec_options(args.spec, REFUSED)
    configs = [_config(args, spec, threshold) for threshold in ("off", *args.batch_thresholds)]
    if spec.get("corpus"):
        check_corpus(spec["corpus"])
    clusters = [
        Cluster(replicas, max_num_seqs, group_size, args.routing == "group")
        for replicas, max_num_seqs, group_size in itertools.product(
            args.replicas, args.max_num_seqs, args.group_size or [None]
        )
    ]
    try:
        times = StepTimes.parse(args.step_times)
        lines = list(itertools.islice(read_trace(args.trace), args.limit_groups))
    except (StepTimesError, TraceError) as error:
        raise UserError(str(error)) from error
    if not all(requests_of(lines, cluster.group_size) for cluster in clusters):
        raise UserError(f"{args.trace}: no token in any response")
    if spec.get("history") and not comes_back(lines):
        raise UserError(f"--spec history: no group of {args.trace} comes back in a later step")
    results = [_simulate(lines, cluster, configs, times, args) for cluster in clusters]
    if args.json:
        print(json.dumps({"spec": spec, "results": results}, indent=2, allow_nan=False))
    else:
        _print_table(args.trace.name, results)
    return 0


def _config(args: argparse.Namespace, spec: dict[str, Any], threshold: str) -> SpecConfig:
    if threshold == "off":
        return SpecConfig(method="off")
    fixed = {
        "batch_threshold": parse_threshold(threshold),
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    return SpecConfig.from_mapping(spec | fixed)


def _simulate(lines: Any, cluster: Any, configs: Any, times: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One cluster: without drafts, and with every threshold."""
    from rollout_spec.cli.progress import counted
    from rollout_spec.simulate import simulate

    num_tokens = sum(len(response) for line in lines for response in line.responses[: cluster.group_size])
    runs = []
    for config in configs:
        threshold = config.batch_threshold if config.enabled else "off"
        with counted(
            f"{cluster.num_replicas} x {cluster.max_num_seqs} rows, {threshold}", num_tokens
        ) as advance:
            figures = simulate(lines, cluster, config, times, args.tail_rows, advance)
        runs.append({"batch_threshold": threshold, **figures})
    off = runs[0]
    for figures in runs:
        figures["speedup"] = off["makespan_s"] / figures["makespan_s"]
    best = min(runs, key=lambda figures: figures["makespan_s"])
    return {
        "replicas": cluster.num_replicas,
        "max_num_seqs": cluster.max_num_seqs,
        "group_size": cluster.group_size,
        "best_threshold": best["batch_threshold"],
        "runs": runs,
    }


def _print_table(title: str, results: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from rollout_spec.cli.tables import make_console

    table = Table(title=f"{title}: simulated rollouts, * the threshold to choose", title_justify="left")
    for name in ("engines", "rows", "group", "threshold", "makespan s", "x off", "tail share", "acceptance"):
        table.add_column(name, justify="right")
    for result in results:
        for figures in result["runs"]:
            mark = " *" if figures["batch_threshold"] == result["best_threshold"] else ""
            table.add_row(
                str(result["replicas"]),
                str(result["max_num_seqs"]),
                str(result["group_size"] or "all"),
                f"{figures['batch_threshold']}{mark}",
                f"{figures['makespan_s']:,.1f}",
                f"{figures['speedup']:.2f}",
                f"{figures['tail_share']:.2f}",
                f"{figures['acceptance_rate']:.2f}",
            )
        table.add_section()
    make_console().print(table)
