"""`rollout-spec-lab bench gate`: the automatic gate beside an oracle, in an engine made of time."""

import argparse

from rollout_spec.cli.arguments import add_options, number, path
from rollout_spec_lab.cli.outputs import add_output, report

HELP = "judge the gate: scenarios that hurt, beside plain steps and an oracle"
EXAMPLE = "rollout-spec-lab bench gate cpu stairs --output outputs/gate.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    scenarios = parser.add_argument_group("what is served")
    scenarios.add_argument("scenarios", metavar="SCENARIO", nargs="*", help="names of scenarios (all)")
    add_options(
        scenarios,
        ("--file", path, "FILE", None, "JSON with scenarios of your own, in place of ours"),
        ("--seeds", number(int, 1), "N", 2, "serve each scenario N times"),
    )
    add_output(parser, "the JSON, and a picture beside it")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import counted
    from rollout_spec.environment import environment
    from rollout_spec.files import refuse_others, write_files
    from rollout_spec_lab.bench.gate import SCENARIOS, draw, judge, read_scenarios
    from rollout_spec_lab.bench.tables import gate_table

    picture = args.output and args.output.with_suffix(".png")
    if picture:
        refuse_others(picture.parent, [picture.name])
    found = read_scenarios(args.file or SCENARIOS, args.scenarios)
    with counted("scenarios", len(found)) as advance:
        results = [row for row in judge(found, args.seeds) if advance(1) is None]
    record = {"environment": environment(), "seeds": args.seeds, "results": results}
    if picture:
        write_files(picture.parent, {picture.name: draw(results)})
    return report(args, record, gate_table(record))
