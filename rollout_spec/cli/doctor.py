"""`rollout-spec doctor`: whether drafting can work here, and what to do if not."""

import argparse

HELP = "say whether drafting can work here, and what to do if not"
EXAMPLE = "rollout-spec doctor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output", "Exit code 1: drafting cannot work here.")
    output.add_argument("--json", action="store_true", help="print every check, patches too, as JSON")


def run(args: argparse.Namespace) -> int:
    from rollout_spec.cli.console import quiet_vllm
    from rollout_spec.doctor.diagnosis import diagnosis_record
    from rollout_spec.files import as_json

    quiet_vllm()
    found = diagnosis_record()
    if args.json:
        print(as_json(found), end="")
    else:
        _print(found["checks"])
    return 0 if found["works"] else 1


def _print(checks: list[dict[str, str]]) -> None:
    """What is wrong first; of the patches that are as they should be only how many."""
    from rich.text import Text

    from rollout_spec.cli.console import make_console
    from rollout_spec.doctor.check import FAIL, OK, WARN

    colours = {FAIL: "bold red", WARN: "yellow", OK: "green"}
    plain = [check for check in checks if not (check["name"].startswith("patch ") and check["status"] == OK)]
    detail = f"{len(checks) - len(plain)} applied; --json says which, and why"
    shown = [*plain, {"name": "patches", "status": OK, "detail": detail, "fix": ""}]
    width = max(len(check["name"]) for check in shown)
    console = make_console()
    for check in sorted(shown, key=lambda check: list(colours).index(check["status"])):
        text = f"{check['name']:<{width}}  {check['detail']}" + (f"; {check['fix']}" if check["fix"] else "")
        # One line each, however long: for `grep`, and the terminal wraps by itself.
        status = f"{check['status']:<4}  ", colours[check["status"]]
        console.print(Text.assemble(status, text), soft_wrap=True)
    failed = [check["name"] for check in checks if check["status"] == FAIL]
    console.print(f"Drafting cannot work here: {', '.join(failed)}." if failed else "Drafting can work here.")
