"""`rollout-spec-lab bench rollout`: a recorded rollout in real engines, of a model without weights."""

from __future__ import annotations

import argparse
from itertools import chain
from typing import TYPE_CHECKING

from rollout_spec.cli.arguments import add_options, number, path
from rollout_spec.cli.models import device_arguments
from rollout_spec_lab.cli import devices, inputs
from rollout_spec_lab.cli.bench_engine import OURS, WRITTEN, serve
from rollout_spec_lab.cli.methods import add_compared_arguments, compared
from rollout_spec_lab.cli.outputs import add_output, output_folder

if TYPE_CHECKING:
    from rollout_spec_lab.bench.engine import EnginePlan

HELP = "a recorded rollout in real engines, with random weights: what drafts gain on this device"
EXAMPLE = (
    "rollout-spec-lab bench rollout outputs/demo/off/rollouts/rollouts-0.jsonl "
    "--model-config recipes/models/qwen3_8b.json --gpu h100"
)
METHODS = ("off", "sam", "sam:0", "ngram", "suffix")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    served = parser.add_argument_group(
        "what is served", "Steps are real. The recording's tokens come instead of what is sampled."
    )
    add_options(
        served,
        *inputs.RECORDING,
        ("--max-tokens", number(int, 1), "N", 1024, "no response is longer"),
        ("--max-num-seqs", number(int, 1), "N", 64, "requests at a time"),
        ("--rows", number(int, 1), "N", [],
         "instead of the whole rollout: its first N responses, all at a time; of several N each by "
         "itself, in DIR/rows-N"),
    )  # fmt: skip
    add_options(
        parser.add_argument_group("the model and the device"),
        ("--model-config", path, "FILE", None, "the policy's config.json"),
        devices.GPU,
        inputs.DTYPE,
        inputs.ENGINE,
    )
    known = "as in `bench engine`, without models"
    add_options(add_compared_arguments(parser, known, METHODS), inputs.TAIL)
    add_output(parser, WRITTEN, *OURS)


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import show
    from rollout_spec_lab.bench.rollouts import tables

    predicted = devices.rooflines(args.model_config, args.gpu)
    with output_folder(args.output) as folder:
        model = inputs.dummy_model(args.model_config, folder)
        plans = {f"rows-{rows}" if rows else ".": _plan(args, model, rows) for rows in args.rows or [None]}
        found = {}
        for name, plan in plans.items():
            (folder / name).mkdir(exist_ok=True)
            found[name.removeprefix("rows-")] = serve(args, plan, folder / name, predicted)
    show(found.get(".", found), args.json, *chain.from_iterable(map(tables, found.values())))
    return 0


def _plan(args: argparse.Namespace, model: str, rows: int | None = None) -> EnginePlan:
    from rollout_spec_lab.bench.engine import EnginePlan
    from rollout_spec_lab.bench.load import first_responses, recorded_load

    methods, spec = compared(args, "bench rollout")
    lines = inputs.recording(args.trace, args.limit_groups)
    if rows:
        lines = first_responses(lines, rows)
    load = recorded_load(lines, args.max_tokens, model)
    engine = {"load_format": "dummy", "max_model_len": max(map(len, load.prompts)) + load.max_tokens}
    engine |= {**device_arguments(), **args.engine}
    return EnginePlan(
        load=load, methods=methods, model=model, dtype=args.dtype or inputs.default_dtype(),
        engine=engine | {"max_num_seqs": rows or args.max_num_seqs}, spec=spec,
        num_speculative_tokens=args.num_speculative_tokens, repeats=args.repeats,
        tail_threshold=args.tail_threshold,
    )  # fmt: skip
