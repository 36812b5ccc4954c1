"""Progress of the demo on standard error: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

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

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
