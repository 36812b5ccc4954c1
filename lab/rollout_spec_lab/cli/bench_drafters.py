"""`rollout-spec-lab bench drafters`: every drafter on the same steps of recorded rollouts."""

import argparse
from pathlib import Path
from typing import Any

from rollout_spec.cli import rollouts
from rollout_spec.cli.arguments import add_options, add_spec_argument, number, spec_options
from rollout_spec.config import MAX_SPECULATIVE_TOKENS, SpecConfig, UserError
from rollout_spec_lab.cli.methods import installed
from rollout_spec_lab.cli.outputs import add_output, report

HELP = "compare drafters on the same steps of recorded rollouts"
EXAMPLE = (
    "rollout-spec-lab bench drafters outputs/demo/off/rollouts/rollouts-0.jsonl --history 0 8 --equal-drafts"
)
METHODS = ("ngram", "suffix_server", "suffix_server_tuned", "sam")
REFUSED = {  # as --spec, and why
    **dict.fromkeys(("method", "batch_threshold"), "every method drafts in every step"),
    **dict.fromkeys(("routing", "max_imbalance"), "there is one engine"),
    "num_speculative_tokens": "--num-speculative-tokens sets it",
    "history": "--history sets it",
    "min_survival": "--min-survival sets it",
    "model_tokens": "--model-acceptance sets it, a number for each",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lines = parser.add_argument_group("lines of the trace")
    rollouts.add_rollouts_arguments(lines)
    help_ = "only the first N lines of each trace"
    add_options(lines, ("--limit-groups", number(int, 1), "N", None, help_))
    drafters = parser.add_argument_group("drafters; of several values every combination is replayed")
    help_ = (
        "by commas; suffix_server: vLLM's suffix with one cache for all prompts, as vLLM serves it "
        f"({','.join(METHODS)}, without what is not installed); with a model also model alone, "
        "and sam+model: the model as one more expert"
    )
    add_options(
        drafters,
        ("--methods", str, "M,M", None, help_),
        rollouts.MODEL_ACCEPTANCE,
        ("--num-speculative-tokens", number(int, 1, MAX_SPECULATIVE_TOKENS), "K",
         [SpecConfig.num_speculative_tokens, 8], "most draft tokens per row and step"),
        ("--history", number(int, 0, 1 << 16), "N", [SpecConfig.history],
         "earlier responses of the prompt that a drafter has; suffix_server* has all in its cache"),
        ("--min-survival", number(float, 0, 1), "P", [SpecConfig.min_survival],
         "least survivals that sam and sam+model draft"),
    )  # fmt: skip
    help_ = "sam also with the least survivals at which it drafts as many tokens as each suffix*"
    drafters.add_argument("--equal-drafts", action="store_true", help=help_)
    add_spec_argument(
        drafters, "another option of rollout.spec for sam, for example max_index_mb=64", REFUSED
    )
    add_output(parser, "drafters.json", "drafters.json")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import quiet_vllm
    from rollout_spec.drafting.native import BudgetExceeded
    from rollout_spec.environment import environment
    from rollout_spec_lab.bench.drafters import SUFFIX
    from rollout_spec_lab.bench.tables import drafters_tables

    quiet_vllm()
    methods = _methods(args.methods, args.model_acceptance is not None)
    if args.equal_drafts and not set(methods) & set(SUFFIX):
        raise UserError(f"--equal-drafts: needs one of {', '.join(SUFFIX)} among the methods")
    config = SpecConfig.from_mapping(spec_options(args))
    try:
        results = [
            {"trace": trace.name, **row}
            for trace in args.traces
            for row in _of_trace(args, trace, methods, config)
        ]
    except BudgetExceeded as error:
        message = "one prompt with its responses needs more memory; raise it"
        raise UserError(f"max_index_mb={config.max_index_mb}: {message} ({error})") from error
    record = {"environment": environment(), "results": results}
    return report(args, record, *drafters_tables(record), name="drafters.json")


def _methods(named: str | None, has_model: bool) -> list[str]:
    """The methods asked for; by default those that are installed, and a model's if there is one."""
    from rollout_spec_lab.bench.drafters import OF_MODELS, require

    if named is None:
        return installed("bench drafters", METHODS, require) + (list(OF_MODELS) if has_model else [])
    methods = named.split(",")
    for method in methods:
        if method not in (known := (*METHODS, *OF_MODELS)):
            raise UserError(f"--methods {method}: must be one of {', '.join(known)}")
        if method in OF_MODELS and not has_model:
            raise UserError(f"--methods {method}: needs --model-acceptance")
    return methods


def _of_trace(
    args: argparse.Namespace, trace: Path, methods: list[str], config: SpecConfig
) -> list[dict[str, Any]]:
    from rollout_spec.cli.console import tracked
    from rollout_spec.predict.doubts import warn_of_same_texts
    from rollout_spec_lab.bench import drafters

    lines = list(rollouts.with_model(args, rollouts.read(args, [trace], args.limit_groups)))
    rollouts.check_steps(lines, trace)
    if config.corpus:
        warn_of_same_texts(lines, config.corpus)
    runs = drafters.all_runs(methods, config, args.num_speculative_tokens, args.history, args.min_survival)
    results = drafters.replay_all(tracked(lines, trace.name), runs)
    if args.equal_drafts:
        baselines = [result for result in results if result["method"] in drafters.SUFFIX]
        wanted = tracked(baselines, f"{trace.name}: equal drafts")
        results += [drafters.at_equal_drafts(lines, config, baseline) for baseline in wanted]
    for result in results:
        result["over"] = drafters.over_baselines(result, results)
    return results
