"""`rollout-spec simulate`: whole rollouts on clusters one does not have."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from rollout_spec.cli import add_example
from rollout_spec.cli.inputs import add_k_argument, add_spec_argument, number, spec_options

HELP = "take recorded rollouts through drafter and gate in virtual time, to choose options for a cluster"
REFUSED = {  # as --spec, and why
    "method": "off and sam are both simulated",
    "verify": "tokens are recorded ones",
    "num_speculative_tokens": "--num-speculative-tokens sets it",
    "batch_threshold": "--batch-thresholds sets it",
    "routing": "--routing sets it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    positive = number(int, 1)
    lines = parser.add_argument_group("lines of the trace")
    lines.add_argument(
        "trace", type=Path, metavar="TRACE", help=".jsonl or .jsonl.gz; lines of one `step` are one rollout"
    )
    lines.add_argument("--limit-groups", type=positive, metavar="N", help="only the first N lines")
    cluster = parser.add_argument_group("cluster; of several values every combination is simulated")
    cluster.add_argument(
        "--step-times",
        required=True,
        metavar="TABLE",
        help="engine.json of `bench engine`, or verified tokens:seconds of a step: 1:0.02,64:0.021,256:0.04",
    )
    cluster.add_argument("--replicas", type=positive, nargs="+", default=[1], metavar="N", help="engines")
    cluster.add_argument(
        "--max-num-seqs", type=positive, nargs="+", default=[64], metavar="N", help="of an engine"
    )
    cluster.add_argument(
        "--group-size", type=positive, nargs="+", metavar="N", help="the first N responses of each line (all)"
    )
    cluster.add_argument(
        "--routing", choices=("default", "group"), default="default", help="group: siblings to one engine"
    )
    drafter = parser.add_argument_group("drafter")
    drafter.add_argument(
        "--batch-thresholds",
        nargs="+",
        default=["4", "8", "16", "32", "auto"],
        metavar="T",
        help="numbers or auto",
    )
    add_k_argument(drafter)
    add_spec_argument(
        drafter,
        "any other option of rollout.spec; with history=N a line drafts from the last N responses of its "
        "`group` in earlier steps of the trace, whichever engine gave them",
        REFUSED,
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--tail-rows", type=positive, default=8, metavar="N", help="the tail: at most N requests run"
    )
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    trace = "outputs/demo/off/rollouts/rollouts-0.jsonl"
    add_example(parser, f"rollout-spec simulate {trace} --step-times 1:0.02,64:0.021,256:0.04")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.config import UserError
    from rollout_spec.drafting.corpus import check_corpus
    from rollout_spec.measure.replay import read_trace
    from rollout_spec.measure.simulate import Cluster, StepTimes, comes_back, requests_of

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
    times = StepTimes.parse(args.step_times)
    lines = list(itertools.islice(read_trace(args.trace), args.limit_groups))
    if not all(requests_of(lines, cluster.group_size) for cluster in clusters):
        raise UserError(f"{args.trace}: no token in any response")
    if spec.get("history") and not comes_back(lines):
        raise UserError(f"--spec history: no group of {args.trace} comes back in a later step")
    results = [_simulate(lines, cluster, configs, times, args.tail_rows) for cluster in clusters]
    if args.json:
        print(json.dumps({"spec": spec, "results": results}, indent=2, allow_nan=False))
    else:
        _print_table(args.trace.name, results)
    return 0


def _config(args: argparse.Namespace, spec: dict[str, Any], threshold: str) -> Any:
    from rollout_spec.config import SpecConfig, parse_threshold

    if threshold == "off":
        return SpecConfig(method="off")
    fixed = {
        "batch_threshold": parse_threshold(threshold),
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    return SpecConfig.from_mapping(spec | fixed)


def _simulate(lines: Any, cluster: Any, configs: Any, times: Any, tail_rows: int) -> dict[str, Any]:
    """One cluster: without drafts, and with every threshold."""
    from rollout_spec.cli.progress import counted
    from rollout_spec.measure.simulate import simulate

    num_tokens = sum(len(response) for line in lines for response in line.responses[: cluster.group_size])
    runs = []
    for config in configs:
        threshold = config.batch_threshold if config.enabled else "off"
        title = f"{cluster.num_replicas} x {cluster.max_num_seqs} rows, {threshold}"
        with counted(title, num_tokens) as advance:
            figures = simulate(lines, cluster, config, times, tail_rows, advance)
        runs.append({"batch_threshold": threshold, **figures})
    for figures in runs:
        figures["speedup"] = runs[0]["makespan_s"] / figures["makespan_s"]
    best = min(runs, key=lambda figures: figures["makespan_s"])
    return {
        "replicas": cluster.num_replicas,
        "max_num_seqs": cluster.max_num_seqs,
        "group_size": cluster.group_size,
        "best_threshold": best["batch_threshold"],
        "runs": runs,
    }


def _print_table(title: str, results: list[dict[str, Any]]) -> None:
    from rollout_spec.cli.tables import make_console
    from rollout_spec.report.tables import make_table

    columns = ("rows", "group", "threshold", "makespan s", "x off", "tail share", "acceptance")
    table = make_table(f"{title}: simulated rollouts, * the threshold to choose", "engines", *columns)
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
