"""Write what comes from the code: options, metrics, the requests' options, and every command's arguments.

    python -m docs.generate

A page has a part between two markers, `<!-- generated: NAME -->` and `<!-- /generated -->`.
`tests/test_docs.py` fails where a part is not what this would write.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

from docs import request_options
from rollout_spec.cli import build_parser
from rollout_spec.config import AUTO, METHODS, ROUTINGS, SpecConfig
from rollout_spec.metrics import METRICS
from rollout_spec_lab import cli as lab

DOCS = Path(__file__).parent
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(DOCS.parent.glob("lab/*.md"))]
PART = re.compile(r"(<!-- generated: ([\w -]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)
CHOICES = {"method": METHODS, "routing": ROUTINGS}


def options() -> str:
    fields = dataclasses.fields(SpecConfig)
    lines = ["| option | default | range |", "|---|---|---|"]
    lines += [f"| [`{f.name}`](#{f.name}) | {_default(f)} | {_range(f)} |" for f in fields]
    for field in fields:
        lines += ["", f"## `{field.name}`", ""]
        lines += [f"- Meaning: {field.metadata['help']}.", f"- Default: {_default(field)}."]
        lines += [f"- Range: {_range(field)}.", f"- **Change it when** {field.metadata['when']}."]
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field) -> str:
    return f"`{field.default}`" if field.default != "" else "none"


def _range(field: dataclasses.Field) -> str:
    if field.name in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[field.name])
    low, high = field.metadata["low"], field.metadata["high"]
    if low is None:
        return "`true`, `false`" if isinstance(field.default, bool) else "a path"
    return f"{_plain(low)} to {_plain(high)}" + (f", `{AUTO}`" if field.metadata["or_auto"] else "")


def _plain(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def metrics() -> str:
    lines = ["| metric | meaning | what to do about it |", "|---|---|---|"]
    lines += [f"| `{m.name}` | {m.meaning} | {m.advice} |" for m in METRICS]
    return "\n".join(lines) + "\n"


def arguments(command: str) -> str:
    """A table for each group of arguments of `rollout-spec ...`, or of `rollout-spec-lab ...`."""
    program, *names = command.split()
    parser = build_parser() if program == "rollout-spec" else lab.build_parser()
    for name in names:
        parser = _subparsers(parser)[name]
    blocks = []
    for group in parser._action_groups:
        rows = _rows(parser, group._group_actions)
        if rows:
            header = [f"| {group.title} | {group.description or ''} |", "|---|---|"]
            blocks.append("\n".join([*header, *rows]) + "\n")
    return "\n".join(blocks)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def _rows(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> list[str]:
    formatter = parser._get_formatter()
    rows = []
    for action in actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        usage = formatter._format_action_invocation(action)
        meaning = formatter._expand_help(action) if action.help else ""
        cells = (f"`{usage}`", meaning)
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return rows


def generated(name: str) -> str:
    """The text of one part: `options`, `metrics`, `request TABLE` or `arguments COMMAND`."""
    kind, _, of = name.partition(" ")
    parts = {
        "options": options,
        "metrics": metrics,
        "request": lambda: request_options.page(getattr(request_options, of.upper())),
        "arguments": lambda: arguments(of),
    }
    return parts[kind]()


def renewed(text: str) -> str:
    """A page's text with every generated part written anew."""
    return PART.sub(lambda match: match[1] + "\n" + generated(match[2]) + "\n" + match[3], text)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        new = renewed(text)
        if new != text:
            page.write_text(new)
            print(f"written: {page.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
