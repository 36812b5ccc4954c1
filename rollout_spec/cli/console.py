"""Tables on standard output; the progress of long work on standard error, on a terminal only."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import rich.table
from rich.console import Console
from rich.progress import Progress, track

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
    plain = functools.partial(_Console, markup=False, emoji=False)
    console = plain()
    return console if console.is_terminal or "COLUMNS" in os.environ else plain(width=FILE_WIDTH)


def make_table(title: str, *columns: str, **settings: Any) -> rich.table.Table:
    """The first column to the left, figures to the right."""
    table = rich.table.Table(title=title, title_justify="left", **settings)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    return table


def print_values(title: str, values: Mapping[str, float]) -> None:
    console = make_console()
    console.print(title, soft_wrap=True)
    table = make_table("", "", "", show_header=False)
    for name, value in values.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
        table.add_row(name.removeprefix("num_").replace("_", " "), text)
    console.print(table)


def print_tables(console: Console, tables: Iterable[Table]) -> None:
    """Tables as `report` makes them for pages."""
    for title, columns, rows in tables:
        table = make_table(title, *columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def tracked(items: Iterable[T], text: str) -> Iterable[T]:
    """The items, with a bar on a terminal."""
    console = Console(stderr=True)
    return track(items, text, console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def counted(text: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; call what it yields with how much more is done."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda more: progress.advance(task, more)
