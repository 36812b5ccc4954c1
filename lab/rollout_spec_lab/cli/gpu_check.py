"""`rollout-spec-lab gpu-check`: what drafting does on this machine, all of it in some minutes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec.cli.arguments import add_options, folder_for, number, path
from rollout_spec.cli.models import MODEL_DRAFTER, device_arguments, tokenized
from rollout_spec.config import SpecConfig, UserError
from rollout_spec_lab.cli import devices, inputs
from rollout_spec_lab.cli.bench_engine import OURS
from rollout_spec_lab.cli.methods import checked_methods, needed_model_drafter
from rollout_spec_lab.gpu_check import ON_MRV2, PARTS

if TYPE_CHECKING:
    from rollout_spec.trace import Rollout
    from rollout_spec_lab.bench.load import Load
    from rollout_spec_lab.gpu_check.plan import CheckPlan, Policy

HELP = "all that a machine with a GPU can say of drafting in 15 minutes, as one file to send to us"
EXAMPLE = "rollout-spec-lab gpu-check --minutes 5"
METHODS = ("off", "sam:0", "sam", "suffix", "ngram")
OF_MODEL = ("model", "sam+model")
SIGMA = 1.0  # of response lengths: one of a hundred is ten times as long as the median


def add_arguments(parser: argparse.ArgumentParser) -> None:
    served = parser.add_argument_group("what is served")
    add_options(
        served,
        inputs.MODEL,
        ("--model-config", path, "FILE", None,
         "a config.json instead of --model: random weights; its rollouts need --recording"),
        ("--recording", path, "TRACE", None,
         "its prompts instead of the demo's; with --model-config its first `step` is served, as "
         "`bench rollout` does it"),
        ("--methods", str, "M,M", None,
         "of the rollouts, as in `bench engine`; sam:0 has our drafter and never drafts "
         f"({','.join(METHODS)}, without what is not installed; with --model-drafter also "
         f"{','.join(OF_MODEL)})"),
        MODEL_DRAFTER,
        ("--rows", number(int, 1), "N", [], "of the steps that are timed (1 4 16 64)"),
    )  # fmt: skip
    add_options(
        parser.add_argument_group("what is asked"),
        ("--minutes", number(float, 1, 1440), "N", 15.0,
         "for all of it; what there is no time for is named"),
        ("--parts", str, "P,P", None, f"only these of {','.join(PARTS)}"),
        ("--repeats", number(int, 1), "N", 5, "rollouts of each method, at most"),
        devices.GPU,
        inputs.ENGINE,
    )  # fmt: skip
    output = parser.add_argument_group("output")
    help_ = "write gpu-check.json, index.html and the rollouts there"
    kind = folder_for("gpu-check.json", "index.html", *OURS)
    add_options(output, ("--output", kind, "DIR", Path("outputs/gpu-check"), help_))
    output.add_argument("--json", action="store_true", help="print JSON instead of sentences and tables")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import show
    from rollout_spec_lab.gpu_check.gpu_check import Check
    from rollout_spec_lab.gpu_check.page import tables, verdict, write_check

    importlib.import_module("jinja2")  # not at the end of all minutes
    methods = _methods(args)
    drafter = needed_model_drafter(args.model_drafter, methods, SpecConfig.num_speculative_tokens)
    args.output.mkdir(parents=True, exist_ok=True)
    plan = _plan(args, methods, drafter)
    # What there is so far is kept, if the command is stopped early.
    for record in Check(plan, args.output, lambda text: print(text, file=sys.stderr, flush=True)).run():
        record["verdict"] = verdict(record)
        paths = write_check(record, args.output)
    files = f"{paths['html']}, {paths['json']}: please send us the second"
    show(record, args.json, *tables(record), *record["verdict"], files)
    return 0


def _methods(args: argparse.Namespace) -> list[str]:
    default = METHODS + (OF_MODEL if args.model_drafter else ())
    methods = checked_methods("gpu-check", default, args.methods, {})
    if methods[0] != "off":
        raise UserError(f"--methods {args.methods}: must begin with off")
    return methods


def _parts(args: argparse.Namespace) -> list[str]:
    """The parts' names, in their order; on CUDA, which has both model runners, those of engines twice."""
    import torch

    has_cuda = torch.cuda.is_available()
    asked = args.parts.split(",") if args.parts else [one for one in PARTS if has_cuda or one != "latency"]
    if unknown := [part for part in asked if part not in PARTS]:
        raise UserError(f"--parts {unknown[0]}: must be one of {', '.join(PARTS)}")
    runners = {"start": [ON_MRV2], "certify": [ON_MRV2, ""], "steps": [ON_MRV2, ""]} if has_cuda else {}
    return [part + runner for part in PARTS if part in asked for runner in runners.get(part, [""])]


def _plan(args: argparse.Namespace, methods: list[str], drafter: dict[str, Any] | None) -> CheckPlan:
    from rollout_spec_lab.gpu_check import plan

    if args.model and args.model_config:
        raise UserError("--model-config: instead of --model, not beside it")
    parts, on_device, dtype = _parts(args), device_arguments(), inputs.default_dtype()
    size = plan.CPU if on_device else plan.ACCELERATOR
    size = size._replace(nums_rows=sorted(args.rows or size.nums_rows))
    lines = inputs.recording(args.recording) if args.recording else []
    if args.model_config:
        model = inputs.dummy_model(args.model_config, args.output)
    else:
        model = inputs.model_folder(args.model, dtype)
    policy = plan.Policy(size, model, not args.model_config, dtype, on_device, args.engine)
    rollouts = plan.rollouts(policy, _load(policy, lines), methods, drafter, args.repeats)
    jobs = {
        "start": plan.start(policy, args.output / "tiny"),
        "verify": plan.verify(size),
        "certify": plan.certify(policy, rollouts),
        "steps": plan.steps(policy),
    }
    says_nothing = args.model_config and not lines
    return plan.CheckPlan(
        60.0 * args.minutes,
        {part: jobs.get(part.removesuffix(ON_MRV2), {}) for part in parts},
        "random weights say nothing of drafts: give --recording" if says_nothing else rollouts,
        devices.rooflines(args.model_config or (args.model and args.model / "config.json"), args.gpu),
        {
            "model": str(args.model_config or args.model or "SmolLM2-135M-Instruct"), "dtype": dtype,
            "minutes": args.minutes, "methods": ",".join(methods), "model_drafter": args.model_drafter,
            "recording": args.recording and args.recording.name,
            "batch_invariant": bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0"))),
        },
    )  # fmt: skip


def _load(policy: Policy, lines: list[Rollout]) -> Load:
    """Without weights the recording is served, if there is one; else its prompts are."""
    from rollout_spec_lab.bench import load
    from rollout_spec_lab.gpu_check.plan import SEED

    size = policy.size
    if lines and not policy.has_weights:
        return load.recorded_load(lines, size.recorded_tokens, policy.folder)
    if lines:
        prompts = [line.prompt_token_ids.tolist() for line in lines[: size.num_prompts]]
    elif policy.has_weights:
        prompts = tokenized(policy.folder, inputs.prompt_rows("", None, size.num_prompts, SEED, "bench"))
    else:
        vocab_size = policy.config.get("vocab_size", 1 << 31)
        prompts = load.random_prompts(size.num_prompts, vocab_size, SEED)
    return load.Load(
        prompts=prompts, group_size=size.group_size, median_tokens=size.median_tokens, sigma=SIGMA,
        max_tokens=min(size.max_tokens, policy.longest - max(map(len, prompts))), temperature=0.7, seed=SEED,
    )  # fmt: skip
