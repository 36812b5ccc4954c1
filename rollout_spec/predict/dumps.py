"""Rollouts as people have them on disk, read as `trace.Rollout`s: what a file is, its contents say.

A file is JSON lines, one JSON document or parquet. In it are prompts with their responses, single responses
or chats: the names of fields say which. Texts become tokens by the policy's tokenizer.
"""

from __future__ import annotations

import bz2
import codecs
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import logging
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rollout_spec.config import UserError
from rollout_spec.trace import Rollout, TraceError, parse_json, read_lines, token_ids

Text = str | list[int]
Columns = Mapping[str, str]
"""By the keys of NAMES the name of a field that has none of those; a.b is b in a, "" no field."""
NAMES = {  # the first that has a value counts
    "prompt": (
        *("prompt_token_ids", "prompt_ids", "prompt", "input", "input_prompt", "full_prompt"),
        *("origin_prompt", "question", "question_content", "problem", "query", "instruction", "arguments"),
    ),
    "response": (
        *("response_token_ids", "output_token_ids", "response_ids", "completion_ids", "output_ids"),
        *("responses", "response", "outputs", "output", "output_response", "completions", "completion"),
        *("generations", "generation", "generated_text", "samples", "choices", "resps", "output_list"),
        *("code_list", "code", "predictions", "prediction", "model_output"),
    ),
    "group": ("custom_id", "task_id", "question_id", "problem_id", "doc_id", "id"),
    "step": ("step", "global_step", "global_steps", "training_step"),
}
_CHATS = ("messages", "conversations", "conversation", "trajectory", "traj")
_POLICY = ("assistant", "gpt", "model")
_SEVERAL = ("body", "choices", "responses", "outputs", "samples")  # a response that has them is n
_TEXT = (
    *("token_ids", "message", "content", "value", "text", "response", "full_model_response", "output"),
    "completion",
)
_FILES = re.compile(r"\.(jsonl?|ndjson|parquet)(\.(gz|bz2|xz|zst))?$")
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)  # what decompressors raise
_MAGIC: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zX": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda opened: _zstd(opened),
}
_WANTED = (
    "wanted: a recording, verl's rollout_data_dir or validation_data_dir, or rows with a prompt and its "
    "responses, or one response, or a chat; --columns prompt=NAME,response=NAME,group=NAME,step=NAME tells "
    "other names"
)

logger = logging.getLogger(__name__)


class NoRolloutsError(TraceError):
    """A file of another form; the message says what was found and what is wanted."""


@dataclasses.dataclass
class _Group:
    """A `Rollout` before its texts are tokens."""

    step: int | None
    name: str
    """The prompt's, which comes back in other steps."""
    part: str
    """Which of the prompts of that name in its step."""
    prompt: Text
    responses: list[Text]


def read_rollouts(
    paths: Sequence[Path], tokenizer: Path | None = None, columns: Columns | None = None
) -> Iterator[Rollout]:
    """Read files, and folders of files, as one: siblings together, several files by steps.

    Args:
        tokenizer: a tokenizer.json, or a folder with one; needed where there are texts.

    Raises:
        OSError: a file cannot be opened.
        TraceError: a file is damaged or of another form, and not one of several of a folder; no response has
            a token, or there is no tokenizer.
        UserError: `columns` names a field that a row does not have.
    """
    files = [file for path in paths for file in _files(path)]
    found: list[Rollout | _Group] = []
    groups: dict[tuple[Any, ...], _Group] = {}
    refused = []
    for file in files:
        try:
            rows = list(_read(file, columns or {}))  # of a damaged file none
        except TraceError as error:
            refused.append(error)
            continue
        for one in rows:
            if isinstance(one, _Group):
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


def _read(file: Path, columns: Columns) -> Iterator[Rollout | _Group]:
    first, num_rows, num_read = None, 0, 0
    for where, row in _rows(file):
        if isinstance(row, Rollout):
            yield row
            num_read += 1
            continue
        first = row if first is None else first
        try:
            groups = list(_groups(row, columns))
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
            yield from _json(_until_cut(opener(opened), file) if opener else opened, file)
        except _DAMAGED as error:
            raise TraceError(f"{file}: {error}") from error


def _until_cut(lines: Iterable[bytes], file: Path) -> Iterator[bytes]:
    """The lines of a compressed file; where that ends too early, those before, if there are any."""
    is_empty = True
    try:
        for line in lines:
            yield line
            is_empty = False
    except EOFError as error:
        if is_empty:
            raise
        logger.warning("%s: %s: what follows is left out", file, error)


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

    return io.BytesIO(pyarrow.CompressedInputStream(opened, "zstd").read())


def _json(opened: Iterable[bytes], file: Path) -> Iterator[tuple[str, Any]]:
    """The values of JSON lines, a recording's as `Rollout`s, or a document of several lines."""
    opened = iter(opened)
    first = next((line for line in opened if line.strip()), b"").removeprefix(codecs.BOM_UTF8)
    lines = itertools.chain([first], opened)
    try:
        row = json.loads(first.decode())
    except json.JSONDecodeError:
        if text := b"".join(lines).strip():
            yield str(file), _document(text, file)
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


def _document(text: bytes, file: Path) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, text, file) from error


def _unreadable(error: Exception, text: bytes, file: Path) -> TraceError:
    """The error of a text that begins as JSON does, with its line where that is known."""
    if text[:1] not in (b"[", b"{"):
        return NoRolloutsError(
            f"{file}: it begins with {text[:20]!r}, which is neither JSON nor parquet; {_WANTED}"
        )
    where = str(file) if b"\n" in text else f"{file}:1"
    if isinstance(error, json.JSONDecodeError):
        where = f"{file}:{error.lineno}"
    if isinstance(error, UnicodeDecodeError):
        line = text.count(b"\n", 0, error.start) + 1
        where = f"{file}:{line}"
    return TraceError(f"{where}: not JSON: {error}")


def _groups(value: Any, columns: Columns) -> Iterator[_Group]:
    """Of a row, or of all rows in a value."""
    if isinstance(value, dict) and _is_refused(value):
        return
    row = {"messages": value} if _is_chat(value) else value
    group = _parse(row, columns) if isinstance(row, dict) else None
    if group is not None:
        yield group
    elif isinstance(value, (dict, list)) and not _is_chat(value):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _groups(inner, columns)


def _is_refused(row: Mapping[str, Any]) -> bool:
    """Whether a row of batch outputs is of a request that failed."""
    answer = row.get("response") or {}
    if "custom_id" not in row or not isinstance(answer, dict):
        return False
    body, status = answer.get("body", {}), answer.get("status_code")
    if row.get("error") or body is None or (isinstance(status, int) and status >= 400):
        return True
    return isinstance(body, dict) and (bool(body.get("error")) or body.get("object") == "error")


def _parse(row: Mapping[str, Any], columns: Columns) -> _Group | None:
    """None for a row without a response."""
    responses = _responses(_value(row, "response", columns))
    chat: list[Any] = next((row[name] for name in _CHATS if _is_chat(row.get(name))), [])
    begin = next((i for i, message in enumerate(chat) if _role(message) in _POLICY), len(chat))
    if begin < len(chat) and (not responses or _role(chat[-1]) in _POLICY):
        prompt, responses = _prompt(chat[:begin]), [_said(chat[begin:])]
    elif responses:
        prompt = _prompt(_value(row, "prompt", columns) or chat)
    else:
        return None
    name = hashlib.sha256(repr(prompt or responses).encode(errors="replace")).hexdigest()[:16]
    if "group" in columns or not prompt:
        group = _value(row, "group", columns)
        name = name if group in (None, "", []) else str(group)
    # verl's uid, prompt_sample_output: prompts of one text may have other images.
    part = str(row["uid"]).rsplit("_", 2)[0] if "uid" in row and "input" in row else ""
    step = _step(_value(row, "step", columns))
    return _Group(step, name, part, prompt, responses)


def _step(value: Any) -> int | None:
    """None for what is no number, nor the digits of one."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        return int(value)
    return int(value) if isinstance(value, (int, float)) and value == value else None


def _value(row: Mapping[str, Any], role: str, columns: Columns) -> Any:
    if role not in columns:
        return next((row[name] for name in NAMES[role] if row.get(name) not in (None, "", [])), None)
    value: Any = row if columns[role] else {"": None}
    for part in columns[role].split("."):
        if not isinstance(value, dict) or part not in value:
            if role == "response":
                return None
            raise UserError(f"--columns {role}={columns[role]}: a row has the fields {', '.join(row)}")
        value = value[part]
    return value


def _responses(value: Any) -> list[Text]:
    """All that a value holds: of n samples n."""
    if isinstance(value, dict):
        several = next((value[name] for name in _SEVERAL if value.get(name)), None)
        return [_text(value)] if several is None else _responses(several)
    if _is_chat(value) and any(_role(message) not in _POLICY for message in value):
        return [_said(value)]
    if isinstance(value, str) or _is_ids(value):
        return [value]
    return [text for one in value for text in _responses(one)] if isinstance(value, list) else []


def _prompt(value: Any) -> Text:
    """A chat as verl decodes it: roles and texts by lines."""
    if _is_chat(value):
        return "".join(f"{_role(message)}\n{_text(message)}\n" for message in value)
    while value and isinstance(value, (list, dict)) and not _is_ids(value):
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
    return value if isinstance(value, str) or _is_ids(value) else ""


def _text(value: Any) -> Text:
    if isinstance(value, dict) and _role(value):
        thought = value.get("reasoning_content") or value.get("reasoning")
        parts = [thought, value.get("content", value.get("value")), *_calls(value.get("tool_calls"))]
        return "\n".join(str(text) for text in map(_text, parts) if text)
    if isinstance(value, dict):
        return _text(next((value[name] for name in _TEXT if value.get(name) is not None), None))
    if isinstance(value, list) and not _is_ids(value):
        return "".join(str(text) for text in map(_text, value))
    return value if isinstance(value, str) or _is_ids(value) else ""


def _said(messages: Iterable[Mapping[str, Any]]) -> str:
    """What the policy wrote; what tools and users answered is left out, no engine decodes it."""
    return "\n".join(str(_text(message)) for message in messages if _role(message) in _POLICY)


def _calls(value: Any) -> list[str]:
    calls = value if isinstance(value, list) else [value]
    return [call if isinstance(call, str) else _call(call) for call in calls if isinstance(call, (dict, str))]


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": "{function.get("name")}", "arguments": {arguments}}}'


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and _role(m) for m in value)


def _role(message: Mapping[str, Any]) -> str:
    return str(message.get("role") or message.get("from") or "")


class _Encoder:
    """Makes `Rollout`s; reads the tokenizer when the first text comes. `where`: what holds the texts."""

    def __init__(self, tokenizer: Path | None, where: Path) -> None:
        self._path, self._where = tokenizer, where
        self._tokenizer: Any = None

    def rollout(self, group: _Group) -> Rollout:
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
