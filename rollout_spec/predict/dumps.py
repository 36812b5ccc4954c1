"""Files of rollouts, read as `trace.Rollout`s: what a file is, its contents say, not its name.

A file is JSON lines, one JSON document or parquet, compressed or not. `rows` reads the rows in it, and the
policy's tokenizer makes tokens of texts.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import itertools
import json
import logging
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rollout_spec.predict.rows import Columns, Group, groups_in
from rollout_spec.trace import Rollout, TraceError, parse_json, read_lines, token_ids

MAX_JSON_BYTES = 1 << 28
"""The longest line, and the longest document of several lines. Parsed, it takes several times the memory."""
_FILES = re.compile(r"\.(jsonl?|ndjson|parquet)(\.(gz|bz2|xz|zst))?$")
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)  # what decompressors raise
_MAGIC: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zX": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda opened: _zstd(opened),
}
_PEEKED = 20  # bytes that tell JSON from what is none
_WANTED = (
    "wanted: a recording, verl's rollout_data_dir or validation_data_dir, or rows with a prompt and its "
    "responses, or one response, or a chat; --columns prompt=NAME,response=NAME,group=NAME,step=NAME tells "
    "other names"
)

logger = logging.getLogger(__name__)


class NoRolloutsError(TraceError):
    """A file of another form; the message says what was found and what is wanted."""


def read_rollouts(
    paths: Sequence[Path], tokenizer: Path | None = None, columns: Columns | None = None
) -> Iterator[Rollout]:
    """Read files, and folders of files, as one: siblings together, several files by steps.

    Args:
        tokenizer: a tokenizer.json, or a folder with one; needed where there are texts.
        columns: the fields of roles (`rows.NAMES`) that count, whatever else a row has.

    Raises:
        OSError: a file cannot be opened.
        TraceError: a file is damaged or of another form, or does not say which of its fields is the response,
            and is not one of several of a folder; no response has a token, or there is no tokenizer.
        UserError: `columns` names a field that a row does not have.
    """
    files = [file for path in paths for file in _files(path)]
    found: list[Rollout | Group] = []
    groups: dict[tuple[Any, ...], Group] = {}
    refused = []
    for file in files:
        try:
            rows = list(_read(file, columns or {}))  # of a damaged file none
        except TraceError as error:
            refused.append(error)
            continue
        for one in rows:
            if isinstance(one, Group):
                known = groups.setdefault((one.step, one.name, one.part), one)
                if known is not one:
                    known.responses += one.responses
                    continue
            found.append(one)
    if refused and (not found or len(files) == len(paths)):
        raise min(refused, key=lambda error: isinstance(error, NoRolloutsError))  # damage says more
    for reason in refused:  # a folder may hold other and damaged files too
        logger.warning("left out: %s", reason)
    if not any(len(response) for one in found for response in one.responses):
        raise NoRolloutsError(f"{paths[0]}: no token in any response")
    if len(files) > 1 and all(one.step is not None for one in found):
        found.sort(key=lambda one: one.step or 0)
    encoder = _Encoder(tokenizer, paths[0])
    return (one if isinstance(one, Rollout) else encoder.rollout(one) for one in found)


def _files(path: Path) -> list[Path]:
    """The path, or the files in the folder, hidden ones and those in hidden folders left out."""
    if not path.is_dir():
        return [path]
    files = [file for file in path.rglob("*") if _FILES.search(file.name) and file.is_file()]
    files = [file for file in files if not any(part[0] == "." for part in file.relative_to(path).parts)]
    if not files:
        raise NoRolloutsError(
            f"{path}: no file in it ends with .jsonl, .json, .ndjson or .parquet, or with these and .gz, "
            ".bz2, .xz or .zst"
        )
    return sorted(files)


def _read(file: Path, columns: Columns) -> Iterator[Rollout | Group]:
    first, num_rows, num_read = None, 0, 0
    for where, row in _rows(file):
        if isinstance(row, Rollout):
            yield row
            num_read += 1
            continue
        first = row if first is None else first
        try:
            groups = list(groups_in(row, columns, where))
        except OverflowError as error:
            raise TraceError(f"{where}: step: {error}") from error
        except RecursionError as error:
            raise TraceError(f"{where}: {error}") from error
        num_rows, num_read = num_rows + 1, num_read + bool(groups)
        yield from groups
    if not num_read:
        fields = ", ".join(map(str, first)) if isinstance(first, dict) else str(first)[:40]
        what = f"no response that is known among {fields}" if num_rows else "it has no rows"
        raise NoRolloutsError(f"{file}: {what}; {_WANTED}")
    if num_read < num_rows:
        logger.warning("%s: %d of %d rows have no response", file, num_rows - num_read, num_rows)


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """What is in a file, each with its place; `Rollout`s of a recording."""
    with file.open("rb") as opened:  # once: a pipe cannot be read again
        magic = opened.peek(4)[:4]
        if magic == b"PAR1":
            yield from _parquet(opened, file)
            return
        opener = next((opener for begin, opener in _MAGIC.items() if magic.startswith(begin)), None)
        try:
            yield from _json(_lines(opener(opened) if opener else opened, file), file)
        except _DAMAGED as error:
            raise TraceError(f"{file}: {error}") from error


def _parquet(opened: IO[bytes], file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    if not opened.seekable():
        raise TraceError(f"{file}: parquet cannot be read from a pipe")
    try:
        for batch in pyarrow.parquet.ParquetFile(opened).iter_batches():
            yield from ((str(file), row) for row in batch.to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a text that is not UTF-8
        raise TraceError(f"{file}: {error}") from error


def _zstd(opened: IO[bytes]) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(opened, "zstd"))


def _lines(opened: Any, file: Path) -> Iterator[bytes]:
    """The lines of a file; of a compressed one that ends too early those before the cut, if there are any.

    Of what is no JSON, and of a line that is too long, no more is read than shows it.
    """
    begin = opened.peek(_PEEKED)[:_PEEKED]
    if begin.removeprefix(codecs.BOM_UTF8).strip()[:1] not in (b"", b"[", b"{", b"n"):  # n: null
        raise _no_json(begin, file)
    is_empty = True
    try:
        while line := opened.readline(MAX_JSON_BYTES + 1):
            if len(line) > MAX_JSON_BYTES:
                raise _too_long("a line", file)
            yield line
            is_empty = False
    except EOFError as error:
        if is_empty:
            raise
        logger.warning("%s: %s: what follows is left out", file, error)


def _json(lines: Iterator[bytes], file: Path) -> Iterator[tuple[str, Any]]:
    """The values of JSON lines, a recording's as `Rollout`s, or a document of several lines."""
    first = next((line for line in lines if line.strip()), b"").removeprefix(codecs.BOM_UTF8)
    lines = itertools.chain([first], lines)
    try:
        row = json.loads(first.decode())
    except json.JSONDecodeError:
        yield from ((str(file), document) for document in _document(lines, file))
        return
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, first.strip(), file) from error
    if isinstance(row, dict) and {"group", "prompt_token_ids", "responses"} <= set(row):
        yield from ((str(file), rollout) for rollout in read_lines(lines, file))
        return
    for number, line in enumerate(lines, start=1):
        where = f"{file}:{number}"
        if line.strip() and (value := parse_json(line, where)) is not None:
            yield where, value


def _document(lines: Iterable[bytes], file: Path) -> Iterator[Any]:
    """The one value in all lines; none if they are empty."""
    text = bytearray()
    for line in lines:
        text += line
        if len(text) > MAX_JSON_BYTES:
            raise _too_long("its one JSON document", file)
    text = text.strip()
    try:
        if text:
            yield json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, text, file) from error


def _unreadable(error: Exception, text: bytes | bytearray, file: Path) -> TraceError:
    """The error of a text that is no JSON, with its line where that is known."""
    if text[:1] not in (b"[", b"{"):
        return _no_json(text, file)
    where = str(file) if b"\n" in text else f"{file}:1"
    if isinstance(error, json.JSONDecodeError):
        where = f"{file}:{error.lineno}"
    if isinstance(error, UnicodeDecodeError):
        where = f"{file}:{1 + text[: error.start].count(10)}"
    return TraceError(f"{where}: not JSON: {error}")


def _no_json(text: bytes | bytearray, file: Path) -> NoRolloutsError:
    begin = bytes(text[:_PEEKED])
    return NoRolloutsError(f"{file}: it begins with {begin!r}, which is neither JSON nor parquet; {_WANTED}")


def _too_long(what: str, file: Path) -> TraceError:
    limit = f"{MAX_JSON_BYTES >> 20} MiB"
    return TraceError(f"{file}: {what} is longer than {limit}: write JSON lines, a row in each")


class _Encoder:
    """Makes `Rollout`s; reads the tokenizer when the first text comes. `where`: what holds the texts."""

    def __init__(self, tokenizer: Path | None, where: Path) -> None:
        self._path, self._where = tokenizer, where
        self._tokenizer: Any = None

    def rollout(self, group: Group) -> Rollout:
        texts = [group.prompt, *group.responses]
        encoded = iter(self._encode([text for text in texts if isinstance(text, str)]))
        prompt, *responses = (
            next(encoded) if isinstance(text, str) else token_ids(text, str(self._where)) for text in texts
        )
        return Rollout(group.name, group.step, prompt, responses)

    def _encode(self, texts: list[str]) -> list[npt.NDArray[np.int32]]:
        if not any(texts):
            return [np.empty(0, np.int32) for _ in texts]
        self._tokenizer = self._tokenizer or self._load()
        whole = [text.encode(errors="replace").decode() for text in texts]  # JSON may have lone surrogates
        encoded = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def _load(self) -> Any:
        if self._path is None:
            raise TraceError(
                f"{self._where}: it holds texts, and drafts are made of tokens: --tokenizer DIR names the "
                "policy's Hugging Face folder, as the trainer has it, or the tokenizer.json in it"
            )
        file = self._path / "tokenizer.json" if self._path.is_dir() else self._path
        if not file.exists():
            raise TraceError(
                f"--tokenizer {file}: no such file; where a folder has none, transformers writes one: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers has no class of its own
            raise TraceError(f"--tokenizer {file}: no tokenizer.json: {error}") from error
