"""`rollout-spec-lab bench engine`: whole rollouts, every method in turn, each in a fresh engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rollout_spec.cli.arguments import add_options, number, path
from rollout_spec.cli.models import MODEL_DRAFTER, device_arguments, tokenized
from rollout_spec.config import SpecConfig, UserError
from rollout_spec_lab.cli import inputs
from rollout_spec_lab.cli.methods import add_compared_arguments, compared, needed_model_drafter
from rollout_spec_lab.cli.outputs import add_output, output_folder

if TYPE_CHECKING:
    from rollout_spec.predict.step_times import Times
    from rollout_spec_lab.bench.engine import EnginePlan

HELP = "whole rollouts in real engines: without drafts, with vLLM's drafters, with ours"
EXAMPLE = "rollout-spec-lab bench engine --methods off,suffix,sam --repeats 5 --output outputs/bench"
METHODS = ("off", "ngram", "suffix", "sam")
WRITTEN = "engine.json, timelines.json, engine.png and rollouts-*.jsonl"
OURS = ("engine.json", "engine.png")  # have our mark


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = number(int, 1)
    served = parser.add_argument_group("what is served")
    add_options(
        served, inputs.MODEL, inputs.DTYPE, ("--prompts", path, "FILE", None, "verl's parquet (the demo's)")
    )
    help_ = "random: prompts of random tokens at temperature 1.5, so that nothing repeats"
    served.add_argument("--load", choices=("grpo", "random"), default="grpo", help=help_)
    add_options(
        served,
        ("--num-prompts", count, "N", 6, "the first N prompts"),
        ("--group-size", count, "N", 8, "responses to each"),
        ("--max-num-seqs", count, "N", 16, "requests at a time"),
        ("--temperature", number(float, 0), "T", None, "(1.0; demo's prompts 0.7, random 1.5)"),
    )

    lengths = parser.add_argument_group("response lengths", "Log-normal, and the same for every method.")
    add_options(
        lengths,
        ("--median-tokens", number(float, 1), "N", 80.0, "median"),
        ("--sigma", number(float, 0), "SIGMA", 0.9, "of the logarithm"),
        ("--max-tokens", count, "N", 512, "no response is longer"),
    )
    help_ = "instead, the model ends a response, or --max-tokens"
    lengths.add_argument("--natural-ends", action="store_true", help=help_)
    group = add_compared_arguments(
        parser, "off, keyed (with our noise, method=keyed), ngram, suffix, sam, sam:THRESHOLD, "
        "sam:auto; model and sam+model, of --model-drafter; METHOD/mrv1, METHOD/mrv2: on that model runner",
        METHODS, "--model-drafter sets it",
    )  # fmt: skip
    add_options(group, inputs.TAIL)
    drawn = parser.add_argument_group("what is drawn, and by which model")
    seed = ("--seed", number(int, 0), "SEED", 0, "of prompts, lengths and noise")
    add_options(drawn, MODEL_DRAFTER, seed)
    add_output(parser, WRITTEN, *OURS)


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import show
    from rollout_spec_lab.bench.rollouts import tables

    plan = _plan(args)
    with output_folder(args.output) as folder:
        kind = {"kind": args.load, "prompts": args.prompts and str(args.prompts)}
        record = serve(args, plan, folder, {}, kind)
    show(record, args.json, *tables(record))
    return 0


def serve(
    args: argparse.Namespace, plan: EnginePlan, folder: Path, rooflines: Mapping[str, Times],
    load: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Serve a plan, keep and return its record; `load`: more of what was served."""
    from rollout_spec.cli.console import tracked
    from rollout_spec_lab.bench.engine import make_record, predict, take_turns
    from rollout_spec_lab.bench.rollouts import write_rollouts

    plan.serve(0, plan.methods[0], folder)  # the first rollout of a run was found slow
    turns = take_turns(
        plan.methods, plan.repeats, lambda repeat, method: plan.serve(repeat, method, folder),
        lambda turns: tracked(turns, "serving"),
    )  # fmt: skip
    for served in turns:  # what is complete is kept, if the command is stopped early
        record = make_record(plan, served)
        record["load"] |= load
        if len(next(iter(served.values()))) == plan.repeats:
            predict(record, plan, served, rooflines)
        if args.output:
            write_rollouts(record, served, plan.load, folder)
    return record


def _plan(args: argparse.Namespace) -> EnginePlan:
    from rollout_spec_lab.bench.engine import EnginePlan
    from rollout_spec_lab.bench.load import Load, random_prompts

    if args.prompts and args.load == "random":
        raise UserError("--prompts: --load random makes prompts of its own")
    methods, spec = compared(args, "bench engine")
    most = spec.get("num_speculative_tokens", SpecConfig.num_speculative_tokens)
    drafter = needed_model_drafter(args.model_drafter, methods, most)
    # Before the model is made, which takes longer.
    rows = inputs.prompt_rows("--prompts", args.prompts, args.num_prompts, args.seed, "bench")
    dtype = args.dtype or inputs.default_dtype()
    model = inputs.model_folder(args.model, dtype)
    temperature = 1.0 if args.prompts else 0.7
    if args.load == "random":
        vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        prompts, temperature = random_prompts(args.num_prompts, vocab_size, args.seed), 1.5
    else:
        prompts = tokenized(model, rows)
    load = Load(
        prompts=prompts, group_size=args.group_size, median_tokens=args.median_tokens, sigma=args.sigma,
        max_tokens=args.max_tokens, natural_ends=args.natural_ends, seed=args.seed,
        temperature=temperature if args.temperature is None else args.temperature,
    )  # fmt: skip
    longest = max(map(len, prompts)) + args.max_tokens
    engine = {"max_num_seqs": args.max_num_seqs, "max_model_len": longest} | device_arguments()
    return EnginePlan(
        load=load, methods=methods, model=model, dtype=dtype, engine=engine, spec=spec,
        num_speculative_tokens=args.num_speculative_tokens, model_drafter=drafter, repeats=args.repeats,
        tail_threshold=args.tail_threshold,
    )  # fmt: skip
