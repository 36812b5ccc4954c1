"""`rollout-spec replay`: what the drafter would have done for recorded rollouts."""

import argparse
from typing import Any

from rollout_spec import __version__
from rollout_spec.cli import rollouts
from rollout_spec.cli.arguments import (
    MAX_ENGINES,
    add_options,
    add_spec_argument,
    folder_for,
    number,
    spec_options,
)
from rollout_spec.config import SpecConfig, UserError

HELP = "replay recorded rollouts through the drafter, without a model"
EXAMPLE = "rollout-spec replay outputs/demo/off/rollouts/rollouts-0.jsonl --spec history=0"
REFUSED = {  # as --spec, and why
    **dict.fromkeys(("method", "batch_threshold"), "replay drafts in every step"),
    "routing": "it makes no difference in replay",
    "num_speculative_tokens": "--num-speculative-tokens sets it",
    "model_tokens": "--model-acceptance sets it, a number for each",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count, most = number(int, 1), SpecConfig.num_speculative_tokens
    lines = parser.add_argument_group("what is replayed")
    rollouts.add_rollouts_arguments(lines)
    add_options(lines, ("--limit-groups", count, "N", None, "only the first N lines"))
    drafter = parser.add_argument_group("drafter")
    add_options(drafter, ("--num-speculative-tokens", int, "K", most, "most draft tokens per row and step"))
    add_options(drafter, rollouts.MODEL_ACCEPTANCE)
    add_spec_argument(drafter, "any other option of rollout.spec, for example corpus=FILE", REFUSED)
    add_options(
        parser.add_argument_group("engines that these rollouts are for"),
        ("--replicas", number(int, 1, MAX_ENGINES), "N", 1, "engines"),
        ("--max-num-seqs", count, "N", 1024, "requests that an engine runs at a time; verl's default too"),
    )
    output = parser.add_argument_group("output")
    page = "write a page with pictures, replay.html, and replay.json"
    kind = folder_for("replay.json", "replay.png", "replay.html")
    add_options(output, ("--output", kind, "DIR", None, page))
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import Values, heard, show, tracked
    from rollout_spec.drafting.native import BudgetExceeded
    from rollout_spec.predict.doubts import warn_of_same_texts
    from rollout_spec.predict.replay import replay
    from rollout_spec.predict.replay_record import replay_record
    from rollout_spec.report.replay import headline, sentences, tables, write_replay

    spec = spec_options(args)
    config = SpecConfig.from_mapping(spec | {"num_speculative_tokens": args.num_speculative_tokens})
    with heard("rollout_spec.predict") as doubts:
        lines = list(rollouts.with_model(args, rollouts.read(args, args.traces, args.limit_groups)))
        rollouts.check_steps(lines, args.traces[0])
        if config.corpus:
            warn_of_same_texts(lines, config.corpus)
    name = args.traces[0].name
    try:
        result = replay(tracked(lines, name), config)
    except BudgetExceeded as error:
        more = "more memory than the corpus leaves" if config.corpus else "more memory"
        message = f"one prompt with its responses needs {more}; raise it"
        raise UserError(f"max_index_mb={config.max_index_mb}: {message} ({error})") from error
    record = replay_record(lines, result, args.replicas, args.max_num_seqs, config.max_imbalance)
    record = {"doubts": doubts, "headline": headline(record), **record}
    corpus = f", corpus {config.corpus}" if config.corpus else ""
    title = f"{name}: K = {config.num_speculative_tokens}, history {config.history}{corpus}"
    values = Values(title, _values(record))
    page = None
    try:
        if args.output:
            page = write_replay(record, _facts(args, config), args.output)
    finally:  # a reader of the output may go away
        show(record, args.json, record["headline"], *sentences(record), values, *tables(record))
    if page and not args.json:
        print(f"page: {page}")
    return 0


def _values(record: dict[str, Any]) -> dict[str, float]:
    """Numbers by what they are."""
    names = {
        "tail_tokens_per_step": "tokens per step, where at most a quarter of a prompt's responses still run",
        "tail_share": f"share of steps in which at most {record['batch']['tail_rows']} requests run",
    }
    values = {name: value for name, value in record.items() if isinstance(value, (int, float))}
    return {names.get(name, name): value for name, value in values.items()}


def _facts(args: argparse.Namespace, config: SpecConfig) -> dict[str, str]:
    """What the page says of the replay besides its numbers."""
    facts = {
        "rollouts": ", ".join(map(str, args.traces)),
        "tokenizer": args.tokenizer,
        "rollout_spec": __version__,
        "drafter": f"K = {config.num_speculative_tokens}, history {config.history}",
        "corpus": config.corpus,
    }
    return {name: str(value) for name, value in facts.items() if value}
