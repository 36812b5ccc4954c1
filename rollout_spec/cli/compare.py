"""`rollout-spec compare`: two training runs, one without drafts and one with."""

import argparse

from rollout_spec.cli.arguments import add_options, folder_for, path

FOLDER = folder_for("summary.json", "report.png", "report.html")  # an argparse type
HELP = "compare two training runs, one without drafts and one with"
EXAMPLE = "rollout-spec compare outputs/demo/off outputs/demo/sam"
_RUN = "folder, file (JSON lines, .wandb, tensorboard events) or entity/project/run_id of a run at wandb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    compared = parser.add_argument_group("the two runs")
    compared.add_argument("off", type=path, metavar="RUN_OFF", help=f"run with +rollout.spec=off: {_RUN}")
    help_ = "run with +rollout.spec=sam, of any of the same kinds"
    compared.add_argument("on", type=path, metavar="RUN_ON", help=help_)
    output = parser.add_argument_group("output")
    there = "outputs/comparison"
    add_options(output, ("--output", FOLDER, "DIR", there, "folder for page, picture and JSON"))
    help_ = "add table, picture and speed-up to the summary of RUN_ON at wandb"
    output.add_argument("--wandb", action="store_true", help=help_)
    output.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import Headline, show
    from rollout_spec.report.comparison import headline, sentences, table_columns, table_rows, write_report
    from rollout_spec.report.measures import compare
    from rollout_spec.report.publish import publish, run_of
    from rollout_spec.report.responses import first_step_agreement
    from rollout_spec.report.runs import read_run

    wandb_run = run_of(args.on) if args.wandb else None
    off, on = read_run(args.off, "off"), read_run(args.on, "on")
    comparison = compare(off, on, agreement=first_step_agreement(args.off, args.on))
    columns = [*table_columns(comparison)[:-1], "change [interval]"]
    table = (headline(comparison), columns, table_rows(comparison, intervals=False))
    warnings, text = comparison.warnings, sentences(comparison)
    try:
        paths = write_report(comparison, args.output, {"off": str(args.off), "on": str(args.on)})
    finally:  # a reader of the output may go away
        show(comparison.to_dict(), args.json, *map(Headline, warnings), table, *text)
    published = {"wandb": publish(comparison, wandb_run, paths["png"])} if wandb_run else {}
    for kind, where in (paths | published).items() if not args.json else ():
        print(f"{kind:>6}: {where}")
    return 0
