"""`rollout-spec-lab gpu-check`: what drafting does on this machine, all of it in some minutes."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import add_example
from rollout_spec.cli.inputs import add_model_drafter, device_arguments, number, tokenized
from rollout_spec.config import SpecConfig, UserError
from rollout_spec_lab.cli.inputs import (
    add_model_argument,
    default_dtype,
    model_folder,
    needed_model_drafter,
    prompt_rows,
)

if TYPE_CHECKING:
    from rollout_spec_lab.gpu_check.gpu_check import Plan

HELP = "all that a machine with a GPU can say of drafting in 15 minutes, as one file to send to us"
METHODS = "off,sam:0,sam,suffix,ngram"
OF_MODEL = ",model,sam+model"
OUTPUT = Path("outputs/gpu-check")
# What is served: for an accelerator, and for a CPU.
SIZES: dict[bool, dict[str, Any]] = {
    True: {
        "num_prompts": 16, "group_size": 8, "max_num_seqs": 64, "median_tokens": 256.0, "max_tokens": 2048,
        "tail_threshold": 8, "certified_tokens": 128, "contexts": [256, 2048, 7168],
        "nums_rows": [1, 4, 16, 64], "nums_drafts": [0, 1, 3, 7, 15], "num_steps": 8,
    },
    False: {
        "num_prompts": 4, "group_size": 4, "max_num_seqs": 8, "median_tokens": 40.0, "max_tokens": 200,
        "tail_threshold": 3, "certified_tokens": 32, "contexts": [64, 384], "nums_rows": [1, 4, 8],
        "nums_drafts": [0, 3, 7], "num_steps": 4,
    },
}  # fmt: skip
SIGMA = 1.0  # of response lengths: one of a hundred is ten times as long as the median
ROOM = 512  # tokens behind a context, for the steps that are timed
SEED = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    served = parser.add_argument_group("what is served")
    add_model_argument(served)
    served.add_argument(
        "--minutes", type=number(float, 1, 1440), default=15.0, metavar="N",
        help="for all of it; what there is no time for is named",
    )  # fmt: skip
    served.add_argument(
        "--methods", metavar="M,M",
        help="of the rollouts, as in `bench engine`; sam:0 has our drafter and never drafts "
        f"({METHODS}; with --model-drafter also {OF_MODEL[1:]})",
    )  # fmt: skip
    add_model_drafter(served)
    served.add_argument(
        "--repeats", type=number(int, 1), default=5, metavar="N", help="rollouts of each method, at most"
    )
    served.add_argument("--eager", action="store_true", help="without graphs, as the recipes have it on NPUs")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="DIR",
        help="write gpu-check.json, index.html and the rollouts there",
    )  # fmt: skip
    output.add_argument("--json", action="store_true", help="print JSON instead of sentences and tables")
    add_example(parser, "rollout-spec-lab gpu-check --minutes 5")


def run(args: argparse.Namespace) -> int:
    from rollout_spec_lab.cli.progress import timed
    from rollout_spec_lab.gpu_check.gpu_check import Check
    from rollout_spec_lab.gpu_check.page import verdict, write_check

    for package in ("jinja2", "matplotlib"):  # not at the end of all minutes
        importlib.import_module(package)
    default = METHODS + (OF_MODEL if args.model_drafter else "")
    methods = _methods(default if args.methods is None else args.methods)
    drafter = needed_model_drafter(args.model_drafter, methods, SpecConfig.num_speculative_tokens)
    args.output.mkdir(parents=True, exist_ok=True)
    plan = _plan(args, methods, drafter)
    with timed("gpu-check", plan.seconds) as show:
        record = Check(plan, args.output, show).run()
    record["plan"] = {
        "model": str(args.model or "SmolLM2-135M-Instruct"),
        "dtype": plan.rollouts.dtype,
        "minutes": args.minutes,
        "methods": ",".join(methods),
        "model_drafter": args.model_drafter,
    }
    record["verdict"] = verdict(record)
    paths = write_check(record, args.output)
    if args.json:
        print(json.dumps(record, indent=2, allow_nan=False))
    else:
        _print(record, paths)
    return 0


def _methods(given: str) -> list[str]:
    from rollout_spec_lab.bench.engine import Method

    methods = [Method(label).label for label in given.split(",")]
    if methods[0] != "off" or len(set(methods)) < len(methods):
        raise UserError(f"--methods {given}: must begin with off and name no method twice")
    return methods


def _plan(args: argparse.Namespace, methods: list[str], drafter: dict[str, Any] | None) -> Plan:
    from rollout_spec_lab.bench import engine
    from rollout_spec_lab.gpu_check.gpu_check import Plan

    on_device = device_arguments()
    size = SIZES[not on_device]
    dtype = default_dtype()
    model = model_folder(args.model, dtype)
    prompts = tokenized(model, prompt_rows("", None, size["num_prompts"], SEED, "bench"))
    longest = _longest(Path(model))
    load = engine.Load(
        prompts=prompts, group_size=size["group_size"], median_tokens=size["median_tokens"], sigma=SIGMA,
        max_tokens=min(size["max_tokens"], longest - max(map(len, prompts))), temperature=0.7, seed=SEED,
    )  # fmt: skip
    serving = {"max_num_seqs": size["max_num_seqs"], **on_device}
    if args.eager:
        serving["enforce_eager"] = True
    rollouts = engine.Plan(
        load=load, methods=methods, model=model, dtype=dtype, spec={}, model_drafter=drafter,
        repeats=args.repeats, tail_threshold=size["tail_threshold"],
        engine=serving | {"max_model_len": max(map(len, prompts)) + load.max_tokens},
    )  # fmt: skip
    certified = min(size["certified_tokens"], load.max_tokens)
    certify = {
        "model": model, "prompts": prompts[:4], "temperatures": [1.0],
        "nums_speculative_tokens": [SpecConfig.num_speculative_tokens], "batch_thresholds": [64],
        "group_sizes": [4], "max_tokens": certified, "top_k": 0, "top_p": 1.0, "seed": SEED, "dtype": dtype,
        "tolerance": None, "distribution_samples": 0, "engine": rollouts.engine, "model_drafter": drafter,
    }  # fmt: skip
    contexts = [one for one in size["contexts"] if one + ROOM <= longest] or [longest // 2]
    steps = {
        "model": model, "dtype": dtype, "seed": SEED, "natural_ends": False, "method": "sam:0",
        "spec": {"num_speculative_tokens": max(size["nums_drafts"])},
        "engine": serving | {
            "max_num_seqs": max(size["nums_rows"]), "max_model_len": min(longest, max(contexts) + ROOM)
        },
        "contexts": contexts,
        **{name: size[name] for name in ("nums_rows", "nums_drafts", "num_steps")},
    }  # fmt: skip
    return Plan(60.0 * args.minutes, certify, steps, rollouts)


def _longest(model: Path) -> int:
    """Tokens that the model takes in all; what its configuration does not say is not checked here."""
    config = json.loads((model / "config.json").read_text())
    return int(config.get("max_position_embeddings") or 1 << 20)


def _print(record: dict[str, Any], paths: dict[str, Path]) -> None:
    from rollout_spec.cli.console import make_console, print_tables
    from rollout_spec_lab.gpu_check.page import tables

    console = make_console()
    print_tables(console, tables(record))
    for sentence in record["verdict"]:
        console.print(sentence, highlight=False)
    console.print(
        f"{paths['html']}, {paths['json']}: please send us the second", soft_wrap=True, highlight=False
    )
