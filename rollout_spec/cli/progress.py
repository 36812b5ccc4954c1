"""Progress of long work on standard error: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, track

T = TypeVar("T")


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
