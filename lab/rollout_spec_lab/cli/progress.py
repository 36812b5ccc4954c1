"""Progress of the demo and of `gpu-check` on standard error: a live line on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollout_spec.report.runs import Step
from rollout_spec_lab.demo.runner import Watcher


class ConsoleWatcher(Watcher):
    """Shows which run is at which step and in which phase."""

    def __init__(self, num_steps: int) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("[bold]{task.fields[run]}[/]"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._num_steps = num_steps
        self._task = self._progress.add_task("", run="demo", total=None)
        self._run = "demo"

    def __enter__(self) -> ConsoleWatcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def run_started(self, method: str, log: Path) -> None:
        self._run = method
        self._progress.stop_task(self._task)
        self._task = self._progress.add_task("starting Ray", run=method, total=self._num_steps)
        self._say(f"{method}: training {self._num_steps} steps, log in {log}")

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._say(f"{self._run}: {text}")

    def step(self, step: Step) -> None:
        self._progress.update(self._task, completed=step.step, description="training")
        served = "no tokens of its own, its batch was there before the weights changed"
        if step.generated_tokens:
            served = (
                f"rollout {step.rollout_seconds:.1f} s, {step.tokens_per_second:.0f} tokens/s, "
                f"{step.tokens_per_step:.2f} tokens per step"
            )
        self._say(f"{self._run}: step {step.step}/{self._num_steps}: {served}, reward {step.reward:.3f}")

    def turns_started(self, seconds: float) -> None:
        self._run = "turns"
        self._progress.stop_task(self._task)
        self._task = self._progress.add_task("serving", run=self._run, total=None)
        self._say(f"turns: the same requests with drafts off and on in turn, about {seconds:.0f} s of them")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


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
