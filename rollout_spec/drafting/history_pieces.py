"""Pieces: the history's texts on their way to other engines and to files, each with version and checksum."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rollout_spec.drafting.native import Int32Array

_MAGIC = b"rollout_spec history 5\n"
_LENGTH_BYTES = 8  # that say how long a piece's content is
_PIECE_BYTES = 1 << 20  # about, of a piece's texts; a longer text is a piece of its own
_DIGEST_BYTES = hashlib.sha256().digest_size
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES + _LENGTH_BYTES
_MORE, _LAST = b"+", b"."  # with which a piece's content begins: whether others follow
KEY_BYTES, NAME_BYTES = 16, 8  # of a prompt's key, and of a sample's

# Of a text in a piece: the keys of its prompt and of its sample, joined; its training step; its tokens.
Entry = tuple[bytes, int, Int32Array]


class HistoryError(ValueError):
    """A file that is damaged or not a history; the message names it."""


def read_file(path: Path) -> list[bytes]:
    """The pieces of a file, for `History.merge`.

    Raises OSError; HistoryError: it is not one of ours, of another version, damaged, or cut off.
    """
    content, pieces, begin, mark = path.read_bytes(), list[bytes](), 0, _MORE
    while begin < len(content) or mark == _MORE:
        if pieces and begin == len(content):
            raise HistoryError(f"{path}: damaged, its end is missing")
        head = content[begin : begin + _HEAD_BYTES]
        end = begin + _HEAD_BYTES + int.from_bytes(head[-_LENGTH_BYTES:], "little")
        pieces.append(content[begin:end])
        mark = _checked(pieces[-1], str(path))[:1]
        begin = end
    return pieces


def to_pieces(entries: Sequence[Entry]) -> Iterator[bytes]:
    """Texts in pieces; at least one."""
    begin = num_bytes = 0
    for end, (_, _, tokens) in enumerate(entries, 1):
        num_bytes += tokens.nbytes
        if num_bytes >= _PIECE_BYTES and end < len(entries):
            yield _piece(entries[begin:end], _MORE)
            begin, num_bytes = end, 0
    yield _piece(entries[begin:], _LAST)


def _piece(entries: Sequence[Entry], mark: bytes) -> bytes:
    buffer = io.BytesIO(mark)
    buffer.seek(len(mark))
    np.savez(
        buffer,
        names=np.frombuffer(b"".join(keys for keys, _, _ in entries), np.uint8),
        steps=np.array([step for _, step, _ in entries], np.int64),
        lengths=np.array([len(tokens) for _, _, tokens in entries], np.int64),
        tokens=np.concatenate([np.empty(0, np.int32), *(tokens for _, _, tokens in entries)]),
    )
    content = buffer.getbuffer()
    length = len(content).to_bytes(_LENGTH_BYTES, "little")
    return b"".join((_MAGIC, hashlib.sha256(content).digest(), length, content))


def _checked(piece: bytes, where: str) -> bytes:
    """Take version, checksum and length off a piece. Raises HistoryError, beginning with `where`."""
    if not piece.startswith(_MAGIC):
        raise HistoryError(f"{where}: not a history of this version")
    content = piece[_HEAD_BYTES:]
    if hashlib.sha256(content).digest() != piece[len(_MAGIC) :][:_DIGEST_BYTES]:
        raise HistoryError(f"{where}: damaged, its checksum does not match")
    return content


def read_piece(piece: bytes, where: str, vocab_size: int) -> list[Entry]:
    """Its texts. Raises HistoryError, beginning with `where`."""
    with np.load(io.BytesIO(_checked(piece, where)[1:])) as arrays:
        tokens = arrays["tokens"]
        largest = tokens.max(initial=0)
        if largest >= vocab_size:
            raise HistoryError(f"{where}: has the token {largest}, the model's vocabulary is of {vocab_size}")
        texts = np.split(tokens, np.cumsum(arrays["lengths"])[:-1])
        names = arrays["names"].reshape(-1, KEY_BYTES + NAME_BYTES)
        # Where there is no text, split makes an empty one.
        each = zip(names, arrays["steps"].tolist(), texts, strict=False)
        return [(keys.tobytes(), step, tokens.copy()) for keys, step, tokens in each]
