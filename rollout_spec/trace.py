"""Recorded rollouts: JSON lines, each a prompt with its responses. No other module knows the format."""

import dataclasses
import gzip
import json
import logging
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollout_spec.config import UserError

DIR_VARIABLE = "ROLLOUT_SPEC_TRACE_DIR"  # names the folder where a run records its rollouts
FOLDER = "rollouts"  # the folder's name inside a run's own
_GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE_BYTES = 1 << 28  # a longer one may be a whole file, which takes several times its size in memory

_ARRAY = ". This is an array: `jq -c '.[]' FILE` writes each of its objects into a line"
_HINTS = {  # by a line that is not JSON by itself
    b"{": ". This object has several lines: `jq -c . FILE` writes each object into one",
    b"[": _ARRAY,
}

logger = logging.getLogger(__name__)


class TraceError(UserError):
    """A trace cannot be read; the message names file, line and field."""


class ResponseDrafts(NamedTuple):
    """A model's drafts in a response of n tokens. Row i follows the prompt and i tokens of the response."""

    tokens: npt.NDArray[np.int32]  # [n, m]; negative: nothing from there on
    log_odds: npt.NDArray[np.float32]  # [n, m], of each token by the model itself


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One line of a trace: the responses to one prompt, token ids as int32 vectors."""

    group: str
    step: int | None  # the training step; None where there is none
    prompt_token_ids: npt.NDArray[np.int32]
    responses: list[npt.NDArray[np.int32]]
    names: Sequence[Any] = ()  # for each response that of its first call, or None; empty if there are none
    model_drafts: Sequence[ResponseDrafts] = ()  # one for each response, simulated; empty if no model drafts
    # Of an agent's samples: in each response, which then has what its tools said too, where the policy's
    # turns begin and end, [num_turns, 2]. Empty: each response is one turn.
    turns: Sequence[npt.NDArray[np.int32]] = ()

    def turns_of(self, number: int) -> list[list[int]]:
        """Where the turns of a response begin and end."""
        return self.turns[number].tolist() if self.turns else [[0, len(self.responses[number])]]

    @property
    def num_generated(self) -> list[int]:
        """Tokens of each response that the policy wrote."""
        turns = map(self.turns_of, range(len(self.responses)))
        return [sum(end - begin for begin, end in of_one) for of_one in turns]


def trace_file(folder: Path, number: int) -> Path:
    """The file of a replica, or of a repeat."""
    return folder / f"rollouts-{number}.jsonl"


def to_line(
    group: str,
    step: int | None,
    prompt_token_ids: Sequence[int],
    responses: Sequence[Sequence[int]] = (),
    names: Sequence[Any] = (),
    samples: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]] = (),
) -> str:
    """A line with its end. The arguments are `Rollout`'s; in the place of responses there may be samples with
    turns: of each turn what tools or a user said, and what the policy wrote."""
    rest = {
        "responses": responses,
        "samples": [[{"input": before, "output": wrote} for before, wrote in turns] for turns in samples],
        "names": names,
    }
    line = {"group": group, "step": step, "prompt_token_ids": prompt_token_ids}
    return json.dumps(line | {name: value for name, value in rest.items() if value}) + "\n"


def append_lines(file: Path, lines: Iterable[str]) -> None:
    """Append what `to_line` made. First remove a last line that is cut, as a killed run leaves it.

    Raises OSError: the file cannot be written, or the disk is full.
    """
    with file.open("ab+") as out:
        if out.tell():  # there is nothing to map of an empty file
            with mmap.mmap(out.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            out.truncate(end)
        out.writelines(line.encode() for line in lines)


def read_trace(path: str | Path) -> Iterator[Rollout]:
    """Read a `.jsonl` or `.jsonl.gz` trace. Raises as `read_objects`, and where a line is none of a trace."""
    return (parse_rollout(fields, where) for where, fields in read_objects(path))


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in JSON lines, plain or gzipped, each with its place; empty lines are skipped.

    What is cut off at the end, as a killed run leaves it, is skipped with a warning in the log.

    Raises:
        OSError: the file cannot be opened.
        TraceError: a line is not JSON, no object, or longer than MAX_LINE_BYTES.
    """
    number = 0
    try:
        with open(path, "rb") as raw:
            is_compressed = raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
            read = (gzip.GzipFile(fileobj=raw) if is_compressed else raw).readline
            for number, line in enumerate(iter(lambda: read(MAX_LINE_BYTES + 1), b""), start=1):
                where = f"{path}:{number}"
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{where}: a line must have at most {MAX_LINE_BYTES >> 20} MiB")
                if line.strip() and (fields := _parse_json(line, where)) is not None:
                    yield where, fields
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        if number == 0 or not isinstance(error, EOFError):
            raise TraceError(f"{path}:{number + 1}: {error}") from error
        logger.warning("%s:%d: the rest of the file is cut off, it is left out", path, number + 1)


def _parse_json(line: bytes, where: str) -> dict[str, Any] | None:
    """None for a line that is cut."""
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if line.endswith(b"\n") or isinstance(error, RecursionError):
            raise TraceError(f"{where}: not JSON: {error}{_HINTS.get(line.strip(), '')}") from error
        logger.warning("%s: the last line is cut off, it is left out", where)
        return None
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: must be a JSON object{_ARRAY if isinstance(fields, list) else ''}")
    return fields


def is_recorded(fields: Mapping[str, Any]) -> bool:
    """Whether these are the fields of a trace's line."""
    return {"group", "prompt_token_ids"} <= fields.keys() and not {"responses", "samples"}.isdisjoint(fields)


def parse_rollout(fields: Mapping[str, Any], where: str) -> Rollout:
    """A line of a trace; a TraceError, which begins with `where`, if it is none."""
    turns = None
    if "samples" in fields:
        turns = _samples(fields["samples"], where)
        fields = {**fields, "responses": [[token for part in parts for token in part] for parts in turns]}
    for name in ("group", "prompt_token_ids", "responses"):
        if name not in fields:
            raise TraceError(f"{where}: {name}: is missing")
    group, step, responses = fields["group"], fields.get("step"), fields["responses"]
    names = fields.get("names", [])
    if not isinstance(group, str):
        raise TraceError(f"{where}: group: must be a string")
    if step is not None and type(step) is not int:
        raise TraceError(f"{where}: step: must be an integer or null")
    if not isinstance(responses, list) or not responses:
        raise TraceError(f"{where}: responses: must be a list of at least one response")
    if not isinstance(names, list) or (names and len(names) != len(responses)):
        raise TraceError(f"{where}: names: must be a list, with a name for each response")
    return Rollout(
        group=group,
        step=step,
        prompt_token_ids=token_ids(fields["prompt_token_ids"], f"{where}: prompt_token_ids"),
        responses=[token_ids(tokens, f"{where}: responses[{i}]") for i, tokens in enumerate(responses)],
        names=names,
        turns=[np.cumsum(list(map(len, parts)), dtype=np.int32).reshape(-1, 2) for parts in turns or ()],
    )


def _samples(value: Any, where: str) -> list[list[list[int]]]:
    """Of each sample its turns' parts in their order: input, output, input, ..."""
    form = f"{where}: samples: must be a list of samples, each a list of turns with input and output"
    if not isinstance(value, list):
        raise TraceError(form)
    try:
        found = [[turn[part] for turn in turns for part in ("input", "output")] for turns in value]
    except (TypeError, KeyError) as error:
        raise TraceError(f"{form}: {error!r}") from error
    if not all(found) or not all(isinstance(part, list) for parts in found for part in parts):
        raise TraceError(form)
    return found


def token_ids(value: Any, where: str) -> npt.NDArray[np.int32]:
    """A list of token ids, [n]; a TraceError, which begins with `where`, if it is none."""
    if not isinstance(value, list):
        raise TraceError(f"{where}: must be a list of token ids")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 2**31:
            raise TraceError(f"{where}[{i}]: {token!r} is not a token id")
    return np.array(value, np.int32)


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
