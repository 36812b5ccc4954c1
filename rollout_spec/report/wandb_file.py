"""wandb's `.wandb` files: where they are, and the records in them."""

import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout_spec.report import RunError

WANDB_FILE = "*.wandb"
_HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_BLOCK = 32768
_FRAME = struct.Struct("<IHB")  # checksum, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

logger = logging.getLogger(__name__)


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
        raise RunError(f"{file}: not a file of wandb, or of a version of its format that is not known here")
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
            raise RunError(f"{file}: damaged at byte {position - _FRAME.size}")
        position += length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)
            parts, end = b"", position
    if end < len(data):
        logger.warning("%s: the last record is cut off, it is left out", file)
