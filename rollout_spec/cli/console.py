"""Tables on standard output."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rollout_spec.report.measures import Comparison

FILE_WIDTH = 120


def make_console() -> Console:
    """As wide as the terminal; a file has no width, and narrow columns would cut numbers.

    Text stands as it is: names of files may look like rich's markup.
    """
    plain = functools.partial(Console, markup=False, emoji=False)
    console = plain()
    return console if console.is_terminal or "COLUMNS" in os.environ else plain(width=FILE_WIDTH)


def make_table(title: str, *columns: str, caption: str | None = None) -> Table:
    """The first column to the left, figures to the right."""
    table = Table(title=title, title_justify="left", caption=caption)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    return table


def print_values(title: str, values: Mapping[str, float]) -> None:
    console = make_console()
    console.print(title, soft_wrap=True)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in values.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
        table.add_row(name.removeprefix("num_").replace("_", " "), text)
    console.print(table)


def print_tables(
    console: Console, tables: Iterable[tuple[str, Sequence[str], Iterable[Sequence[str]]]]
) -> None:
    """Tables as `report` makes them for pages: title, columns, rows."""
    for title, columns, rows in tables:
        table = make_table(title, *columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def print_comparison(comparison: Comparison, paths: Mapping[str, Any], as_json: bool) -> None:
    """Print how two runs compare, and where the files are."""
    from rollout_spec.report.comparison import headline, sentences, table_columns, table_rows

    if as_json:
        print(json.dumps(comparison.to_dict(), indent=2, allow_nan=False))
        return
    console = make_console()
    columns = [*table_columns(comparison)[:-1], "change [95% interval]"]
    print_tables(console, [(headline(comparison), columns, table_rows(comparison, intervals=False))])
    for sentence in sentences(comparison):
        console.print(sentence, highlight=False)
    for kind, path in paths.items():
        console.print(f"{kind:>6}: {path}", highlight=False, soft_wrap=True)
