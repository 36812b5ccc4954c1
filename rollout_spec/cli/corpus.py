"""`rollout-spec corpus`: a static corpus, for `rollout.spec.corpus`."""

import argparse
import json
import time
from typing import Any

from rollout_spec.cli import add_example
from rollout_spec.cli.inputs import add_rollouts_arguments, path, read
from rollout_spec.config import UserError

HELP = "build a static corpus that is drafted from too"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    help_ = "make the file from the responses of recorded rollouts"
    build = kinds.add_parser("build", help=help_, description=f"{help_.capitalize()}.")
    add_rollouts_arguments(build.add_argument_group("what is read"))
    output = build.add_argument_group("output")
    output.add_argument(
        "-o", "--output", type=path, required=True, metavar="FILE", help="for example corpus.sam"
    )
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    example = "rollout-spec corpus build outputs/demo/sam/rollouts/rollouts-0.jsonl -o outputs/corpus.sam"
    add_example(parser, example)
    add_example(build, example)


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import print_values
    from rollout_spec.drafting.corpus import is_corpus
    from rollout_spec.drafting.native import OutOfMemory
    from rollout_spec.files import plain_file

    file = plain_file(args.output)
    if file.exists() and file.stat().st_size and not is_corpus(file):
        raise UserError(f"{args.output}: is there already, and is no corpus: name another file")
    try:
        values = _build(args)
    except OutOfMemory as error:
        raise UserError(f"{error}: building takes about 45 bytes per token") from error
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        print_values(values.pop("output"), values)
    return 0


def _build(args: argparse.Namespace) -> dict[str, Any]:
    from rollout_spec.cli.console import counted
    from rollout_spec.drafting.corpus import CorpusBuilder, open_corpus

    started = time.perf_counter()
    builder = CorpusBuilder()
    num_texts = num_tokens = 0
    with counted(args.traces[0].name) as advance:
        for rollout in read(args, args.traces):
            for response in rollout.responses:
                builder.add(response)
                num_tokens += len(response)
            num_texts += len(rollout.responses)
            advance(1)
    builder.save(args.output)
    corpus = open_corpus(args.output)
    return {
        "output": str(args.output),
        "num_files": len(args.traces),
        "num_texts": num_texts,
        "num_tokens": num_tokens,
        "num_states": corpus.num_states,
        "num_transitions": corpus.num_transitions,
        "num_bytes": len(corpus.mapped),
        "bytes_per_token": len(corpus.mapped) / num_tokens,
        "seconds": time.perf_counter() - started,
    }
