"""Progress of long work on standard error, on a terminal only."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, track

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
