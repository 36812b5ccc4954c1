"""`rollout-spec bench engine`: whole rollouts, every method in turn, each in a fresh engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.cli import UserError
from rollout_spec.cli.inputs import (
    add_spec_argument,
    default_dtype,
    device_arguments,
    model_folder,
    read_rows,
    spec_options,
    tokenized,
)

HELP = "whole rollouts in real engines: without drafts, with vLLM's drafters, with ours"
COLUMNS = {  # of the table: what is shown of a result, and how
    "seconds": ("makespan_s", "{:.1f}"),
    "tokens/s": ("tokens_per_s", "{:.0f}"),
    "front": ("front_tokens_per_s", "{:.0f}"),
    "tail": ("tail_tokens_per_s", "{:.0f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "per step": ("tokens_per_step", "{:.2f}"),
    "lost, s": ("front_lost_s", "{:+.1f}"),
    "CPU, s": ("draft_cpu_s", "{:.2f}"),
}
CAPTION = (
    "tail: after the last step with more than {} running requests. lost: what the front phase took longer "
    "than {} would have taken for its tokens. CPU: drafting."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="Hugging Face folder (default: SmolLM2-135M)"
    )
    parser.add_argument(
        "--methods", default="off,ngram,sam",
        help="off, off:coupled (with the noise of verify=coupled), ngram, suffix, sam, sam:THRESHOLD, by "
        "commas; the others are compared with the first (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="verl parquet file of prompts (default: the demo's)"
    )
    parser.add_argument(
        "--load", choices=("grpo", "random"), default="grpo",
        help="random: prompts of random tokens, temperature 1.5, so that nothing repeats (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=6, metavar="N", help="%(default)s")
    parser.add_argument("--group-size", type=int, default=8, metavar="N", help="%(default)s")
    parser.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="%(default)s")
    parser.add_argument(
        "--median-tokens", type=float, default=80.0, metavar="N",
        help="of the log-normal response lengths, the same for every method (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--sigma", type=float, default=0.9, help="of the log-normal (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="%(default)s")
    parser.add_argument(
        "--natural-ends", action="store_true", help="let the model end its responses, up to --max-tokens"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="(1.0; the demo's 0.7 for its prompts, 1.5 for random)"
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=8, metavar="K", help="%(default)s")
    add_spec_argument(parser, "an option of rollout.spec for sam")
    parser.add_argument(
        "--tail-threshold", type=int, default=8, metavar="N",
        help="the tail is what comes after the last step with more running requests (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and noise (%(default)s)")
    parser.add_argument("--dtype", help="(bfloat16; float32 on a CPU)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write engine.json, timelines.json, engine.png and rollouts-*.jsonl there",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.bench_drafters import MissingError

    _check_numbers(args)
    try:
        methods, spec = _checked_methods(args)
    except MissingError as error:
        raise UserError(str(error)) from error
    load, job = _load(args)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rollout_spec_") as temporary:
        folder = args.output or Path(temporary)
        # What is complete is kept, if the command is stopped early.
        for served in _serve_all(job | {"spec": spec}, load, methods, args.repeats, folder):
            record = _record(args, load, spec, methods, served)
            if args.output:
                _write(record, load, served, args.output)
    if args.json:
        print(json.dumps(record, indent=2, allow_nan=False))
    else:
        _print(record)
    return 0


def _check_numbers(args: argparse.Namespace) -> None:
    bounds = {
        "num_prompts": 1, "group_size": 1, "max_num_seqs": 1, "median_tokens": 1, "sigma": 0, "max_tokens": 1,
        "tail_threshold": 0, "repeats": 1, "temperature": 0, "seed": 0,
    }  # fmt: skip
    for name, low in bounds.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {low}")
    if args.prompts and args.load == "random":
        raise UserError("--prompts: --load random makes prompts of its own")


def _checked_methods(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The methods' labels, and the options of ours."""
    from rollout_spec.bench_drafters import require_arctic_inference
    from rollout_spec.bench_engine import Method
    from rollout_spec.config import SpecConfig

    refused = {"num_speculative_tokens": "the same for every method, --num-speculative-tokens"}
    spec = spec_options(args.spec, refused)
    SpecConfig.from_mapping({**spec, "num_speculative_tokens": args.num_speculative_tokens})
    labels = args.methods.split(",")
    if len(set(labels)) < len(labels):
        raise UserError(f"--methods {args.methods}: a method is named twice")
    for label in labels:
        method = Method(label)
        if method.name == "sam":
            method.options(spec)
        if method.name == "suffix":
            require_arctic_inference()
    return labels, spec


def _load(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The load, and what all jobs have in common."""
    from rollout_spec.bench_engine import Load, random_prompts
    from rollout_spec.demo.data import make_rows

    # Before the model is made, which takes longer.
    given = read_rows("--prompts", args.prompts, args.num_prompts) if args.prompts else []
    args.dtype = args.dtype or default_dtype()
    model = model_folder(args.model, args.dtype)
    if args.load == "random":
        vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        prompts = random_prompts(args.num_prompts, vocab_size, args.seed)
    else:
        prompts = tokenized(model, given or make_rows(args.num_prompts, args.seed, "bench"))
    temperature = args.temperature
    if temperature is None:
        temperature = 1.5 if args.load == "random" else 1.0 if args.prompts else 0.7
    load = Load(
        prompts=prompts, group_size=args.group_size, median_tokens=args.median_tokens, sigma=args.sigma,
        max_tokens=args.max_tokens, natural_ends=args.natural_ends, temperature=temperature, seed=args.seed,
    )  # fmt: skip
    longest = max(map(len, prompts)) + args.max_tokens
    job = {
        "model": model,
        "dtype": args.dtype,
        "num_speculative_tokens": args.num_speculative_tokens,
        "engine": {"max_num_seqs": args.max_num_seqs, "max_model_len": longest} | device_arguments(),
    }
    return load, job


def _serve_all(
    job: dict[str, Any], load: Any, methods: Sequence[str], repeats: int, folder: Path
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Every method once a repeat, each time another one first; after each repeat, what was served so far.

    Before that, the first method serves the first load once for nothing: the first rollout of a run
    was found slow.
    """
    from rollout_spec.cli.progress import tracked

    turns = [
        (repeat, methods[(repeat + i) % len(methods)])
        for repeat in range(repeats)
        for i in range(len(methods))
    ]
    served: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for i, (repeat, method) in enumerate(tracked([turns[0], *turns], "serving")):
        requests = {
            "prompts": load.prompts, "requests": load.requests(repeat), "seed": load.seed + repeat,
            "temperature": load.temperature, "natural_ends": load.natural_ends,
        }  # fmt: skip
        result = _serve(job | requests | {"method": method}, folder)
        if i == 0:
            continue
        served[method].append(result)
        if all(len(done) > repeat for done in served.values()):
            yield served


def _serve(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `vllm_bench` says of a job."""
    from rollout_spec.demo.processes import started
    from rollout_spec.demo.runner import last_error

    task, result, log = (folder / name for name in ("job.json", "result.json", "engine.log"))
    task.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that its drafter can be watched
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    command = [sys.executable, "-m", "rollout_spec.vllm_bench", str(task), str(result)]
    load_average = os.getloadavg()[0]
    with started(command, log, env) as process:
        code = process.wait()
    if code:
        raise UserError(f"{job['method']}: the engine ended with code {code}: {last_error(log)}")
    found = json.loads(result.read_text())
    for file in (task, result, log):
        file.unlink()
    return found | {"load_average": load_average}


def _record(
    args: argparse.Namespace,
    load: Any,
    spec: dict[str, Any],
    methods: Sequence[str],
    served: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    from rollout_spec.bench_drafters import environment
    from rollout_spec.bench_engine import Timeline, measure, step_times, summarise
    from rollout_spec.demo.looping import is_looping

    lines = {method: [Timeline(**one["timeline"]) for one in served[method]] for method in methods}
    runs: dict[str, list[dict[str, Any]]] = {
        method: [
            measure(line, args.tail_threshold)
            | {name: one[name] for name in ("draft_s", "draft_cpu_s", "counters", "load_average")}
            | {"looping_share": sum(map(is_looping, one["responses"])) / len(one["responses"])}
            for line, one in zip(lines[method], served[method], strict=True)
        ]
        for method in methods
    }
    # vLLM's other drafters take time of their own in each step.
    comparable = [
        line for method in methods if method.partition(":")[0] in ("off", "sam") for line in lines[method]
    ]
    return {
        "environment": environment() | {"num_cores": len(os.sched_getaffinity(0))},
        "engines": {method: served[method][0]["settings"] for method in methods},
        "load": {
            "kind": args.load,
            "prompts": str(args.prompts) if args.prompts else None,
            "num_prompts": len(load.prompts),
            "temperature": load.temperature,
            "repeats": len(served[methods[0]]),
            **{
                name: getattr(args, name)
                for name in (
                    *("group_size", "max_num_seqs", "median_tokens", "sigma", "max_tokens", "natural_ends"),
                    *("seed", "dtype", "tail_threshold"),
                )
            },
        },
        "num_speculative_tokens": args.num_speculative_tokens,
        "spec": spec,
        "results": summarise(runs),
        "step_times": step_times(comparable),
    }


def _write(record: dict[str, Any], load: Any, served: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    from rollout_spec.plots import plot_rollouts

    timelines = {method: [one["timeline"] for one in done] for method, done in served.items()}
    (folder / "engine.json").write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    (folder / "timelines.json").write_text(json.dumps(timelines) + "\n")
    first = {method: lines[0] for method, lines in timelines.items()}
    plot_rollouts(first, record["load"]["tail_threshold"], folder / "engine.png")
    for repeat, one in enumerate(next(iter(served.values()))):
        _write_trace(load, one["responses"], folder / f"rollouts-{repeat}.jsonl")


def _write_trace(load: Any, responses: Sequence[Sequence[int]], file: Path) -> None:
    """One repeat's rollout, for `replay` and `simulate`."""
    with file.open("w") as trace:
        for i, prompt in enumerate(load.prompts):
            siblings = responses[i * load.group_size : (i + 1) * load.group_size]
            line = {"group": str(i), "step": None, "prompt_token_ids": prompt, "responses": siblings}
            trace.write(json.dumps(line) + "\n")


def _print(record: dict[str, Any]) -> None:
    from rich.table import Table

    from rollout_spec.cli.tables import make_console

    results, load = record["results"], record["load"]
    first = results[0]["method"]
    table = Table(
        title=f"{load['num_prompts']} x {load['group_size']} responses, {load['max_num_seqs']} at a time, "
        f"{load['repeats']} repeats",
        caption=CAPTION.format(load["tail_threshold"], first),
    )
    ratios = Table(title=f"times {first}, with 95 % intervals")
    for grid, names in ((table, COLUMNS), (ratios, ("tokens/s", "front", "tail"))):
        grid.add_column("method")
        for name in names:
            grid.add_column(name, justify="right")
    pairs = Table(title="tokens/s of a row's method over a column's, with 95 % intervals")
    for name in ("method", *(result["method"] for result in results[1:])):
        pairs.add_column(name, justify="left" if name == "method" else "right")
    for result in results:
        cells = [_cell(result[name], shape) for name, shape in COLUMNS.values()]
        table.add_row(result["method"], *cells)
        ratios.add_row(result["method"], *map(_ratio_cell, result["ratios"].values()))
        over = result["tokens_per_s_over"]
        others = (_ratio_cell(over[r["method"]]) if r["method"] in over else "" for r in results[1:])
        pairs.add_row(result["method"], *others)
    console = make_console()
    console.print(table)
    console.print(ratios)
    if len(results) > 2:
        console.print(pairs)


def _cell(value: float | None, shape: str) -> str:
    return "–" if value is None else shape.format(value)


def _ratio_cell(ratio: dict[str, Any]) -> str:
    low, high = (_cell(bound, "{:.3f}") for bound in ratio["ci95"])
    return f"{_cell(ratio['value'], '{:.3f}')} ({low} to {high})"
