"""Public data sets into verl's parquet format; shared by the recipes' prepare.py."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}


class Source(NamedTuple):
    """A split of a data set on the hub, the columns it must have, and a row of it as a row for verl."""

    name: str
    split: str
    columns: tuple[str, ...]
    convert: Callable[[Row, int], Row]


class SourceError(Exception):
    """A data set that cannot be had or is not what it should be; one line for the user."""


def main(train: Source, val: Source, folder: str, help_: str) -> None:
    """The command line of a prepare.py; a failure is one line and exit code 2."""
    parser = argparse.ArgumentParser(description=help_)
    parser.add_argument("--output", type=Path, default=Path(folder), metavar="DIR", help="%(default)s")
    parser.add_argument(
        "--train", type=Path, metavar="FILE", help=f"a copy of {train.name}, instead of the hub's"
    )
    parser.add_argument(
        "--val", type=Path, metavar="FILE", help=f"a copy of {val.name}, instead of the hub's"
    )
    args = parser.parse_args()
    try:
        # Both before either is written.
        tables = {"train": rows(train, args.train, "--train"), "val": rows(val, args.val, "--val")}
        args.output.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            path = args.output / f"{name}.parquet"
            write(table, path)
            print(f"{path}: {len(table)} prompts")
    except SourceError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"--output {args.output}: {error.strerror or error}")


def _fail(message: str) -> None:
    print(f"prepare.py: {message}", file=sys.stderr)
    sys.exit(2)


def rows(source: Source, copy: Path | None, option: str) -> list[Row]:
    """The source's rows in verl's columns, each prompt once.

    Raises:
        SourceError: it cannot be reached, read, lacks a column or a value, or a prompt is no chat.
    """
    data = _load(source, copy, option)
    where = copy or source.name
    missing = [column for column in source.columns if column not in data.column_names]
    if missing:
        raise SourceError(f"{where}: no column {', '.join(missing)} (found: {', '.join(data.column_names)})")
    return list(
        _unique(_converted(source, row, index, f"{where}: row {index}") for index, row in enumerate(data))
    )


def _converted(source: Source, row: Row, index: int, where: str) -> Row:
    for column in source.columns:
        if row[column] is None:
            raise SourceError(f"{where}: {column} is null")
    converted = source.convert(row, index)
    if not _is_chat(converted["prompt"]):
        raise SourceError(f"{where}: prompt must be a list of messages, each with role and content")
    return converted


def _is_chat(prompt: Any) -> bool:
    return (
        bool(prompt)
        and isinstance(prompt, list)
        and all(
            isinstance(message, dict) and isinstance(message.get(key), str)
            for message in prompt
            for key in ("role", "content")
        )
    )


def _load(source: Source, copy: Path | None, option: str) -> Any:
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    # Its five retries are not news.
    huggingface_hub.logging.set_verbosity_error()
    if copy is not None:
        if not copy.is_file() or copy.suffix not in FORMATS:
            raise SourceError(f"{option} {copy}: must be a file that ends in {', '.join(FORMATS)}")
        try:
            return datasets.load_dataset(FORMATS[copy.suffix], data_files=str(copy), split="train")
        # Every reader that it calls has exceptions of its own.
        except Exception as error:
            raise SourceError(f"{option} {copy}: {_line(error)}") from error
    try:
        return datasets.load_dataset(source.name, split=source.split)
    # The hub's client raises a dozen unrelated classes for "no network", "no access" and "no such data set".
    except Exception as error:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise SourceError(
            f"{source.name}: cannot be reached at {endpoint} ({_line(error)}). Check the network, the proxy "
            f"or HF_ENDPOINT, or download the file elsewhere and give it with {option} FILE"
        ) from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _unique(table: Iterable[Row]) -> Iterable[Row]:
    seen = set()
    for row in table:
        text = row["prompt"][-1]["content"]
        if text not in seen:
            seen.add(text)
            yield row


def write(table: list[Row], path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(table).to_parquet(str(path))
