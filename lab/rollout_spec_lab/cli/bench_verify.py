"""`rollout-spec-lab bench verify`: verification alone, on a device and beside a CPU."""

import argparse

from rollout_spec.cli.arguments import add_options, number
from rollout_spec_lab.cli.outputs import add_output, report, write

HELP = "verification alone: time beside vLLM's, waits, and a device's tokens beside a CPU's"
EXAMPLE = "rollout-spec-lab bench verify --device cpu --rows 8 --drafts 7"
SIZES = {True: ([1, 8, 64, 256], [0, 7, 15]), False: ([1, 8, 64], [0, 7])}  # rows, drafts: is it a device?


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser.add_argument_group("what is measured"),
        ("--device", str, "NAME", None, "as torch has it: cpu, cuda, npu (the accelerator, if there is one)"),
        ("--rows", number(int, 1), "N", [], "requests of a step (1 8 64 256)"),
        ("--drafts", number(int, 0), "K", [], "draft tokens of each (0 7 15)"),
        ("--vocab-size", number(int, 1000), "V", 151_936, "of the logits"),
    )
    add_output(parser, "the JSON")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import quiet_vllm

    quiet_vllm()
    from rollout_spec_lab.bench.tables import verify_tables
    from rollout_spec_lab.bench.verify import device_of, record_of, sentences

    rows, drafts = SIZES[device_of(args.device).type != "cpu"]
    for record in record_of(args.device, args.rows or rows, args.drafts or drafts, args.vocab_size):
        if args.output:
            write(record, args.output)
    return report(args, record, *verify_tables(record), *sentences(record))
