"""What a command has found, on standard output; the progress of long work on standard error of a terminal."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import rich.table
from rich.console import Console
from rich.progress import Progress, track

from rollout_spec import files
from rollout_spec.report.page import Table

FILE_WIDTH = 120
T = TypeVar("T")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise


def make_console() -> Console:
    """As wide as the terminal; a file has no width, and narrow columns would cut numbers.

    Text stands as it is: names of files may look like rich's markup.
    """
    width = None if Console().is_terminal or "COLUMNS" in os.environ else FILE_WIDTH
    return _Console(markup=False, emoji=False, width=width)


def quiet_vllm() -> None:
    """Have vLLM say errors only, on standard error: an answer is on standard output. Before vLLM is imported.

    A choice of the user's stays.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


class Headline(str):
    """A sentence in bold."""


class Values(NamedTuple):
    """Numbers by name, below a title, which is one line however long."""

    title: str
    numbers: Mapping[str, float]


def show(record: Any, as_json: bool, *parts: str | Values | Table) -> None:
    """Print a record as JSON, or else its parts: sentences, values, tables as `report` makes them."""
    if as_json:
        print(files.as_json(record), end="")
        return
    console = make_console()
    for part in parts:
        if isinstance(part, str):
            console.print(part, style="bold" if isinstance(part, Headline) else None, highlight=False)
        elif isinstance(part, Values):
            console.print(part.title, soft_wrap=True)
            rows = [_value(*one) for one in part.numbers.items()]
            console.print(_table("", ["", ""], rows, show_header=False))
        else:
            console.print(_table(*part))


def _value(name: str, value: float) -> list[str]:
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
    return [name.removeprefix("num_").replace("_", " "), text]


def _table(title: str, columns: list[str], rows: Iterable[list[str]], **settings: Any) -> rich.table.Table:
    """The first column to the left, figures to the right."""
    table = rich.table.Table(title=title, title_justify="left", **settings)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    return table


@contextlib.contextmanager
def heard(name: str) -> Iterator[list[str]]:
    """The warnings that the loggers below `name` give meanwhile; they are on standard error too."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def tracked(items: Iterable[T], text: str) -> Iterable[T]:
    """The items, with a bar on a terminal."""
    console = Console(stderr=True)
    return track(items, text, console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def counted(text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; call what it yields with how much more is done."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield functools.partial(progress.advance, progress.add_task(text, total=total))
