"""The command `rollout-spec-lab`: demo, bench and gpu-check, one thin module each.

In: arguments. Out: tables, JSON, files and an exit code, as `rollout-spec` gives them.
May import: rollout_spec, `bench`, `demo`, `gpu_check`, `roofline`, torch. It imports what is slow
inside `run`.
"""

import argparse
import signal
from collections.abc import Sequence

from rollout_spec.cli import Parser, add_commands, run_command

COMMANDS = ("demo", "bench", "gpu-check")


def build_parser() -> argparse.ArgumentParser:
    about = "The demo, benchmarks and checks of rollout_spec."
    parser = Parser("rollout-spec-lab demo --quick", prog="rollout-spec-lab", description=about)
    add_commands(parser, "rollout_spec_lab.cli", COMMANDS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `rollout-spec-lab`; returns the exit code, as `rollout-spec` does.

    SIGTERM and SIGHUP are as Ctrl-C: what the command has started ends with it.
    """
    both = signal.SIGTERM, signal.SIGHUP
    caught = [each for each in both if signal.getsignal(each) is not signal.SIG_IGN]  # as nohup makes it
    before = [signal.signal(each, signal.default_int_handler) for each in caught]
    try:
        return run_command(build_parser(), argv)
    finally:
        for each, handler in zip(caught, before, strict=True):
            signal.signal(each, handler)
