"""`rollout-spec simulate`: predict the time of whole rollouts on a cluster."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import add_example, rollouts
from rollout_spec.cli.arguments import MAX_ENGINES, add_options, add_spec_argument, number, spec_options
from rollout_spec.cli.roofline import add_device_arguments, roofline
from rollout_spec.config import SpecConfig, UserError
from rollout_spec.recurrent import DEFAULT_RECURRENT_TOKENS

if TYPE_CHECKING:
    from rollout_spec.predict.engine import Cluster
    from rollout_spec.trace import Rollout

HELP = "predict how long recorded rollouts take on a cluster, with drafts and without"
REFUSED = {  # as --spec, and why
    "method": "off and sam are both simulated",
    "verify": "tokens are recorded ones",
    "num_speculative_tokens": "--num-speculative-tokens sets it",
    "model_tokens": "--model-acceptance sets it, a number for each",
    "batch_threshold": "--batch-thresholds sets it",
    "routing": "a prompt's samples stay together",
}
OF_ROOFLINE = ("gpu", "tp", "dp", "expert_parallel", "gpu_memory_utilization", "longest_response", "runner")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    positive, engines = number(int, 1), number(int, 1, MAX_ENGINES)
    lines = parser.add_argument_group("what is served")
    rollouts.add_rollouts_arguments(lines)
    add_options(
        lines,
        ("--limit-groups", positive, "N", None, "only the first N lines"),
        ("--copies", engines, "N", 1,
         "serve the recording N times at once, each copy with tokens of its own"),
        ("--tool-seconds", number(float, 0.0, 86_400.0), "S", None,
         "between two turns of an agent, where the recording has turns (1)"),
    )  # fmt: skip
    _add_times(parser.add_argument_group("how long a step takes: measured, or predicted for a device"))
    add_options(
        parser.add_argument_group("cluster (with several values, every combination is simulated)"),
        ("--replicas", engines, "N", [1], "engines"),
        ("--max-num-seqs", positive, "N", [64], "requests that an engine runs at a time"),
        ("--group-size", positive, "N", [], "the first N responses of each line (all)"),
    )
    _add_drafter(parser.add_argument_group("drafter"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    trace = "outputs/demo/off/rollouts/rollouts-0.jsonl"
    add_example(parser, f"rollout-spec simulate {trace} --step-times 1:0.02,64:0.021,256:0.04")


def _add_times(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--step-times", metavar="TABLE",
        help="engine.json of `bench engine`, or tokens:seconds of steps: 1:0.02,64:0.021,256:0.04",
    )  # fmt: skip
    add_device_arguments(group, source)
    help_ = "data-parallel ranks of an engine: they share the experts and step together (1)"
    add_options(group, ("--dp", number(int, 1, MAX_ENGINES), "N", None, help_))
    group.add_argument(
        "--expert-parallel", action="store_true",
        help="each device holds whole experts, as always with --dp, not a slice of each",
    )  # fmt: skip
    add_options(
        group,
        ("--gpu-memory-utilization", number(float, 0.0, 1.0, above=True), "SHARE", None,
         "share of the device's memory for weights and KV cache (0.9)"),
        ("--longest-response", number(int, 1), "TOKENS", None,
         "stretch all texts by one factor, so that the longest response has TOKENS tokens"),
    )  # fmt: skip
    group.add_argument(
        "--runner", choices=("v1", "v2"),
        help="vLLM's model runner: with v2, steps with drafts wait for the host; with v1, all steps of an "
        "engine that drafts do (v2)",
    )  # fmt: skip


def _add_drafter(group: argparse._ArgumentGroup) -> None:
    add_options(
        group,
        ("--batch-thresholds", str, "T", ["4", "8", "16", "32", "auto"],
         "numbers: draft while at most T requests run; auto: the gate decides by measured time"),
        ("--num-speculative-tokens", int, "K", [],
         f"most draft tokens per row and step; of several the best is marked "
         f"({SpecConfig.num_speculative_tokens}, and {DEFAULT_RECURRENT_TOKENS} with recurrent layers)"),
    )  # fmt: skip
    rollouts.add_simulated_model(group)
    group.add_argument(
        "--fill-drafts", action="store_true",
        help="draft K tokens in every row that drafts, as with vllm-ascend's FULL_DECODE_ONLY",
    )  # fmt: skip
    add_spec_argument(
        group,
        "any other option of rollout.spec; with history=N a line drafts from the last N responses of its "
        "`group` in earlier steps of the recording, whichever engine served them",
        REFUSED,
    )


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import counted, show
    from rollout_spec.predict.doubts import warn_of_same_texts
    from rollout_spec.predict.load import copied, requests_of
    from rollout_spec.predict.simulate import check_cache, compare, configurations
    from rollout_spec.report.simulation import headline, table

    if max(args.replicas) * (args.dp or 1) > MAX_ENGINES:
        raise UserError(f"--replicas {max(args.replicas)} --dp {args.dp}: at most {MAX_ENGINES} ranks in all")
    spec = spec_options(args.spec, REFUSED)
    if spec.get("corpus") and args.copies > 1:
        raise UserError(f"--copies {args.copies}: copies have tokens of their own, which no corpus has")
    lines = copied(list(rollouts.read(args, args.traces, args.limit_groups)), args.copies)
    lines = list(rollouts.with_model(args, lines))
    times = _times(args, max((len(r) for line in lines for r in line.responses), default=0))
    configs = configurations(spec, args.batch_thresholds, args.num_speculative_tokens, times)
    clusters = _clusters(args, times)
    if not all(requests_of(lines, cluster.group_size) for cluster in clusters):
        raise UserError(f"{args.traces[0]}: no token in any response")
    _check_use(args, spec, lines)
    if spec.get("corpus"):
        warn_of_same_texts(lines, spec["corpus"])
    for cluster in clusters:
        check_cache(requests_of(lines, cluster.group_size), cluster, configs, times)
    model = _model(args, lines, times)
    results = [compare(lines, cluster, configs, times, model, counted) for cluster in clusters]
    found = {"spec": spec, "results": results}
    show(found, args.json, headline(results), table(args.traces[0].name, results))
    return 0


def _clusters(args: argparse.Namespace, times: Any) -> list[Cluster]:
    from rollout_spec.predict.engine import Cluster

    return [
        Cluster(
            *combination,
            num_ranks=args.dp or 1,
            kv_tokens=getattr(times, "kv_tokens", math.inf),
            fills_drafts=args.fill_drafts,
            tool_seconds=1.0 if args.tool_seconds is None else args.tool_seconds,
        )
        for combination in itertools.product(args.replicas, args.max_num_seqs, args.group_size or [None])
    ]


def _check_use(args: argparse.Namespace, spec: Mapping[str, Any], lines: Sequence[Rollout]) -> None:
    """Refuse what changes nothing with this recording."""
    from rollout_spec.predict.load import comes_back

    trace, size = args.traces[0], max(args.group_size, default=0)
    most = max(len(line.responses) for line in lines)
    has_turns = any(len(turns) > 1 for line in lines for turns in line.turns)
    if spec.get("history") and not comes_back(lines):
        raise UserError(f"--spec history: no group of {trace} comes back in a later step")
    if size > most:
        raise UserError(f"--group-size {size}: no line of {trace} has more than {most} responses")
    if args.tool_seconds is not None and not has_turns:
        raise UserError(f"--tool-seconds: no response of {trace} has several turns")


def _times(args: argparse.Namespace, longest: int) -> Any:
    """The step times; `longest`: tokens of the longest response."""
    from rollout_spec.predict.roofline import HOSTS
    from rollout_spec.predict.step_times import StepTimes

    if args.step_times is not None:
        given = [name for name in OF_ROOFLINE if getattr(args, name)]
        if given:
            raise UserError(f"--{given[0].replace('_', '-')}: belongs to --model-config")
        return StepTimes.parse(args.step_times)
    return roofline(
        args,
        data_parallel=args.dp or 1,
        expert_parallel=args.expert_parallel,
        host=HOSTS[args.runner or "v2"],
        memory_share=args.gpu_memory_utilization or 0.9,
        stretch=args.longest_response / longest if args.longest_response and longest else 1.0,
    )


def _model(args: argparse.Namespace, lines: Any, times: Any) -> Any:
    """The model whose drafts the lines have, if any."""
    from rollout_spec.predict.simulate import model_of

    of_pass: Any = getattr(times, "head", None)  # a table of step times has none
    model = model_of(lines, of_pass)
    if model and of_pass is None:
        raise UserError("--step-times: a table has no times of a draft model; take --model-config")
    if model and (args.dp or 1) > 1:
        raise UserError(
            f"--dp {args.dp}: engines refuse a draft model on data-parallel ranks of experts; use --tp"
        )
    return model
