"""`rollout-spec-lab bench engine`: whole rollouts, every method in turn, each in a fresh engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import add_example
from rollout_spec.cli.inputs import add_model_drafter, device_arguments, number, tokenized
from rollout_spec.config import SpecConfig, UserError
from rollout_spec_lab.cli import inputs

if TYPE_CHECKING:
    from rollout_spec.predict.step_times import Times
    from rollout_spec_lab.bench.engine import Plan

HELP = "whole rollouts in real engines: without drafts, with vLLM's drafters, with ours"
METHODS = ("off", "ngram", "suffix", "sam")
REFUSED = {  # as --spec, and why
    "num_speculative_tokens": "--num-speculative-tokens sets it",
    "model_tokens": "--model-drafter sets it",
}
WRITTEN = "engine.json, timelines.json, engine.png and rollouts-*.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_load(parser)
    compared = inputs.add_compared_arguments(
        parser, "off, off:coupled (with the noise of verify=coupled), ngram, suffix, sam, sam:THRESHOLD, "
        "sam:auto; model and sam+model, of --model-drafter; METHOD/v1, METHOD/v2: on that model runner "
        f"({','.join(METHODS)}, without what is not installed)", REFUSED,
    )  # fmt: skip
    inputs.add_tail_argument(compared)
    drawn = parser.add_argument_group("what is drawn, and by which model")
    add_model_drafter(drawn)
    drawn.add_argument("--seed", type=number(int, 0), default=0, help="of prompts, lengths and noise")
    drawn.add_argument(
        "--record-proposals", action="store_true",
        help="one more rollout, for bench drafters: proposals.jsonl, what the model drafts after each token",
    )  # fmt: skip
    inputs.add_output(parser, WRITTEN)
    add_example(
        parser, "rollout-spec-lab bench engine --methods off,suffix,sam --repeats 5 --output outputs/bench"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    count = number(int, 1)
    served = parser.add_argument_group("what is served")
    inputs.add_model_argument(served)
    served.add_argument("--dtype", help="of the model (bfloat16; float32 on a CPU)")
    served.add_argument("--prompts", type=Path, metavar="FILE", help="verl's parquet (the demo's)")
    served.add_argument(
        "--load", choices=("grpo", "random"), default="grpo",
        help="random: prompts of random tokens at temperature 1.5, so that nothing repeats",
    )  # fmt: skip
    served.add_argument("--num-prompts", type=count, default=6, metavar="N", help="the first N prompts")
    served.add_argument("--group-size", type=count, default=8, metavar="N", help="responses to each")
    served.add_argument("--max-num-seqs", type=count, default=16, metavar="N", help="requests at a time")
    served.add_argument(
        "--temperature", type=number(float, 0), metavar="T", help="(1.0; demo's prompts 0.7, random 1.5)"
    )

    lengths = parser.add_argument_group("response lengths", "Log-normal, and the same for every method.")
    lengths.add_argument("--median-tokens", type=number(float, 1), default=80.0, metavar="N", help="median")
    lengths.add_argument("--sigma", type=number(float, 0), default=0.9, help="of the logarithm")
    lengths.add_argument("--max-tokens", type=count, default=512, metavar="N", help="no response is longer")
    lengths.add_argument(
        "--natural-ends", action="store_true", help="instead, the model ends a response, or --max-tokens"
    )


def run(args: argparse.Namespace) -> int:
    from rollout_spec_lab.bench.engine import record_proposals
    from rollout_spec_lab.bench.rollouts import tables, write_proposals

    plan = _plan(args)
    with inputs.output_folder(args.output) as folder:
        kind = {"kind": args.load, "prompts": args.prompts and str(args.prompts)}
        record = serve(args, plan, folder, {}, kind)
        if args.record_proposals:
            write_proposals(record_proposals(plan, folder), plan.load.prompts, plan.load.group_size, folder)
    return inputs.shown(record, args.json, tables)


def serve(
    args: argparse.Namespace, plan: Plan, folder: Path, rooflines: Mapping[str, Times],
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


def _plan(args: argparse.Namespace) -> Plan:
    from rollout_spec_lab.bench.engine import RECORDS, Plan
    from rollout_spec_lab.bench.load import Load, random_prompts

    if args.prompts and args.load == "random":
        raise UserError("--prompts: --load random makes prompts of its own")
    if args.record_proposals and not (args.model_drafter and args.output):
        raise UserError("--record-proposals: needs --model-drafter and --output")
    spec = inputs.spec_of(args, REFUSED)
    methods = inputs.checked_methods("bench engine", METHODS, args.methods, spec)
    most = spec.get("num_speculative_tokens", SpecConfig.num_speculative_tokens)
    drafting = [*methods, *[RECORDS] * args.record_proposals]
    drafter = inputs.needed_model_drafter(args.model_drafter, drafting, most)
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
    return Plan(
        load=load, methods=methods, model=model, dtype=dtype, engine=engine, spec=spec,
        num_speculative_tokens=args.num_speculative_tokens, model_drafter=drafter, repeats=args.repeats,
        tail_threshold=args.tail_threshold,
    )  # fmt: skip
