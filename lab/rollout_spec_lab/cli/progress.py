"""Progress of the demo and of `gpu-check` on standard error: a bar on a terminal, else plain lines."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def timed(text: str, seconds: float) -> Iterator[Callable[[str, float], None]]:
    """A bar of `seconds`; call what it yields with what is being done and the seconds that have passed."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=seconds)

        def show(doing: str, passed: float) -> None:
            progress.update(task, description=f"{text}: {doing}", completed=passed)
            if not console.is_terminal:
                console.print(f"{text}: {passed:.0f} s: {doing}", highlight=False, soft_wrap=True)

        yield show


@contextlib.contextmanager
def told(num_steps: int) -> Iterator[Callable[[str], None]]:
    """What prints a line; on a terminal a bar below the lines counts those that name a training step."""
    console = Console(stderr=True)
    columns = (TextColumn("training steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_steps)

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)
            progress.update(task, advance=": step " in text)

        yield say
