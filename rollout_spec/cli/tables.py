"""Tables on standard output."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

FILE_WIDTH = 120


def make_console() -> Console:
    """As wide as the terminal; a file has no width, and narrow columns would cut numbers."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=FILE_WIDTH)


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
