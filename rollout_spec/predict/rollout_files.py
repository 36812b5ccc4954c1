"""Files of rollouts, read as `trace.Rollout`s: recordings, verl's dumps, rows of a prompt and its responses.

A file is JSON lines, plain or gzipped, or parquet: its contents say which. Of its rows: `row_fields`.
"""

import itertools
import logging
import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.predict.doubts import Repeats, padding, prompts_within
from rollout_spec.predict.row_fields import Columns, RowGroup, group_of
from rollout_spec.predict.texts import encoded
from rollout_spec.trace import Rollout, TraceError, is_recorded, parse_rollout, read_objects

_FILES = re.compile(r"\.(jsonl?|ndjson|parquet)(\.gz)?$")
_WANTED = (
    "wanted: a recording, verl's rollout_data_dir or validation_data_dir, or rows with a prompt and its "
    "responses; for fields of other names pass --columns prompt=NAME,response=NAME,group=NAME,step=NAME"
)

_Row = Rollout | RowGroup

logger = logging.getLogger(__name__)


def read_rollouts(
    paths: Sequence[Path],
    tokenizer: Path | None = None,  # a tokenizer.json, or a folder with one; needed where there are texts
    columns: Columns | None = None,  # the fields of roles that count, whatever else a row has
    limit: int | None = None,  # only the first lines, or groups; no file is read beyond the last of them
) -> Iterator[Rollout]:
    """Read files, and folders of files, as one: siblings together, several files by steps.

    Raises:
        OSError: a file cannot be opened.
        TraceError: a file is damaged or of another form, or does not say which of its fields is the response,
            and is not one of several of a folder; no response has a token, or there is no tokenizer.
        UserError: `columns` names a field that a row does not have.
    """
    files: dict[str, Path] = {}
    for file in itertools.chain.from_iterable(map(_files_of, paths)):
        files.setdefault(os.path.realpath(file), file)  # each once
    found, refused, repeats = _read_all(files.values(), columns or {}, math.inf if limit is None else limit)
    _require_rollouts(found, refused, paths)
    left_out = [f"left out: {reason}" for reason in refused]  # a folder may hold other and damaged files too
    for doubt in (*left_out, *repeats.doubts(), *_doubts(found, tokenizer, columns)):
        logger.warning("%s", doubt)
    if len(files) > 1 and all(one.step is not None for one in found):
        found.sort(key=lambda one: one.step or 0)
    return encoded(found, tokenizer, paths[0])


def _read_all(
    files: Iterable[Path], columns: Columns, limit: float
) -> tuple[list[_Row], list[TraceError], Repeats]:
    """The lines and groups of the files, why other files are none, and what was there twice."""
    found: list[_Row] = []
    groups: dict[tuple[Any, ...], RowGroup] = {}
    refused, repeats = [], Repeats()
    for file in files:
        if len(found) >= limit:
            break
        try:
            rows = list(_first(limit - len(found), _read(file, columns), groups.keys()))
        except TraceError as error:
            refused.append(error)
            continue
        for one in rows:
            repeats.note(_key(one), one.responses, file)
            if isinstance(one, RowGroup) and (known := groups.setdefault(_key(one), one)) is not one:
                known.responses += one.responses
            else:
                found.append(one)
    return found, refused, repeats


def _require_rollouts(found: Sequence[_Row], refused: Sequence[TraceError], paths: Sequence[Path]) -> None:
    if refused and not any(path.is_dir() for path in paths):
        raise refused[0]
    if refused and not found:
        raise TraceError(f"{paths[0]}: none of its {len(refused)} files holds rollouts: {refused[0]}")
    if not any(len(response) for one in found for response in one.responses):
        raise TraceError(f"{paths[0]}: no token in any response")


def _key(one: _Row) -> tuple[Any, ...]:
    return (one.step, one.group, one.part if isinstance(one, RowGroup) else "")


def _doubts(found: Sequence[_Row], tokenizer: Path | None, columns: Columns | None) -> Iterator[str]:
    """What a user must know of the options and the responses."""
    groups = [one for one in found if isinstance(one, RowGroup)]
    texts = [text for one in groups for text in (one.prompt, *one.responses) if isinstance(text, str)]
    if len(found) > 1 and all(one.step is None for one in found):
        yield f"no row has a step: all {len(found)} prompts count as one rollout (--columns step=NAME)"
    if columns and not groups:
        yield "--columns: has no effect, because recordings have fields of their own"
    if tokenizer and not any(texts):
        yield "--tokenizer: has no effect, because these rollouts are token ids"
    yield from padding([response for one in found for response in one.responses])
    prompts = (one.prompt if isinstance(one, RowGroup) else one.prompt_token_ids for one in found)
    yield from prompts_within(zip(prompts, (one.responses for one in found), strict=True))


def _files_of(path: Path) -> list[Path]:
    """The path, or the files in the folder, hidden ones and those in hidden folders left out."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TraceError(f"{path}: must be a file or a folder, no pipe and no device")
    if not path.is_dir():
        return [path]
    files = [file for file in path.rglob("*") if _FILES.search(file.name)]
    files = [file for file in files if "/." not in f"/{file.relative_to(path)}"]
    for file in files:
        if not file.exists():
            logger.warning("left out: %s is a link to nothing", file)
    files = [file for file in files if file.is_file()]
    if not files:
        ends = ".jsonl, .json, .ndjson or .parquet, or with these and .gz"
        raise TraceError(f"{path}: no file in it ends with {ends}")
    return sorted(files, key=_by_number)


def _by_number(file: Path) -> list[int | str]:
    """2.jsonl comes before 10.jsonl."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", str(file))]


def _first(num: float, rows: Iterable[_Row], known: Container[tuple[Any, ...]]) -> Iterator[_Row]:
    """The rows of `known` groups, and of the first `num` other lines and groups."""
    new = set[Any]()
    for number, one in enumerate(rows):
        key = number if isinstance(one, Rollout) else _key(one)
        if key not in known and len(new) < num:
            new.add(key)
        if key in known or key in new:
            yield one
        elif isinstance(one, Rollout):  # a line has all of its group; siblings of rows may follow
            return


def _read(file: Path, columns: Columns) -> Iterator[_Row]:
    """The lines of a file, and its other rows, each as a group."""
    fields, num_rows, num_empty = "", 0, 0
    for where, row in _rows(file):
        num_rows, fields = num_rows + 1, fields or ", ".join(row)
        one = parse_rollout(row, where) if is_recorded(row) else group_of(row, columns, where)
        if one is None:
            num_empty += 1
        else:
            yield one
    if num_empty == num_rows:
        what = f"no response that is known among {fields}" if num_rows else "it has no rows"
        raise TraceError(f"{file}: {what}; {_WANTED}")
    if num_empty:
        logger.warning("%s: %d of %d rows have no response", file, num_empty, num_rows)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place."""
    with file.open("rb") as opened:
        is_parquet = opened.read(4) == b"PAR1"
    if not is_parquet:
        yield from read_objects(file)
        return
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            yield from ((str(file), row) for row in batch.to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a text that is not UTF-8
        raise TraceError(f"{file}: {error}") from error
