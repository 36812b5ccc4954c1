"""`rollout-spec certify`: the same tokens with and without drafts, or the reason for each that differs."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any

from rollout_spec.cli import UserError
from rollout_spec.cli.inputs import device_arguments, model_folder, read_rows, tokenized
from rollout_spec.config import SpecConfig, parse_threshold

HELP = "run a model with and without drafts and compare every token"
COUNT_COLUMNS = ("tokens compared", "identical", "drafts", "draft tokens", "rejected")
TEMPERATURE_COLUMNS = ("temperature", "reference tokens", *COUNT_COLUMNS)
COLUMNS = ("K", "threshold", "group", "temperature", *COUNT_COLUMNS, "per step")
DIFFERENCE_COLUMNS = (
    "prompt", "sample", "temperature", "K", "threshold", "position", "gap", "tolerance", "explained",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
MAX_SEED = (1 << 31) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="Hugging Face folder (default: SmolLM2-135M)"
    )
    parser.add_argument(
        "--train-file", type=Path, metavar="FILE", help="verl parquet file of prompts (default: the demo's)"
    )
    parser.add_argument("--num-prompts", type=int, default=4, metavar="N", help="%(default)s")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[1.0, 0.6, 0.0], metavar="T", help="%(default)s"
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, nargs="+", default=[8], metavar="K", help="%(default)s"
    )
    parser.add_argument(
        "--batch-thresholds", type=parse_threshold, nargs="+", default=[64], metavar="N", help="%(default)s"
    )
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[4], metavar="N", help="%(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="%(default)s")
    parser.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="%(default)s")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0: all (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="%(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the noise and of the generated prompts (%(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help=f"{', '.join(DTYPES)} (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, metavar="X",
        help="the gap between the scores logit / T + noise of two tokens, or to the top-k or top-p boundary, "
        "below which numerics explain a difference (float32: 1e-4; else 2 x the dtype's epsilon x the "
        "largest |logit| / T there)",
    )  # fmt: skip
    parser.add_argument(
        "--distribution-samples", type=int, default=1000, metavar="N",
        help="of verify=standard and of plain vLLM, compared at the highest temperature by chi-square tests: "
        "1,000 find a temperature 30 %% off, 4,000 one 10 %% off; 0: no test (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIR", help="write certificate.json and .html there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    rows, settings = _rows(args), _checked(args)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # the answer is on standard output
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from rollout_spec.vllm_certify import CertifyError, Plan, certify

    plan = Plan(**settings, prompts=tokenized(settings["model"], rows))
    try:
        found = certify(plan)
    except CertifyError as error:
        raise UserError(str(error)) from error
    record = _record(args, dataclasses.asdict(plan), rows, found)
    rendered = json.dumps(record, indent=2, allow_nan=False)
    if args.output:
        (args.output / "certificate.json").write_text(rendered + "\n")
        (args.output / "certificate.html").write_text(render_html(record))
    if args.json:
        print(rendered)
    else:
        _print(record)
    return 0 if passed(record) else 1


def _record(
    args: argparse.Namespace, plan: dict[str, Any], rows: list[dict[str, Any]], found: dict[str, Any]
) -> dict[str, Any]:
    """What was found, with what was asked for and where; without the texts, and with null for infinity."""
    texts, prompts = found.pop("texts"), found.pop("prompt_of_text")
    return {
        "verdict": verdict(found),
        "plan": plan
        | {
            "model": str(args.model or "SmolLM2-135M-Instruct"),
            "prompts": str(args.train_file or f"generated problems, seed {args.seed}"),
            "num_prompts": len(rows),
        },
        "environment": _environment(),
        **found,
        "differences": [
            d | {"logit_gap": None if math.isinf(d["logit_gap"]) else d["logit_gap"]}
            for d in found["differences"]
        ],
        "accuracy": {
            name: _accuracy([rows[prompt] for prompt in prompts], texts[name]) for name in ("off", "on")
        },
    }


def _environment() -> dict[str, Any]:
    import torch

    from rollout_spec.bench_drafters import environment
    from rollout_spec.vllm_certify import device_name

    return environment() | {
        "torch": torch.__version__,
        "device": device_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def passed(record: dict[str, Any]) -> bool:
    distribution = record["distribution"]
    return not record["unexplained_differences"] and (distribution is None or distribution["passed"])


def _checked(args: argparse.Namespace) -> dict[str, Any]:
    """The plan's arguments, but for the prompts."""
    lists = {
        "--num-speculative-tokens": (1, args.num_speculative_tokens),
        "--group-sizes": (1, args.group_sizes),
        "--num-prompts": (1, [args.num_prompts]),
        "--max-tokens": (1, [args.max_tokens]),
        "--max-num-seqs": (1, [args.max_num_seqs]),
        "--top-k": (0, [args.top_k]),
        "--distribution-samples": (0, [args.distribution_samples]),
    }
    for name, (low, values) in lists.items():
        if min(values) < low:
            raise UserError(f"{name} {min(values)}: must be at least {low}")
    if not 0 <= args.seed < MAX_SEED:
        raise UserError(f"--seed {args.seed}: must be at least 0 and below {MAX_SEED}")
    if args.dtype not in DTYPES:
        raise UserError(f"--dtype {args.dtype}: must be one of {', '.join(DTYPES)}")
    if args.tolerance is not None and not 0 < args.tolerance <= 1:
        raise UserError(f"--tolerance {args.tolerance}: must be above 0 and at most 1")
    for temperature in args.temperatures:
        if not 0 <= temperature < math.inf:
            raise UserError(f"--temperatures {temperature}: must be at least 0, and finite")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p {args.top_p}: must be above 0 and at most 1")
    for k in args.num_speculative_tokens:
        for threshold in args.batch_thresholds:
            SpecConfig(num_speculative_tokens=k, batch_threshold=threshold)
    return {
        "model": model_folder(args.model, "float32"),  # the engine casts it
        "temperatures": _distinct(args.temperatures),
        "nums_speculative_tokens": _distinct(args.num_speculative_tokens),
        "batch_thresholds": _distinct(args.batch_thresholds),
        "group_sizes": _distinct(args.group_sizes),
        "max_tokens": args.max_tokens,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
        "dtype": args.dtype,
        "tolerance": args.tolerance,
        "distribution_samples": args.distribution_samples,
        "engine": {"max_num_seqs": args.max_num_seqs, "max_model_len": 512 + args.max_tokens}
        | device_arguments(),
    }


def _distinct(values: list[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.train_file is None:
        from rollout_spec.demo.data import make_rows

        return make_rows(args.num_prompts, args.seed, "certify")
    return read_rows("--train-file", args.train_file, args.num_prompts)


def _accuracy(rows: list[dict[str, Any]], texts: list[str]) -> dict[str, float] | None:
    """The demo's mean reward and its share of right answers; None for other tasks."""
    from rollout_spec.demo.data import SOURCE
    from rollout_spec.demo.reward import compute_score

    if not all(str(row.get("data_source", "")).startswith(SOURCE) for row in rows):
        return None
    scores = [
        compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])
        for row, text in zip(rows, texts, strict=True)
    ]
    return {name: sum(score[name] for score in scores) / len(scores) for name in ("correct", "score")}


def verdict(record: dict[str, Any]) -> str:
    if not passed(record):
        return "not certified"
    agreement = "identical" if not record["differences"] else "identical up to numerics"
    if not record["untested"]:
        return agreement
    num_all = len(record["configurations"])
    num_tested = num_all - len(record["untested"])
    return f"certified in part: {num_tested} of {num_all} configurations, {agreement}"


def sentences(record: dict[str, Any]) -> list[str]:
    compared, identical = record["tokens_compared"], record["tokens_identical"]
    text = [
        f"{identical:,} of {compared:,} tokens are the same with drafts and without; a response is compared "
        f"up to its first difference. {record['reference_tokens']:,} different tokens of the run without "
        "drafts were compared, each in one configuration or several.",
        f"{len(record['differences'])} responses differ, untested configurations included; "
        f"{record['unexplained_differences']} of the differences are not explained by numerics: "
        f"{_tolerance(record)}.",
        f"{record['num_draft_tokens']:,} tokens were drafted, {record['num_rejected_tokens']:,} of them "
        f"rejected. Log-probabilities differ by {record['max_logprob_difference']:.1e} at most, "
        f"{record['mean_logprob_difference']:.1e} on average.",
    ]
    if record["untested"]:
        text.append(f"Not tested, and not counted: {'; '.join(record['untested'])}.")
    off, on = record["accuracy"]["off"], record["accuracy"]["on"]
    if off is not None:
        text.append(
            f"Right answers: {off['correct']:.1%} without drafts, {on['correct']:.1%} with; mean reward: "
            f"{off['score']:.3f} and {on['score']:.3f}."
        )
    return [*text, _distribution_sentence(record["distribution"], record["plan"])]


def _tolerance(record: dict[str, Any]) -> str:
    if record["tolerance"] is not None:
        return f"scores within {record['tolerance']:g} of each other"
    return f"scores within 2 x {record['plan']['dtype']}'s epsilon x the largest |logit| / T there"


def _distribution_sentence(distribution: dict[str, Any] | None, plan: dict[str, Any]) -> str:
    if distribution is None:
        why = "nothing is random at temperature 0" if plan["distribution_samples"] else "0 samples"
        return f"verify=standard: its distribution was not tested ({why})."
    return (
        f"verify=standard: the smallest of {distribution['num_tests']} p-values over "
        f"{distribution['num_samples']:,} samples at temperature {distribution['temperature']:g} is "
        f"{distribution['smallest_p_value']:.2g}; false-alarm rate {distribution['false_alarm_rate']:g}: "
        f"{'passed' if distribution['passed'] else 'failed'}."
    )


def facts(record: dict[str, Any]) -> dict[str, str]:
    """What the page says about the run besides its numbers."""
    plan, environment = dict(record["plan"]), dict(record["environment"])
    machine = ", ".join(str(environment.pop(name)) for name in ("device", "cpu"))
    machine += f", {environment.pop('num_cores')} cores"
    date = environment.pop("date")
    listed = {
        name.replace("_", " "): ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for name, value in plan.items()
        if name not in ("engine", "tolerance")
    }
    return listed | {
        "explained by numerics": _tolerance(record),
        "versions": ", ".join(f"{name} {version}" for name, version in environment.items()),
        "machine": machine,
        "date": date,
    }


def _count_cells(counts: dict[str, Any]) -> list[str]:
    names = ("tokens_compared", "tokens_identical", "num_drafts", "num_draft_tokens", "num_rejected_tokens")
    return [f"{counts[name]:,}" for name in names]


def _temperature_rows(record: dict[str, Any]) -> list[list[str]]:
    return [
        [str(one["temperature"]), f"{one['reference_tokens']:,}", *_count_cells(one)]
        for one in record["temperatures"]
    ]


def _table_rows(record: dict[str, Any]) -> list[list[str]]:
    return [
        [
            str(c["num_speculative_tokens"]), str(c["batch_threshold"]), str(c["group_size"]),
            str(c["temperature"]), *_count_cells(c), f"{c['tokens_per_step']:.2f}",
        ]
        for c in record["configurations"]
    ]  # fmt: skip


def _tables(record: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Titles, columns and rows, of the terminal and of the page."""
    return [
        ("By temperature", TEMPERATURE_COLUMNS, _temperature_rows(record)),
        ("By configuration", COLUMNS, _table_rows(record)),
        ("First differences", DIFFERENCE_COLUMNS, _difference_rows(record)),
    ]


def _print(record: dict[str, Any]) -> None:
    from rich.table import Table

    from rollout_spec.cli.tables import make_console

    console = make_console()
    console.print(verdict(record), style="bold")
    for title, columns, rows in _tables(record):
        table = Table(title=title)
        for name in columns:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row)
        if rows:
            console.print(table)
    for sentence in sentences(record):
        console.print(sentence, highlight=False)


def _difference_rows(record: dict[str, Any]) -> list[list[str]]:
    return [
        [
            str(d["prompt"]), str(d["number"]), str(d["temperature"]), str(d["num_speculative_tokens"]),
            str(d["batch_threshold"]), str(d["position"]),
            "inf" if d["logit_gap"] is None else f"{d['logit_gap']:.1e}", f"{d['tolerance']:.1e}",
            "yes" if d["explained"] else "no",
        ]
        for d in record["differences"]
    ]  # fmt: skip


def render_html(record: dict[str, Any]) -> str:
    """The page; everything it shows is inside it."""
    from jinja2 import Environment

    template = resources.files("rollout_spec").joinpath("certify.html.j2").read_text()
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(template)
        .render(
            verdict=verdict(record), sentences=sentences(record), tables=_tables(record), facts=facts(record),
        )
    )  # fmt: skip
