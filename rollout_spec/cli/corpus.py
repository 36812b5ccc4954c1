"""`rollout-spec corpus`: a file for `rollout.spec.corpus`, of rollouts that may be texts."""

import argparse

from rollout_spec.cli.arguments import path
from rollout_spec.cli.rollouts import add_rollouts_arguments, read
from rollout_spec.config import UserError

HELP = "build a corpus that is drafted from too"
EXAMPLE = "rollout-spec corpus build outputs/demo/sam/rollouts/rollouts-0.jsonl -o outputs/corpus.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="WHAT")
    help_ = "make the file from the responses of recorded rollouts"
    build = kinds.add_parser("build", help=help_, description=f"{help_.capitalize()}.", example=EXAMPLE)
    add_rollouts_arguments(build.add_argument_group("what is read"))
    output = build.add_argument_group("output")
    help_ = "for example corpus.jsonl"
    output.add_argument("-o", "--output", type=path, required=True, metavar="FILE", help=help_)
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import Values, counted, show
    from rollout_spec.files import plain_file, replacing
    from rollout_spec.trace import append_lines, to_line

    file = plain_file(args.output)
    if file.exists() and file.stat().st_size:
        raise UserError(f"{args.output}: is there already: name another file")
    lines, counts = [], {"num_texts": 0, "num_tokens": 0}
    with counted(args.traces[0].name) as advance:
        for rollout in read(args, args.traces):
            texts = [response.tolist() for response in rollout.responses]
            lines.append(to_line(rollout.group, rollout.step, [], texts))
            counts["num_texts"] += len(texts)
            counts["num_tokens"] += sum(map(len, texts))
            advance(1)
    if not counts["num_tokens"]:
        raise UserError(f"{args.traces[0]}: no token in any response")
    with replacing(args.output) as partial:
        append_lines(partial, lines)
    output = str(args.output)
    show({"output": output, **counts}, args.json, Values(output, counts))
    return 0
