"""What a row of rollouts says: its prompt, its responses, its group and its step.

A row's fields have four roles:

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
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.config import UserError
from rollout_spec.trace import TraceError, token_ids

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
_STEP = re.compile(r"(?:global_?)?(?:step)?[ _-]?(\d{1,18})(?:\.0*)?", re.IGNORECASE)
_EMPTY: tuple[Any, ...] = (None, "", [])
_Raw = str | list[int]
Text = str | npt.NDArray[np.int32]
Columns = Mapping[str, str]  # the field of each role (a key of NAMES), "": no field


@dataclasses.dataclass
class RowGroup:
    """A `trace.Rollout` before its texts are tokens."""

    step: int | None
    group: str  # the prompt's name: the same in every step
    part: str  # tells prompts of the same name in one step apart
    prompt: Text
    responses: list[Text]


def group_of(row: Mapping[str, Any], columns: Columns, where: str) -> RowGroup | None:
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
    return RowGroup(_step(step, where), str(name), part, texts[0], texts[1:])


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
