"""The file of a static corpus: a header, and after it the automaton itself, as native/corpus.h lays it out.

A file is mapped, never read in: opening takes the same time at any size, and all engines of a machine share
its pages. So an engine trusts no byte of it: what a draft follows is compared with its bounds on the way, and
a file that is wrong costs drafts. `check_corpus` reads it through before anything is launched.

Replace a corpus by moving a new file over it, as `write_corpus` does: an engine that has the old one open
keeps it. Never write into the file: if it is cut short while it is mapped, SIGBUS ends the process that reads
after its end.
"""

import hashlib
import mmap
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollout_spec.config import ConfigError
from rollout_spec.drafting.native import Int32Array, NativeError, check_status, check_vector, ffi, lib
from rollout_spec.files import replacing

_KIND = b"rollout_spec corpus "
_MAGIC = _KIND + f"1 {sys.byteorder}\n".encode()
_HEADER = struct.Struct("=32s32sQ")  # magic; SHA-256 and number of bytes of what follows
_HEAD = struct.Struct("=QII")  # the first bytes of what follows
CONTENT_OFFSET = _HEADER.size


class Corpus(NamedTuple):
    """An open file; it stays mapped for as long as this lives."""

    mapped: mmap.mmap
    """Read-only, shared with every process that has the file open; the content begins at CONTENT_OFFSET."""
    digest: bytes
    num_tokens: int
    num_states: int
    num_transitions: int

    @property
    def largest_token(self) -> int:
        """-1 of a corpus without text; nothing above it is drafted."""
        with ffi.from_buffer("char[]", self.mapped) as buffer:
            return int(lib.rs_corpus_largest_token(buffer + CONTENT_OFFSET, len(buffer) - CONTENT_OFFSET))


def holds(corpus: Corpus, token_ids: Int32Array) -> bool:
    """Whether a text, int32 [n], stands in the corpus as a whole. Of a file that `check_corpus` takes."""
    begin = CONTENT_OFFSET + _HEAD.size
    states = np.frombuffer(corpus.mapped, np.uint32, 4 * (corpus.num_states + 1), begin).reshape(-1, 4)
    begin += states.nbytes
    transitions = np.frombuffer(corpus.mapped, np.int32, 2 * corpus.num_transitions, begin).reshape(-1, 2)
    state = 0
    for token in token_ids:
        followers = transitions[states[state, 3] : states[state + 1, 3]]
        found = np.flatnonzero(followers[:, 0] == token)
        if not found.size:
            return False
        state = int(followers[found[0], 1])
    return True


def open_corpus(path: str | Path) -> Corpus:
    """Map a file, without reading it through.

    Raises ConfigError: there is no such file, or it is not a corpus of this version and of this length.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
            if not header.startswith(_KIND):
                raise _error(path, "not a corpus of rollout-spec")
            if not header.startswith(_MAGIC):
                raise _error(path, "of another version of rollout-spec or another byte order: build it again")
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise _error(path, str(error.strerror)) from error
    _, digest, num_bytes = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    if len(mapped) != CONTENT_OFFSET + num_bytes or num_bytes < _HEAD.size:
        raise _error(path, f"cut short or added to, it has {len(mapped)} bytes")
    return Corpus(mapped, digest, *_HEAD.unpack_from(mapped, CONTENT_OFFSET))


def is_corpus(path: Path) -> bool:
    """Whether this file is a corpus, of whatever version."""
    with path.open("rb") as file:
        return file.read(len(_KIND)) == _KIND


def check_corpus(path: str | Path) -> None:
    """Read a file through: its checksum, and that every number in it is one that an index can follow.

    An engine opens the file without that and drafts less from one that is wrong; this says so beforehand.

    Raises ConfigError: as open_corpus, or the file is damaged.
    """
    corpus = open_corpus(path)
    if _digest(corpus.mapped) != corpus.digest:
        raise _error(path, "damaged, its checksum does not match")
    error = ffi.new("rs_error *")
    with ffi.from_buffer("char[]", corpus.mapped) as whole:
        content, num_bytes = whole + CONTENT_OFFSET, len(whole) - CONTENT_OFFSET
        status = lib.rs_corpus_validate(content, num_bytes, error)
    try:
        check_status(status, error)
    except NativeError as broken:
        raise _error(path, f"damaged before its checksum was made ({broken}): build it again") from broken


def write_corpus(path: str | Path, num_bytes: int, fill: Callable[[mmap.mmap], None]) -> None:
    """Write a file; an older one is replaced in one move.

    Args:
        num_bytes: of the content.
        fill: writes the content into the mapping that it is given, from CONTENT_OFFSET on.

    Raises UserError: it is no plain file, cannot be written, or there is no room; nothing is left of it then.
    """
    with replacing(Path(path)) as partial, open(partial, "w+b") as file:
        # A full disk is an error here, not a signal while the mapping is written.
        os.posix_fallocate(file.fileno(), 0, CONTENT_OFFSET + num_bytes)
        with mmap.mmap(file.fileno(), 0) as mapped:
            fill(mapped)
            mapped[:CONTENT_OFFSET] = _HEADER.pack(_MAGIC, _digest(mapped), num_bytes)


class CorpusBuilder:
    """Makes the file of a static corpus; in memory it takes about as much as an index of the same text.

    Raises OutOfMemory.
    """

    def __init__(self) -> None:
        self._error = ffi.new("rs_error *")
        made = ffi.new("rs_corpus_builder **")
        check_status(lib.rs_corpus_new(made, self._error), self._error)
        self._builder = ffi.gc(made[0], lib.rs_corpus_free)

    def add(self, token_ids: Int32Array) -> None:
        """Index a text, int32 [n]. Raises InvalidArgument; OutOfMemory, after which nothing can be saved."""
        check_vector("token_ids", token_ids, None)
        tokens = ffi.from_buffer("int32_t[]", token_ids)
        check_status(lib.rs_corpus_add(self._builder, tokens, len(token_ids), self._error), self._error)

    def save(self, path: str | Path) -> None:
        """Write the file. Raises UserError."""
        write_corpus(path, int(lib.rs_corpus_num_bytes(self._builder)), self._freeze)

    def _freeze(self, mapped: mmap.mmap) -> None:
        with ffi.from_buffer("char[]", mapped, require_writable=True) as buffer:
            content, num_bytes = buffer + CONTENT_OFFSET, len(buffer) - CONTENT_OFFSET
            status = lib.rs_corpus_write(self._builder, content, num_bytes, self._error)
            check_status(status, self._error)


def _digest(mapped: mmap.mmap) -> bytes:
    with memoryview(mapped) as whole, whole[CONTENT_OFFSET:] as content:
        return hashlib.sha256(content).digest()


def _error(path: str | Path, message: str) -> ConfigError:
    return ConfigError(f"rollout.spec.corpus={str(path)!r}: {message}")
