"""What verl's loggers wrote, read back: JSON lines, wandb (offline folders and online runs), tensorboard."""

import itertools
import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollout_spec.config import UserError

METRICS_FILE = "metrics.jsonl"
WANDB_FILE = "*.wandb"
_HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_BLOCK = 32768
_FRAME = struct.Struct("<IHB")  # checksum, length, type
_FULL, _FIRST, _LAST = 1, 2, 4  # 3: one in the middle
_TENSORBOARD_FILE = "*tfevents*"
ONLINE = re.compile(r"(?:wandb:)?([\w.-]+)/([\w.-]+)/([\w.-]+)")

logger = logging.getLogger(__name__)

Record = tuple[int, dict[str, Any]]  # a training step and what was logged at it, by verl's names
Reader = Callable[[Path], Iterator[Record]]


class Log(NamedTuple):
    source: str  # where it was found
    records: tuple[Record, ...]


def read_log(run: str | Path) -> Log:
    """Read the log of a run, each step once: what was logged at one step several times is put together.

    Args:
        run: a folder or a file of any of the kinds above, or `entity/project/run_id` of a run at wandb
            (`wandb:entity/project/run_id` where a folder has that name). In a folder with several, the file
            logger's JSON lines come before wandb's files, and those before tensorboard's.

    Raises UserError: nothing there, several runs where one is wanted, or not what its name says.
    """
    path = Path(run)
    online = ONLINE.fullmatch(str(run))
    if online and not path.exists():
        return _read_online(*online.groups())
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if not path.is_dir() and not path.is_file():
        raise UserError(f"{path}: must be a file or a folder, no pipe and no device")
    read, files = _find(path) if path.is_dir() else (_reader_of(path), [path])
    return _merged(str(files[0]), itertools.chain.from_iterable(map(read, files)))


def _reader_of(file: Path) -> Reader:
    if file.match(WANDB_FILE):
        return _read_wandb
    return _read_tensorboard if file.match(_TENSORBOARD_FILE) else read_json_lines


def _find(folder: Path) -> tuple[Reader, list[Path]]:
    """What reads the log in a folder, and its files: of a run that wandb resumed, one for each time."""
    if (folder / METRICS_FILE).exists():
        return read_json_lines, [folder / METRICS_FILE]
    kinds: tuple[tuple[Reader, Iterable[Path]], ...] = (
        (read_json_lines, folder.glob("*.jsonl")),
        (_read_wandb, wandb_files(folder)),
        # A tensorboard run is a folder: a run that was resumed has several files.
        (_read_tensorboard, (file.parent for file in folder.rglob(_TENSORBOARD_FILE))),
    )
    for read, found in kinds:
        files = sorted(set(found))
        if len({file.name if read is _read_wandb else file for file in files}) > 1:
            names = ", ".join(os.path.relpath(file, folder.resolve()) for file in files)
            raise UserError(f"{folder}: several runs, name one of them: {names}")
        if files:
            return read, files
    looked = f"looked for {METRICS_FILE}, *.jsonl, {WANDB_FILE}, {_TENSORBOARD_FILE}"
    raise UserError(f"{folder}: no log of a run in it ({looked})")


def _merged(source: str, records: Iterable[Record]) -> Log:
    """In order of steps; of a step that was logged again (a resumed run), the later values count."""
    merged: dict[int, dict[str, Any]] = {}
    again = set()
    for step, data in records:
        values = merged.setdefault(step, {})
        # wandb adds _runtime and others.
        if any(name in values and not name.startswith("_") for name in data):
            again.add(step)
        values.update(data)
    if again:
        steps = ", ".join(map(str, sorted(again)[:9]))
        logger.warning("%s: logged more than once, the later values count: step %s", source, steps)
    return Log(source, tuple(sorted(merged.items())))


def read_json_lines(file: Path, level: int = logging.WARNING) -> Iterator[Record]:
    """What verl's logger `file` wrote so far; `level`: how to say that the last line is not whole."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    if lines.pop():  # of a run in progress, or of one that was killed
        logger.log(level, "%s:%d: the last line is cut off, it is left out", file, len(lines) + 1)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            yield int(record["step"]), dict(record["data"])
        except (ValueError, TypeError, KeyError, OverflowError):
            raise UserError(f"{file}:{number}: not a line of verl's file logger") from None


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
        rows = [dict(row) for row in wandb.Api().run(source).scan_history()]
    # wandb has no common class for "no key", "no network", "no such run"; whatever it says is the reason.
    except Exception as error:
        raise UserError(f"{source}: no such file or folder, and as a run of wandb: {error}") from error
    records = ((int(row["_step"]), row) for row in rows if row.get("_step") is not None)
    return _merged(f"wandb: {source}", records)


def _read_wandb(file: Path) -> Iterator[Record]:
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            data = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            yield int(data.get("_step", record.history.step.num)), data


def wandb_files(folder: Path) -> list[Path]:
    """In a run's own folder, in wandb's, and in the folder that holds wandb's (WANDB_DIR)."""
    patterns = (WANDB_FILE, f"*run-*/{WANDB_FILE}", f"wandb/*run-*/{WANDB_FILE}")
    # `latest-run` is a link to one of the others.
    return list({file.resolve() for pattern in patterns for file in folder.glob(pattern)})


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a `.wandb` file, as wandb's own protocol has them.

    wandb 0.31 reads them in its Go program only; earlier versions could in Python. The format: LevelDB's log
    (github.com/google/leveldb/blob/main/doc/log_format.md) after a header of 7 bytes, with the CRC-32 of
    type and data for a checksum.
    """
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    if not data.startswith(_HEADER):
        raise UserError(f"{file}: not a file of wandb, or of a version of its format that is not known here")
    position = end = len(_HEADER)
    parts = b""
    # What a run in progress, or a killed one, has not finished writing is left out.
    while len(data) - position >= _FRAME.size:
        left_in_block = _BLOCK - position % _BLOCK
        if left_in_block < _FRAME.size:
            position += left_in_block
            continue
        checksum, length, kind = _FRAME.unpack_from(data, position)
        position += _FRAME.size
        part = data[position : position + length]
        if len(part) < length:
            break
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            raise UserError(f"{file}: damaged at byte {position - _FRAME.size}")
        position += length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts, end = b"", position
    if end < len(data):
        logger.warning("%s: the last record is cut off, it is left out", file)
