"""Files that a command leaves behind: each whole, or as it was before."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_spec.config import UserError


def plain_file(path: Path) -> Path:
    """The file that `path` is or will be, links followed. Raises UserError for a device or a folder."""
    file = Path(os.path.realpath(path))
    if file.is_symlink() or (file.exists() and not file.is_file()) or not file.parent.is_dir():
        raise UserError(f"{path}: must be a plain file in a folder that exists")
    return file


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, to be written. It replaces `path` at the end; after an error it goes.

    Raises UserError: `path` is no plain file, or cannot be written, or the disk is full.
    """
    file = plain_file(path)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_files(folder: Path, contents: Mapping[str, bytes | str]) -> None:
    """Write files by name into `folder`, which is made if it is not there.

    None of them is replaced before all are written, so a full disk changes nothing.

    Raises UserError: as `replacing`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        for name, content in contents.items():
            file = stack.enter_context(replacing(folder / name))
            file.write_bytes(content.encode() if isinstance(content, str) else content)


def as_json(record: Any) -> str:
    """A record as commands write and print it."""
    return json.dumps(record, indent=2, allow_nan=False) + "\n"
