"""`rollout-spec certify`: whether your model gives the same tokens with drafts and without."""

from __future__ import annotations

import argparse
import itertools
import os
from typing import TYPE_CHECKING, Any

from rollout_spec.cli import models
from rollout_spec.cli.arguments import add_options, folder_for, number, path
from rollout_spec.config import SpecConfig, UserError, parse_threshold

if TYPE_CHECKING:
    from rollout_spec.certify.certify import CertifyPlan

HELP = "run a model with drafts and without, and compare every token"
EXAMPLE = "rollout-spec certify --model Qwen3-8B --num-speculative-tokens 4 8 --output outputs/certificate"
DTYPES = ("float32", "bfloat16", "float16")
MAX_SEED = (1 << 31) - 2
# Answers to these repeat themselves and the prompt, so that drafts are made, accepted and rejected.
PROMPTS = (
    "Write the multiplication table of 7 from 7 x 1 to 7 x 9, one product per line.",
    'Write each line as JSON, like this: pens cost 4 -> {"item": "pens", "price": 4}\nDo the same for every '
    "line:\ncups cost 12\nlamps cost 31\nropes cost 8\nboxes cost 25",
    "Anna has 17 apples, gets 8 more and gives 5 away. How many does she have? Show each step.",
    "Sort these numbers from the smallest to the largest: 42, 7, 93, 15, 60, 28.",
    "Explain in three sentences why the sky is blue, then say the same in other words.",
    "Count from 1 to 20 and write for each number whether it is even or odd.",
    "Translate 'good morning', 'good evening' and 'good night' to French, one per line.",
    "Write a short poem of eight lines in which every line begins with 'The sea'.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count, share = number(int, 1), number(float, 0, 1, above=True)
    served = parser.add_argument_group("what is served")
    served.add_argument("--model", type=path, required=True, metavar="DIR", help="its Hugging Face folder")
    add_options(served, ("--train-file", path, "FILE", None, "prompts in verl's parquet (8 of our own)"))
    dtype = "of the model's numbers (its own on a GPU or NPU, else float32)"
    served.add_argument("--dtype", choices=DTYPES, help=dtype)
    add_options(
        served,
        ("--num-prompts", count, "N", 4, "how many of the prompts"),
        ("--max-tokens", count, "N", 64, "longest response"),
        ("--max-num-seqs", count, "N", 16, "requests that run at a time"),
        ("--seed", number(int, 0, MAX_SEED), "N", 0, "of the noise that tokens are drawn with"),
    )
    add_options(
        parser.add_argument_group("sampling"),
        ("--top-k", number(int, 0), "N", 0, "0: all tokens"),
        ("--top-p", share, "N", 1.0, "1: all tokens"),
        ("--temperatures", number(float, 0), "N", [1.0, 0.6, 0.0], "0: greedy"),
    )
    note = "Of several values, temperatures too, every combination is compared."
    drafting = parser.add_argument_group("drafting", note)
    most = "most draft tokens of a request in a step"
    add_options(
        drafting,
        ("--num-speculative-tokens", int, "N", [SpecConfig.num_speculative_tokens], most),
        ("--batch-thresholds", parse_threshold, "N", [64], "rollout.spec.batch_threshold, also auto"),
        ("--group-sizes", count, "N", [4], "responses to each prompt"),
        models.MODEL_DRAFTER,
    )
    add_options(
        parser.add_argument_group("when a difference counts"),
        ("--tolerance", share, "X", None,
         "rounding explains a difference where the scores of the two tokens are closer than X (by the "
         "dtype; 0 with VLLM_BATCH_INVARIANT=1)"),
    )  # fmt: skip
    output = parser.add_argument_group("output")
    kind = folder_for("certificate.json", "certificate.html")
    add_options(output, ("--output", kind, "DIR", None, "write certificate.json and certificate.html there"))
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import Headline, counted, quiet_vllm, show

    rows = _rows(args)
    for k, threshold in itertools.product(args.num_speculative_tokens, args.batch_thresholds):
        SpecConfig(num_speculative_tokens=k, batch_threshold=threshold)
    fewest = min(args.num_speculative_tokens)
    drafter = models.model_drafter(args.model_drafter, fewest) if args.model_drafter else None
    model = models.model_folder(args.model)
    quiet_vllm()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from rollout_spec.certify.certify import certify
    from rollout_spec.certify.counts import passed
    from rollout_spec.report.certificate import sentences, tables, write_certificate

    plan = _plan(args, model, rows, drafter)
    with counted("certifying", 1 + len(plan.drafting)) as advance:
        record = certify(plan, advance)
    source = str(args.train_file or "our own")
    record["plan"] |= {"model": str(args.model), "prompts": source, "num_prompts": len(rows)}
    headline = Headline(f"With drafts and without: {record['verdict']}.")
    try:
        if args.output:
            write_certificate(record, args.output)
    finally:  # a reader of the output may go away
        show(record, args.json, headline, *tables(record), *sentences(record))
    return 0 if passed(record) else 1


def _plan(args: argparse.Namespace, model: str, rows: list[dict[str, Any]], drafter: Any) -> CertifyPlan:
    from rollout_spec.certify.certify import CertifyPlan

    same = ("max_tokens", "top_k", "top_p", "seed", "tolerance")
    fields, tokens = models.config_of(model), models.tokenized(model, rows)
    longest, for_cpu = max(map(len, tokens)), models.device_arguments()
    length = longest + args.max_tokens
    own = str(fields.get("dtype") or fields.get("torch_dtype"))
    if length > (limit := fields.get("max_position_embeddings") or length):
        why = f"the model has {limit} positions, and the longest prompt has {longest} tokens"
        raise UserError(f"--max-tokens {args.max_tokens}: must be at most {limit - longest}, because {why}")
    return CertifyPlan(
        model=model,
        prompts=tokens,
        temperatures=[*dict.fromkeys(args.temperatures)],
        nums_speculative_tokens=[*dict.fromkeys(args.num_speculative_tokens)],
        batch_thresholds=[*dict.fromkeys(args.batch_thresholds)],
        group_sizes=[*dict.fromkeys(args.group_sizes)],
        engine={"max_num_seqs": args.max_num_seqs, "max_model_len": length, **for_cpu},
        dtype=args.dtype or ("float32" if for_cpu else own if own in DTYPES else "bfloat16"),
        model_drafter=drafter,
        **{name: getattr(args, name) for name in same},
    )


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Chats from `--train-file`, or our own."""
    if args.train_file is not None:
        return models.prompt_rows("--train-file", args.train_file, args.num_prompts)
    if args.num_prompts > len(PROMPTS):
        raise UserError(f"--num-prompts {args.num_prompts}: at most {len(PROMPTS)} without --train-file")
    return [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS[: args.num_prompts]]
