"""A table of named values on standard output."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table


def print_values(title: str, values: Mapping[str, float]) -> None:
    console = Console()
    console.print(title, soft_wrap=True)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in values.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
        table.add_row(name.removeprefix("num_").replace("_", " "), text)
    console.print(table)
