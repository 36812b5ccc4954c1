"""`rollout-spec certify`: the same tokens with and without drafts, or the reason for each that differs."""

from __future__ import annotations

import argparse
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
DIFFERENCE_COLUMNS = ("prompt", "sample", "temperature", "K", "threshold", "position", "gap", "explained")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="Hugging Face folder (default: SmolLM2-135M)"
    )
    parser.add_argument(
        "--train-file", type=Path, metavar="FILE", help="verl parquet file of prompts (default: the demo's)"
    )
    parser.add_argument("--num-prompts", type=int, default=4, metavar="N", help="%(default)s")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6, 0.0], metavar="T")
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[8], metavar="K")
    parser.add_argument("--batch-thresholds", type=parse_threshold, nargs="+", default=[64], metavar="N")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[4], metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="%(default)s")
    parser.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="%(default)s")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="0: all (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="%(default)s")
    parser.add_argument(
        "--distribution-samples", type=int, default=0, metavar="N",
        help="also compare verify=standard with plain vLLM, by N samples of the first prompt each",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="DIR", help="write certificate.json and .html there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    rows, plan_of = _rows(args), _checked(args)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # the answer is on standard output
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from rollout_spec.vllm_certify import CertifyError, Plan, certify

    try:
        record = certify(Plan(**plan_of, prompts=tokenized(plan_of["model"], rows)))
    except CertifyError as error:
        raise UserError(str(error)) from error
    record["model"] = str(args.model or "SmolLM2-135M-Instruct")
    texts, prompts = record.pop("texts"), record.pop("prompt_of_text")
    record["accuracy"] = {
        name: _accuracy([rows[prompt] for prompt in prompts], texts[name]) for name in ("off", "on")
    }
    # JSON has no infinity.
    record["differences"] = [
        d | {"logit_gap": None if math.isinf(d["logit_gap"]) else d["logit_gap"]}
        for d in record["differences"]
    ]
    rendered = json.dumps(record, indent=2, allow_nan=False)
    if args.output:
        (args.output / "certificate.json").write_text(rendered + "\n")
        (args.output / "certificate.html").write_text(render_html(record))
    if args.json:
        print(rendered)
    else:
        _print(record)
    return 0 if passed(record) else 1


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
    for temperature in args.temperatures:
        if not 0 <= temperature < math.inf:
            raise UserError(f"--temperatures {temperature}: must be at least 0, and finite")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p {args.top_p}: must be above 0 and at most 1")
    for k in args.num_speculative_tokens:
        for threshold in args.batch_thresholds:
            SpecConfig(num_speculative_tokens=k, batch_threshold=threshold)
    return {
        "model": model_folder(args.model, args.dtype),
        "temperatures": args.temperatures,
        "nums_speculative_tokens": args.num_speculative_tokens,
        "batch_thresholds": args.batch_thresholds,
        "group_sizes": args.group_sizes,
        "max_tokens": args.max_tokens,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
        "dtype": args.dtype,
        "distribution_samples": args.distribution_samples,
        "engine": {"max_num_seqs": args.max_num_seqs, "max_model_len": 512 + args.max_tokens}
        | device_arguments(),
    }


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.train_file is None:
        from rollout_spec.demo.data import make_rows

        return make_rows(args.num_prompts, args.seed, "certify")
    return read_rows("--train-file", args.train_file, args.num_prompts)


def _accuracy(rows: list[dict[str, Any]], texts: list[str]) -> float | None:
    """The demo's mean reward; None for other tasks."""
    from rollout_spec.demo.data import SOURCE
    from rollout_spec.demo.reward import compute_score

    if not all(str(row.get("data_source", "")).startswith(SOURCE) for row in rows):
        return None
    scores = [
        compute_score(row["data_source"], text, row["reward_model"]["ground_truth"])["score"]
        for row, text in zip(rows, texts, strict=True)
    ]
    return sum(scores) / len(scores)


def verdict(record: dict[str, Any]) -> str:
    if not passed(record):
        return "not certified"
    return "identical" if not record["differences"] else "identical up to numerics"


def sentences(record: dict[str, Any]) -> list[str]:
    compared, identical = record["tokens_compared"], record["tokens_identical"]
    text = [
        f"{identical:,} of {compared:,} tokens are the same with drafts and without; a response is compared "
        f"up to its first difference. The run without drafts gave {record['reference_tokens']:,} of these "
        "tokens; each is compared with those of several configurations, if there are several.",
        f"{len(record['differences'])} responses differ; {record['unexplained_differences']} of the "
        f"differences are not explained by scores within {record['tolerance']:g} of each other.",
        f"{record['num_draft_tokens']:,} tokens were drafted, {record['num_rejected_tokens']:,} of them "
        f"rejected. Log-probabilities differ by {record['max_logprob_difference']:.1e} at most, "
        f"{record['mean_logprob_difference']:.1e} on average.",
    ]
    if record["untested"]:
        text.append(f"Not tested, and not counted: {'; '.join(record['untested'])}.")
    accuracy = record["accuracy"]
    if accuracy["off"] is not None:
        text.append(f"Mean reward: {accuracy['off']:.3f} without drafts, {accuracy['on']:.3f} with.")
    distribution = record["distribution"]
    if distribution is not None:
        text.append(
            f"verify=standard: the smallest of {distribution['num_tests']} p-values over "
            f"{distribution['num_samples']:,} samples is {distribution['smallest_p_value']:.2g}; "
            f"false-alarm rate {distribution['false_alarm_rate']:g}: "
            f"{'passed' if distribution['passed'] else 'failed'}."
        )
    return text


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
            "inf" if d["logit_gap"] is None else f"{d['logit_gap']:.1e}", "yes" if d["explained"] else "no",
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
            verdict=verdict(record), sentences=sentences(record), tables=_tables(record),
        )
    )  # fmt: skip
