"""Files of rollouts, read as `trace.Rollout`s: recordings, verl's dumps, rows of a prompt and its responses.

A file is JSON lines, plain or gzipped, or parquet: its contents say which. A row's fields have four roles:

    role      holds                                                      usual names (all: NAMES)
    prompt    token ids, a text, or a chat                               prompt_ids; prompt, question
    response  token ids, a text, a chat of one message; a list of these  response_ids; response, outputs
    group     anything; without it, rows of one prompt are a group       none
    step      a whole number, also as text (step_3)                      step, global_step

A field that the user names (`--columns`) always counts. Else in verl's dumps the known ones count, whatever
fields a reward function adds, and in other rows those with a usual name, token ids before texts; of several
the row is refused.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.config import UserError
from rollout_spec.predict.doubts import Repeats, padding, prompts_within
from rollout_spec.trace import Rollout, TraceError, is_recorded, parse_rollout, read_objects, token_ids

NAMES = {
    "prompt": (("prompt_token_ids", "prompt_ids"), ("prompt", "input", "question", "problem")),
    "response": (
        ("response_token_ids", "response_ids", "completion_ids", "generated_token_ids"),
        ("response", "responses", "output", "outputs", "completion", "completions"),
    ),
    "group": (),
    "step": (("step", "global_step"),),
}
"""The usual names of the fields of each role; those of token ids come first."""
_VERL = {"prompt": "input", "response": "output", "step": "step"}
_FILES = re.compile(r"\.(jsonl?|ndjson|parquet)(\.gz)?$")
_WANTED = (
    "wanted: a recording, verl's rollout_data_dir or validation_data_dir, or rows with a prompt and its "
    "responses; for fields of other names pass --columns prompt=NAME,response=NAME,group=NAME,step=NAME"
)
_STEP = re.compile(r"(?:global_?)?(?:step)?[ _-]?(\d{1,18})(?:\.0*)?", re.IGNORECASE)
_EMPTY: tuple[Any, ...] = (None, "", [])
_Raw = str | list[int]
_Text = str | npt.NDArray[np.int32]
Columns = Mapping[str, str]  # the field of each role (a key of NAMES), "": no field

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Group:
    """A `trace.Rollout` before its texts are tokens."""

    step: int | None
    group: str  # the prompt's name: the same in every step
    part: str  # tells prompts of the same name in one step apart
    prompt: _Text
    responses: list[_Text]


_Row = Rollout | _Group


def read_rollouts(
    paths: Sequence[Path],
    tokenizer: Path | None = None,
    columns: Columns | None = None,
    limit: int | None = None,
) -> Iterator[Rollout]:
    """Read files, and folders of files, as one: siblings together, several files by steps.

    Args:
        limit: only the first lines, or groups; no file is read beyond the one that has the last of them,
            and no others are held.
        tokenizer: a tokenizer.json, or a folder with one; needed where there are texts.
        columns: the fields of roles that count, whatever else a row has.

    Raises:
        OSError: a file cannot be opened.
        TraceError: a file is damaged or of another form, or does not say which of its fields is the response,
            and is not one of several of a folder; no response has a token, or there is no tokenizer.
        UserError: `columns` names a field that a row does not have.
    """
    files: dict[str, Path] = {}
    for file in itertools.chain.from_iterable(map(_files_of, paths)):
        files.setdefault(os.path.realpath(file), file)  # each once
    found, refused, repeats = _read_all(files.values(), columns or {}, limit)
    _require_rollouts(found, refused, paths)
    left_out = [f"left out: {reason}" for reason in refused]  # a folder may hold other and damaged files too
    for doubt in (*left_out, *repeats.doubts(), *_doubts(found, tokenizer, columns)):
        logger.warning("%s", doubt)
    if len(files) > 1 and all(one.step is not None for one in found):
        found.sort(key=lambda one: one.step or 0)
    return _encoded(found[:limit], tokenizer, paths[0])


def _read_all(
    files: Iterable[Path], columns: Columns, limit: int | None
) -> tuple[list[_Row], list[TraceError], Repeats]:
    """The lines and groups of the files, why other files are none, and what was there twice."""
    found: list[_Row] = []
    groups: dict[tuple[Any, ...], _Group] = {}
    refused, repeats = [], Repeats()
    for file in files:
        if limit is not None and len(found) >= limit:
            break
        try:
            rows = _read(file, columns, None if limit is None else limit - len(found), groups.keys())
        except TraceError as error:
            refused.append(error)
            continue
        for one in rows:
            repeats.note(_key(one), one.responses, file)
            if isinstance(one, _Group) and (known := groups.setdefault(_key(one), one)) is not one:
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
    return (one.step, one.group, one.part if isinstance(one, _Group) else "")


def _doubts(found: Sequence[_Row], tokenizer: Path | None, columns: Columns | None) -> Iterator[str]:
    """What a user must know of the options and the responses."""
    groups = [one for one in found if isinstance(one, _Group)]
    texts = [text for one in groups for text in (one.prompt, *one.responses) if isinstance(text, str)]
    if len(found) > 1 and all(one.step is None for one in found):
        yield f"no row has a step: all {len(found)} prompts count as one rollout (--columns step=NAME)"
    if columns and not groups:
        yield "--columns: has no effect, because recordings have fields of their own"
    if tokenizer and not any(texts):
        yield "--tokenizer: has no effect, because these rollouts are token ids"
    yield from padding([response for one in found for response in one.responses])
    prompts = (one.prompt if isinstance(one, _Group) else one.prompt_token_ids for one in found)
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


def _read(file: Path, columns: Columns, room: int | None, known: Container[tuple[Any, ...]]) -> list[_Row]:
    """The lines and groups of a file: of those that are not `known`, the first `room`, or all."""
    fields, found, num_rows, num_empty, new = "", list[_Row](), 0, 0, set[Any]()
    for where, row in _rows(file):
        num_rows, fields = num_rows + 1, fields or ", ".join(row)
        one = parse_rollout(row, where) if is_recorded(row) else _group(row, columns, where)
        if one is None:
            num_empty += 1
            continue
        key = num_rows if isinstance(one, Rollout) else _key(one)
        if key not in known and key not in new:
            if room is not None and len(new) >= room:
                if isinstance(one, Rollout):  # a line has all of its group; siblings of rows may follow
                    break
                continue
            new.add(key)
        found.append(one)
    if not found:
        what = f"no response that is known among {fields}" if num_rows else "it has no rows"
        raise TraceError(f"{file}: {what}; {_WANTED}")
    if num_empty:
        logger.warning("%s: %d of %d rows have no response", file, num_empty, num_rows)
    return found


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


def _group(row: Mapping[str, Any], columns: Columns, where: str) -> _Group | None:
    """None for a row without a response."""
    is_verls = {*_VERL.values(), "score"} <= row.keys()
    columns = {**_VERL, **columns} if is_verls else columns
    value = _value(row, "response", columns, where)
    if value is None:
        return None
    responses = _responses(value, where)
    prompt, name, step = (_value(row, role, columns, where) for role in ("prompt", "group", "step"))
    prompt = _prompt(prompt)
    if name is None:
        name = hashlib.sha256(repr(prompt or responses).encode(errors="replace")).hexdigest()[:16]
    # verl's uid, prompt_sample_output: prompts of one text may have other images.
    part = str(row["uid"]).rsplit("_", 2)[0] if is_verls and "uid" in row else ""
    texts = [text if isinstance(text, str) else token_ids(text, where) for text in (prompt, *responses)]
    return _Group(_step(step, where), str(name), part, texts[0], texts[1:])


def _value(row: Mapping[str, Any], role: str, columns: Columns, where: str) -> Any:
    """What the field of a role holds; None where there is no such field, or nothing in it."""
    if role in columns:
        name = columns[role]
        if name and name not in row and role != "response":  # not every row has a response
            raise UserError(f"--columns {role}={name}: a row has the fields {', '.join(row)}")
        return None if row.get(name) in _EMPTY else row[name]
    for names in NAMES[role]:
        found = [name for name in names if row.get(name) not in _EMPTY]
        if len(found) > 1:
            fields = f"{', '.join(found[:-1])} or {found[-1]}"
            raise TraceError(f"{where}: the {role} may be in {fields}: --columns {role}=NAME tells in which")
        if found:
            return row[found[0]]
    return None


def _responses(value: Any, where: str) -> list[_Raw]:
    """What a value holds: one response, or a list of n for n samples. Of a chat with one message its text."""
    responses = []
    for one in value if isinstance(value, list) and not (_is_ids(value) or is_chat(value)) else [value]:
        text = one[0].get("content") if is_chat(one) and len(one) == 1 else one
        if not isinstance(text, str) and not _is_ids(text) and text not in _EMPTY:
            what = f"a chat of {len(text)} messages" if is_chat(text) else f"{text!r:.40}"
            raise TraceError(
                f"{where}: the response is {what}, and not what the policy wrote: its text, its token ids, "
                "or a list of these; --columns response=NAME names another field"
            )
        responses.append("" if text is None else text)
    return responses


def _prompt(value: Any) -> _Raw:
    """The text or the token ids of a prompt; a chat as verl decodes it, roles and texts in lines."""
    if is_chat(value):
        return "".join(f"{message.get('role')}\n{message.get('content')}\n" for message in value)
    return value if isinstance(value, str) or _is_ids(value) else ""


def _step(value: Any, where: str) -> int | None:
    """A whole number, also as text: 3, 3.0, "3", "step_3"."""
    if value is None:
        return None
    if type(value) in (int, float) and value % 1 == 0:
        return int(value)
    if isinstance(value, str) and (number := _STEP.fullmatch(value)):
        return int(number[1])
    raise TraceError(f"{where}: the step is {value!r:.40}, no whole number; --columns step= reads no steps")


def is_chat(value: Any) -> bool:
    """Whether it is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _encoded(found: Iterable[_Row], tokenizer: Path | None, where: Path) -> Iterator[Rollout]:
    """All with token ids. `where`: what `_load_tokenizer` calls the texts."""
    load = functools.cache(functools.partial(_load_tokenizer, tokenizer, where))  # for the first text
    for one in found:
        if isinstance(one, Rollout):
            yield one
            continue
        texts = [one.prompt, *one.responses]
        tokens = iter(_encode([text for text in texts if isinstance(text, str)], load))
        prompt, *responses = (next(tokens) if isinstance(text, str) else text for text in texts)
        yield Rollout(one.group, one.step, prompt, responses)


def _encode(texts: list[str], load: Callable[[], Any]) -> list[npt.NDArray[np.int32]]:
    """The token ids of each text. `load`: gives the tokenizer, and is not called where all are empty."""
    if not any(texts):
        return [np.empty(0, np.int32) for _ in texts]
    whole = [text.encode(errors="replace").decode() for text in texts]  # JSON may have lone surrogates
    encoded = load().encode_batch_fast(whole, add_special_tokens=False)
    return [np.array(one.ids, np.int32) for one in encoded]


def _load_tokenizer(path: Path | None, where: Path) -> Any:
    """Of `--tokenizer`, a tokenizer.json or a folder with one.

    Raises TraceError: it is not there or none, or None was named; `where` are the texts.
    """
    if path is None:
        raise TraceError(
            f"{where}: it holds texts, and drafts are made of tokens: --tokenizer DIR names the "
            "policy's Hugging Face folder, as the trainer has it, or the tokenizer.json in it"
        )
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise TraceError(
            f"--tokenizer {file}: no such file or folder here, and a name at a hub is not looked up. "
            "transformers writes the folder: AutoTokenizer.from_pretrained(NAME).save_pretrained(DIR)"
        )
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers has no class of its own
        raise TraceError(f"--tokenizer {file}: no tokenizer.json: {error}") from error
