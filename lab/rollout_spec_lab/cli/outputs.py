"""What several commands of the laboratory write: `--output`, `--json`."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_spec.cli import console
from rollout_spec.cli.arguments import add_options, folder_for, path
from rollout_spec.files import as_json, write_files


def _file(text: str) -> Path:
    """An argparse type: a file that can be written, or replaced, as it is ours."""
    file = path(text)
    return folder_for(file.name)(str(file.parent)) / file.name


def add_output(parser: argparse.ArgumentParser, written: str, *names: str) -> None:
    """Add `--json` and `--output`, which gets what is `written`: in a folder, where these names are replaced
    if they are ours; without names, in such a file."""
    output = parser.add_argument_group("output")
    kind, metavar = (folder_for(*names), "DIR") if names else (_file, "FILE")
    add_options(output, ("--output", kind, metavar, None, f"write {written} there"))
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")


def write(record: Mapping[str, Any], file: Path) -> None:
    write_files(file.parent, {file.name: as_json(record)})


def report(args: argparse.Namespace, record: Mapping[str, Any], *parts: Any, name: str = "") -> int:
    """Write a record to `--output`, or to the file `name` there, if that is given; print it or its parts."""
    if args.output:
        write(record, args.output / name)
    console.show(record, args.json, *parts)
    return 0


@contextlib.contextmanager
def output_folder(output: Path | None) -> Iterator[Path]:
    """`--output`, made where it is missing; one that goes again for None."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="rollout_spec_") as temporary:
            yield Path(temporary)
        return
    output.mkdir(parents=True, exist_ok=True)
    yield output
