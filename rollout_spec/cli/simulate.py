"""`rollout-spec simulate`: predict the time of whole rollouts on a cluster."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import rollouts
from rollout_spec.cli.arguments import MAX_ENGINES, add_options, add_spec_argument, number, spec_options
from rollout_spec.config import SpecConfig, UserError, parse_threshold

if TYPE_CHECKING:
    from rollout_spec.predict.simulate import Simulated
    from rollout_spec.trace import Rollout

HELP = "predict how long recorded rollouts take on a cluster, with drafts and without"
EXAMPLE = "rollout-spec simulate outputs/demo/off/rollouts/rollouts-0.jsonl --step-times 1:0.02,256:0.04"
REFUSED = {  # as --spec, and why
    "method": "off and sam are both simulated",
    "num_speculative_tokens": "--num-speculative-tokens sets it",
    "model_tokens": "no model drafts here, but with --model-acceptance",
    "batch_threshold": "--batch-thresholds sets it",
    "routing": "a prompt's samples stay together",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lines = parser.add_argument_group("what is served")
    rollouts.add_rollouts_arguments(lines)
    add_options(
        lines,
        ("--limit-groups", number(int, 1), "N", None, "only the first N lines"),
        ("--copies", number(int, 1, MAX_ENGINES), "N", 1,
         "serve the recording N times at once, each copy with tokens of its own"),
        ("--tool-seconds", number(float, 0.0, 86_400.0), "S", None,
         "between two turns of an agent, where the recording has turns (1)"),
    )  # fmt: skip
    add_options(
        parser.add_argument_group("how long a step takes"),
        ("--step-times", str, "TABLE", None,
         "engine.json of `bench engine`, or tokens:seconds of steps: 1:0.02,64:0.021,256:0.04"),
    )  # fmt: skip
    positive = number(int, 1)
    add_options(
        parser.add_argument_group("cluster (with several values, every combination is simulated)"),
        ("--replicas", number(int, 1, MAX_ENGINES), "N", [1], "engines"),
        ("--max-num-seqs", positive, "N", [64], "requests that an engine runs at a time"),
        ("--max-num-batched-tokens", positive, "N", 8192, "tokens of a step at most, prompts included"),
        ("--group-size", positive, "N", [], "the first N responses of each line (all)"),
    )
    _add_drafter_arguments(parser)
    if (devices := _devices()) is not None:
        devices.add_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _devices() -> Any:
    """Step times of devices that one does not have: a module of the laboratory, where that is installed. It
    has `add_arguments`, and `simulated`, which gives a `Simulated`; None where no device is named."""
    return next((each.load() for each in entry_points(group="rollout_spec.devices")), None)


def _add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafter")
    add_options(
        group,
        ("--batch-thresholds", parse_threshold, "T", [4, 8, 16, 32, "auto"],
         "numbers: draft while at most T requests run; auto: the gate decides by measured time"),
        ("--num-speculative-tokens", int, "K", [],
         "most draft tokens per row and step; of several the best is marked "
         f"({SpecConfig.num_speculative_tokens})"),
    )  # fmt: skip
    help_ = "draft K tokens in every row that drafts, as with vllm-ascend's FULL_DECODE_ONLY"
    group.add_argument("--pad-drafts", action="store_true", help=help_)
    add_spec_argument(
        group,
        "any other option of rollout.spec; with history=N a line drafts from the last N responses of its "
        "`group` in earlier training steps of the recording, whichever engine served them",
        REFUSED,
    )


def run(args: argparse.Namespace) -> int:
    """Simulate every cluster with every configuration, and show the figures."""
    from rollout_spec.cli.console import counted, show
    from rollout_spec.predict.doubts import warn_of_same_texts
    from rollout_spec.predict.engine import Cluster
    from rollout_spec.predict.load import requests_of
    from rollout_spec.predict.simulate import configurations, simulate_each
    from rollout_spec.report.simulation import headline, table

    served, spec = _what_is_served(args), spec_options(args)
    configs = configurations(spec, args.batch_thresholds, served.nums_speculative_tokens)
    clusters = [
        Cluster(
            *combination,
            num_ranks=served.num_ranks,
            kv_tokens=served.times.kv_tokens,
            max_num_batched_tokens=args.max_num_batched_tokens,
            pads_drafts=args.pad_drafts,
            tool_seconds=1.0 if args.tool_seconds is None else args.tool_seconds,
        )
        for combination in itertools.product(args.replicas, args.max_num_seqs, args.group_size or [None])
    ]
    if not all(requests_of(served.lines, cluster.group_size) for cluster in clusters):
        raise UserError(f"{args.traces[0]}: no token in any response")
    _check_use(args, spec, served.lines)
    if spec.get("corpus"):
        warn_of_same_texts(served.lines, spec["corpus"])
    results = [simulate_each(served, cluster, configs, counted) for cluster in clusters]
    found = {"spec": spec, "results": results}
    show(found, args.json, headline(results), table(args.traces[0].name, results))
    return 0


def _what_is_served(args: argparse.Namespace) -> Simulated:
    from rollout_spec.predict.load import copied
    from rollout_spec.predict.simulate import Simulated
    from rollout_spec.predict.step_times import StepTimes

    def lines() -> list[Rollout]:
        return copied(list(rollouts.read(args, args.traces, args.limit_groups)), args.copies)

    if (devices := _devices()) is not None and (found := devices.simulated(args, lines)) is not None:
        return found
    if args.step_times is None:
        raise UserError("--step-times: must say how long a step takes")
    ks = args.num_speculative_tokens or [SpecConfig.num_speculative_tokens]
    return Simulated(lines(), StepTimes.parse(args.step_times), ks)


def _check_use(args: argparse.Namespace, spec: Mapping[str, Any], lines: Sequence[Rollout]) -> None:
    """Refuse what changes nothing with this recording."""
    from rollout_spec.predict.load import comes_back

    if spec.get("corpus") and args.copies > 1:
        raise UserError(f"--copies {args.copies}: copies have tokens of their own, which no corpus has")
    trace, size = args.traces[0], max(args.group_size, default=0)
    most = max(len(line.responses) for line in lines)
    has_turns = any(len(turns) > 1 for line in lines for turns in line.turns)
    if spec.get("history") and not comes_back(lines):
        raise UserError(f"--spec history: no group of {trace} comes back in a later training step")
    if size > most:
        raise UserError(f"--group-size {size}: no line of {trace} has more than {most} responses")
    if args.tool_seconds is not None and not has_turns:
        raise UserError(f"--tool-seconds: no response of {trace} has several turns")
