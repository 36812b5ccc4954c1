"""What verl's loggers wrote, read back: JSON lines, tensorboard, runs on wandb's server."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollout_spec.config import UserError

METRICS_FILE = "metrics.jsonl"
_TENSORBOARD_FILE = "*tfevents*"
_ONLINE = re.compile(r"(?:wandb:)?([\w.-]+)/([\w.-]+)/([\w.-]+)")

logger = logging.getLogger(__name__)

Record = tuple[int, dict[str, Any]]  # a training step and what was logged at it, by verl's names


class RunError(UserError):
    """A run that cannot be found, read or compared; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Log:
    """A run's log: where it was found, and its records."""

    source: str
    records: tuple[Record, ...]


def read_log(run: str | Path) -> Log:
    """Read the log of a run, each step once: what was logged at one step several times is put together.

    Args:
        run: a folder or a file of any of the kinds above, or `entity/project/run_id` of a run at wandb
            (`wandb:entity/project/run_id` where a folder has that name). In a folder with several, the file
            logger's JSON lines come before tensorboard's files.

    Raises:
        RunError: nothing there, several runs where one is wanted, or not what its name says.
    """
    path = Path(run)
    online = _ONLINE.fullmatch(str(run))
    if online and not path.exists():
        return _read_online(*online.groups())
    if not path.exists():
        raise RunError(f"{path}: no such file or folder")
    file = _find(path) if path.is_dir() else path
    is_tensorboard = file.is_dir() or file.match(_TENSORBOARD_FILE)
    return Log(str(file), _merge(_read_tensorboard(file) if is_tensorboard else read_json_lines(file)))


def _find(folder: Path) -> Path:
    """The file of JSON lines, or the folder of tensorboard's: a resumed run has several files in it."""
    if (folder / METRICS_FILE).exists():
        return folder / METRICS_FILE
    for files in (set(folder.glob("*.jsonl")), {file.parent for file in folder.rglob(_TENSORBOARD_FILE)}):
        if len(files) > 1:
            names = ", ".join(sorted(str(file.relative_to(folder)) for file in files))
            raise RunError(f"{folder}: several runs, name one of them: {names}")
        if files:
            return files.pop()
    raise RunError(
        f"{folder}: no log of a run in it (looked for {METRICS_FILE}, *.jsonl, {_TENSORBOARD_FILE}; a run "
        "that wandb logged offline can be read once `wandb sync` has sent it)"
    )


def _merge(records: Iterable[Record]) -> tuple[Record, ...]:
    """In order of steps; of a step that was logged again (a resumed run), the later values count."""
    merged: dict[int, dict[str, Any]] = {}
    for step, data in records:
        merged.setdefault(step, {}).update(data)
    return tuple(sorted(merged.items(), key=lambda record: record[0]))


def read_json_lines(file: Path, level: int = logging.WARNING) -> Iterator[Record]:
    """What verl's logger `file` wrote so far; `level`: how to say that the last line is not whole."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise RunError(f"{file}: no such file") from None
    if lines.pop():  # of a run in progress, or of one that was killed
        logger.log(level, "%s:%d: the last line is cut off, it is left out", file, len(lines) + 1)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            yield int(record["step"]), dict(record["data"])
        except (ValueError, TypeError, KeyError, OverflowError):
            raise RunError(f"{file}:{number}: not a line of verl's file logger") from None


def _read_tensorboard(path: Path) -> Iterator[Record]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    # 0: keep them all, not a sample.
    events = EventAccumulator(str(path), size_guidance={SCALARS: 0})
    events.Reload()
    for tag in events.Tags()[SCALARS]:
        for event in events.Scalars(tag):
            yield event.step, {tag: event.value}


def _read_online(entity: str, project: str, run_id: str) -> Log:
    import wandb

    source = f"{entity}/{project}/{run_id}"
    try:
        run = wandb.Api().run(source)
        rows = [dict(row) for row in run.scan_history()]
    # wandb has no common class for "no key", "no network", "no such run"; whatever it says is the reason.
    except Exception as error:
        raise RunError(f"{source}: no such file or folder, and as a run of wandb: {error}") from error
    records = ((int(row["_step"]), row) for row in rows if row.get("_step") is not None)
    return Log(f"wandb: {source}", _merge(records))
