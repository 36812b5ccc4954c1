"""`rollout-spec-lab bench memory`: what a budget for texts buys."""

import argparse

from rollout_spec.cli.arguments import add_options, number
from rollout_spec_lab.cli.outputs import add_output, report

HELP = "simulate a training by epochs with less and less memory"
EXAMPLE = "rollout-spec-lab bench memory --engines 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("the training")
    add_options(
        training,
        ("--prompts", number(int, 1), "N", 96, "prompts of an epoch"),
        ("--epochs", number(int, 2), "N", 4, "how often each comes"),
        ("--engines", number(int, 1), "N", 1, "that serve them"),
        ("--turns", number(int, 1), "N", 1, "of a sample"),
        ("--drift", number(float, 0, 1), "SHARE", 0.1, "of a response's tokens, others in the next epoch"),
    )
    training.add_argument("--shuffle", action="store_true", help="prompts come in another order each time")
    rewrites = "the template leaves the reasoning of earlier turns out of later prompts"
    training.add_argument("--rewrites", action="store_true", help=rewrites)
    add_output(parser, "the JSON")


def run(args: argparse.Namespace) -> int:
    from rollout_spec_lab.bench.memory import Training, simulate_budgets
    from rollout_spec_lab.bench.tables import memory_table

    training = Training(
        args.prompts, num_epochs=args.epochs, num_engines=args.engines, drift=args.drift,
        shuffled=args.shuffle, num_turns=args.turns, rewrites=args.rewrites,
    )  # fmt: skip
    record = simulate_budgets(training)
    return report(args, record, memory_table(record))
