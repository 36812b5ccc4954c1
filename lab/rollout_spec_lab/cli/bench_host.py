"""`rollout-spec-lab bench host`: the host's time in a step, on a simulated device."""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING, Any

from rollout_spec.cli.arguments import add_options, number
from rollout_spec_lab.cli import devices, inputs
from rollout_spec_lab.cli.methods import add_compared_arguments, compared
from rollout_spec_lab.cli.outputs import add_output, output_folder, write

if TYPE_CHECKING:
    from rollout_spec_lab.bench.host import Cell, HostPlan

HELP = "the time of vLLM and the drafter on the host in a step, with a simulated device: no GPU is needed"
EXAMPLE = "rollout-spec-lab bench host outputs/demo/off/rollouts/rollouts-0.jsonl --rows 8 --step-ms 20"
METHODS = ("off", "sam:0", "sam:1024", "off/mrv1", "off:sync/mrv1", "sam:0/mrv1", "sam:1024/mrv1", "suffix")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = number(int, 1)
    served = parser.add_argument_group(
        "what is served: recorded tokens, so that drafts are accepted as they were"
    )
    add_options(
        served,
        *inputs.RECORDING,
        ("--max-tokens", count, "N", None, "no response is longer (1024; all, with --rollout)"),
        ("--rows", count, "N", [1, 8, 64, 256], "requests that decode"),
    )
    served.add_argument(
        "--rollout", action="store_true",
        help="one rollout from its first step to its last, of as many requests as --rows, 32 at least; a "
        "shorter recording is copied",
    )  # fmt: skip

    device = parser.add_argument_group(
        "what the device takes for a step; each value is measured with each of --rows"
    )
    help_ = "however many tokens a step has (5 10 20 40)"
    add_options(device, ("--step-ms", number(float, 0, above=True), "MS", [], help_), *devices.DEVICE)
    add_options(
        parser.add_argument_group("which steps are measured"),
        ("--steps", count, "N", 100, "that are measured"),
        ("--warm-up-steps", count, "N", 50, "before them"),
    )
    add_compared_arguments(
        parser, "off, off:sync (plain vLLM that schedules step by step), ngram, suffix, sam, sam:THRESHOLD, "
        "sam:auto; METHOD/mrv1: on MRV1, as suffix and ngram are anyway", METHODS,
    )  # fmt: skip
    add_output(parser, "host.json", "host.json")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import show, tracked
    from rollout_spec_lab.bench.host import make_record, time_methods
    from rollout_spec_lab.bench.tables import host_tables

    plan = _plan(args)
    lines = inputs.recording(plan.trace, plan.limit_groups)
    with output_folder(args.output) as folder:
        # What is complete is kept, if the command is stopped early.
        for found in time_methods(plan, lines, folder, lambda turns: tracked(turns, "measuring")):
            record = make_record(plan, found)
            if args.output:
                write(record, folder / "host.json")
    show(record, args.json, *host_tables(record))
    return 0


def _plan(args: argparse.Namespace) -> HostPlan:
    from rollout_spec_lab.bench.host import HostPlan, drafting

    methods, spec = compared(args, "bench host", drafting)
    longest = args.max_tokens or (None if args.rollout else 1024)
    return HostPlan(
        trace=args.trace, limit_groups=args.limit_groups, cells=_cells(args),
        methods=methods, spec=spec,
        num_speculative_tokens=args.num_speculative_tokens, warm_up_steps=args.warm_up_steps,
        steps=None if args.rollout else args.steps, max_tokens=longest, repeats=args.repeats,
    )  # fmt: skip


def _cells(args: argparse.Namespace) -> list[Cell]:
    from rollout_spec_lab.bench.host import Cell

    given = args.step_ms or ([] if args.model_config else [5.0, 10.0, 20.0, 40.0])
    steps: dict[str, Any] = {f"{ms:g} ms": f"1:{ms / 1e3}" for ms in given}
    if args.model_config:
        devices.roofline(args.model_config, args.gpu, args.tp)
        steps[args.gpu] = (str(args.model_config), args.gpu, args.tp)
    return [Cell(rows, step, name) for rows, (name, step) in itertools.product(args.rows, steps.items())]
