"""Files that a command leaves behind: each whole, or as it was before."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout_spec import __version__
from rollout_spec.config import UserError

_MARK = re.compile(rb"rollout.spec")  # near the beginning of each file that a command writes for a reader


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

    Raises UserError: see `replacing`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from error
    with contextlib.ExitStack() as stack:
        for name, content in contents.items():
            file = stack.enter_context(replacing(folder / name))
            file.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)


def refuse_others(folder: Path, names: Iterable[str]) -> None:
    """Raise a UserError where a file of `names` is in `folder`, links followed, and is not one of ours."""
    for file in (folder / name for name in names):
        if file.is_file():
            with file.open("rb") as opened:
                if not _MARK.search(opened.read(1024)):
                    raise UserError(f"{file} is there and not ours: name another place")


def as_json(record: Mapping[str, Any]) -> str:
    """A record as commands write and print it."""
    return json.dumps({"made_by": f"rollout_spec {__version__}", **record}, indent=2, allow_nan=False) + "\n"
