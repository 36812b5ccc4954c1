"""`rollout-spec replay`: what the drafter would have done for recorded rollouts."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

from rollout_spec.cli import add_example
from rollout_spec.cli.inputs import add_spec_argument, number, spec_options
from rollout_spec.config import SpecConfig

HELP = "replay recorded rollouts through the drafter, without a model"
REFUSED = {  # as --spec, and why
    **dict.fromkeys(("method", "verify", "batch_threshold", "routing"), "replay drafts in every step"),
    "num_speculative_tokens": "--num-speculative-tokens sets it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lines = parser.add_argument_group("lines of the trace")
    lines.add_argument(
        "trace", type=Path, metavar="TRACE", help=".jsonl or .jsonl.gz, one group of rollouts a line"
    )
    lines.add_argument(
        "--max-responses", type=number(int, 1), metavar="N", help="only the first N responses of each line"
    )
    lines.add_argument("--limit-groups", type=number(int, 1), metavar="N", help="only the first N lines")
    drafter = parser.add_argument_group("drafter")
    drafter.add_argument(
        "--num-speculative-tokens", type=int, default=SpecConfig.num_speculative_tokens, metavar="K",
        help="most draft tokens per row and step",
    )  # fmt: skip
    drafter.add_argument("--corpus", metavar="FILE", help="file of `corpus build` that is drafted from too")
    add_spec_argument(drafter, "any other option of rollout.spec, for example history=0", REFUSED)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_example(parser, "rollout-spec replay outputs/demo/off/rollouts/rollouts-0.jsonl --spec history=0")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.progress import tracked
    from rollout_spec.cli.tables import print_values
    from rollout_spec.drafting.corpus import check_corpus
    from rollout_spec.measure.replay import replay
    from rollout_spec.trace import read_trace

    config = SpecConfig.from_mapping(_options(args))
    if config.corpus:
        check_corpus(config.corpus)
    lines = tracked(islice(read_trace(args.trace), args.limit_groups), args.trace.name)
    result = replay(lines, config, max_responses=args.max_responses)
    if args.json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        k, history = config.num_speculative_tokens, config.history
        corpus = f", corpus {config.corpus}" if config.corpus else ""
        print_values(f"{args.trace.name}: K = {k}, history {history}{corpus}", result.to_dict())
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of rollout.spec that the command line names."""
    given = {"corpus": args.corpus} if args.corpus is not None else {}
    return spec_options(args.spec, REFUSED) | given | {"num_speculative_tokens": args.num_speculative_tokens}
