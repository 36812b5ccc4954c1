"""Progress of `gpu-check` on standard error: a bar on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def timed(text: str, seconds: float) -> Iterator[Callable[[str, float], None]]:
    """A bar of so many seconds; call what it yields with what is being done and the seconds passed."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=seconds)

        def show(doing: str, passed: float) -> None:
            progress.update(task, description=f"{text}: {doing}", completed=passed)
            if not console.is_terminal:
                console.print(f"{text}: {passed:.0f} s: {doing}", highlight=False, soft_wrap=True)

        yield show
