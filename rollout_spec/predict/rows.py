"""A row of a file of rollouts, in whatever form a program writes it, as a prompt with its responses.

Which field holds what is decided in this order:

1. A field that the user names (`--columns`) always counts.
2. A known form is recognised by all of its fields, whatever other fields a row has.
3. Else the fields with the usual names are candidates. Token ids come before texts, and a field that contains
   what all other candidates contain comes before these. If candidates still differ, the row is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rollout_spec.config import UserError
from rollout_spec.trace import TraceError

Text = str | list[int]
Columns = Mapping[str, str]
"""The field of each role (a key of NAMES); a.b is the field b inside a, "" no field."""
T = TypeVar("T")
NAMES = {
    "prompt": (
        *("prompt_token_ids", "prompt_ids", "prompt", "input", "input_prompt", "full_prompt"),
        *("origin_prompt", "question", "problem", "query", "instruction"),
    ),
    "response": (
        *("response_token_ids", "output_token_ids", "response_ids", "completion_ids", "output_ids"),
        *("responses", "response", "outputs", "output", "output_response", "completions", "completion"),
        *("generations", "generation", "generated_text", "samples", "choices"),
        *("code", "predictions", "prediction", "model_output"),
    ),
    "group": ("custom_id", "task_id", "question_id", "problem_id", "doc_id", "id"),
    "step": ("step", "global_step", "global_steps", "training_step"),
}
FORMS: tuple[tuple[set[str], Columns], ...] = (  # all fields of a form, and which of them has which role
    # verl's dumps. A reward function may add fields of any name.
    ({"input", "output", "score", "step"}, {"prompt": "input", "response": "output", "step": "step"}),
    # OpenAI's batch API; vLLM and SGLang write the same.
    ({"custom_id", "response", "error"}, {"response": "response", "group": "custom_id"}),
    # lm-evaluation-harness.
    ({"doc", "arguments", "resps"}, {"prompt": "arguments", "response": "resps"}),
    # LiveCodeBench. code_list is cut out of output_list.
    ({"question_content", "output_list"}, {"prompt": "question_content", "response": "output_list"}),
)
_CHATS = ("messages", "conversations", "conversation", "trajectory", "traj")
_POLICY = ("assistant", "gpt", "model")
_SEVERAL = ("body", "choices", "responses", "outputs", "samples")  # inside a response: it is several
_TEXT = (
    *("token_ids", "output_ids", "message", "content", "value", "text", "response", "full_model_response"),
    *("output", "completion"),
)
_ITEMS = ("message", "reasoning", "function_call")  # of OpenAI's Responses API, what the policy writes
_EMPTY: tuple[Any, ...] = (None, "", [])


@dataclasses.dataclass
class Group:
    """A `trace.Rollout` before its texts are tokens."""

    step: int | None
    name: str  # the prompt's: the same in every step
    part: str  # tells prompts of the same name in one step apart
    prompt: Text
    responses: list[Text]


class _Answer(NamedTuple):
    """What a field holds, if it is the response."""

    responses: list[Text]
    before: Sequence[Mapping[str, Any]] = ()  # of a chat, the messages before the first answer
    messages: Sequence[str] = ()  # of a chat, the text of each answer

    def covers(self, other: _Answer) -> bool:
        own = [*self.responses, *self.messages]
        return all(response in own for response in other.responses if response)


def groups_in(value: Any, columns: Columns, where: str, *, inside: bool = False) -> Iterator[Group]:
    """The row that a value is, or all rows inside it.

    Args:
        where: names the value in errors.
        inside: a prompt. What has no prompt of its own is then no rollout (test cases have `outputs` too).

    Raises:
        TraceError: several fields may hold what is looked for.
        UserError: `columns` names a field that a row does not have.
    """
    if isinstance(value, dict) and _has_failed(value):
        return
    row = {"messages": value} if _is_chat(value) else value
    group = _parse(row, columns, where) if isinstance(row, dict) else None
    if group is not None:
        if not inside or _has_prompt(row):
            yield group
    elif isinstance(value, (dict, list)) and not _is_chat(value):
        inside = inside or (isinstance(value, dict) and _has_prompt(value))
        for inner in value.values() if isinstance(value, dict) else value:
            yield from groups_in(inner, columns, where, inside=inside)


def _has_failed(row: Mapping[str, Any]) -> bool:
    """Whether this is a batch output of a request that failed."""
    answer = row.get("response") or {}
    if "custom_id" not in row or not isinstance(answer, dict):
        return False
    body, status = answer.get("body", {}), answer.get("status_code")
    if row.get("error") or body is None or (isinstance(status, int) and status >= 400):
        return True
    return isinstance(body, dict) and (bool(body.get("error")) or body.get("object") == "error")


def _has_prompt(row: Mapping[str, Any]) -> bool:
    return any(row.get(name) not in _EMPTY for name in (*NAMES["prompt"], *_CHATS))


def _parse(row: Mapping[str, Any], columns: Columns, where: str) -> Group | None:
    """None for a row without a response."""
    form = next((roles for fields, roles in FORMS if fields <= row.keys()), None)
    named = {**dict.fromkeys(NAMES if form else (), ""), **(form or {}), **columns}
    answer = _choose("response", _answers(row, named), _Answer.covers, where)
    if answer is None:
        return None
    is_chat = answer.before and "prompt" not in named
    prompts = [("", _prompt(answer.before))] if is_chat else _prompts(row, named)
    prompt = _choose("prompt", prompts, _contains, where) or ""
    name = hashlib.sha256(repr(prompt or answer.responses).encode(errors="replace")).hexdigest()[:16]
    if named.get("group") or not prompt:
        group = _choose("group", _values(row, "group", named), operator.eq, where)
        name = name if group is None else str(group)
    steps = [(field, _step(value)) for field, value in _values(row, "step", named)]
    step = _choose("step", [each for each in steps if each[1] is not None], operator.eq, where)
    # verl's uid, prompt_sample_output: prompts of one text may have other images.
    part = str(row["uid"]).rsplit("_", 2)[0] if form is FORMS[0][1] and "uid" in row else ""
    return Group(step, name, part, prompt, answer.responses)


def _choose(
    role: str, found: Sequence[tuple[str, T]], covers: Callable[[T, T], bool], where: str
) -> T | None:
    """Of fields and their values the first value that covers all others; None if there are none."""
    for _, value in found:
        if all(covers(value, other) for _, other in found):
            return value
    if not found:
        return None
    *most, last = (field for field, _ in found)
    raise TraceError(
        f"{where}: the {role} may be in {', '.join(most)} or {last}, which differ: "
        f"--columns {role}=NAME tells in which"
    )


def _values(row: Mapping[str, Any], role: str, named: Columns) -> list[tuple[str, Any]]:
    """The fields that may have a role, with their values: the named one, or all with a usual name."""
    if role not in named:
        return [(name, row[name]) for name in NAMES[role] if row.get(name) not in _EMPTY]
    value: Any = row if named[role] else {"": None}
    for part in named[role].split("."):
        if not isinstance(value, dict) or part not in value:
            if role == "response":
                return []
            raise UserError(f"--columns {role}={named[role]}: a row has the fields {', '.join(row)}")
        value = value[part]
    return [(named[role], value)] if value not in _EMPTY else []


def _answers(row: Mapping[str, Any], named: Columns) -> list[tuple[str, _Answer]]:
    fields = _values(row, "response", named)
    found = [(field, answer) for field, value in fields if (answer := _answer(field, value))]
    if "response" not in named:
        chats = [(name, chat) for name in _CHATS if (chat := _answer(name, row.get(name)))]
        # One that goes on behind its last answer is a prompt with examples, if there is a response beside it.
        found = [one for one in chats if not found or _role(row[one[0]][-1]) in _POLICY] + found
    return [one for one in found if all(map(_is_ids, one[1].responses))] or found


def _answer(field: str, value: Any) -> _Answer | None:
    if _is_chat(value) and (field in _CHATS or any(_role(message) not in _POLICY for message in value)):
        answers = [message for message in value if _role(message) in _POLICY]
        before = list(itertools.takewhile(lambda message: _role(message) not in _POLICY, value))
        texts = [str(_text(part)) for each in answers for part in (each, each.get("content"))]
        return _Answer([_said(answers)], before, texts) if answers else None
    if isinstance(value, list) and any(isinstance(one, dict) and _has_prompt(one) for one in value):
        return None  # rows of their own
    responses = _responses(value)
    return _Answer(responses) if responses else None


def _prompts(row: Mapping[str, Any], named: Columns) -> list[tuple[str, Text]]:
    found = [(field, _prompt(value)) for field, value in _values(row, "prompt", named)]
    found = [one for one in found if one[1]]
    if not found and "prompt" not in named:
        found = [(name, _prompt(_before(row[name]))) for name in _CHATS if _is_chat(row.get(name))]
    return [one for one in found if not isinstance(one[1], str)] or found


def _before(chat: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages before the first answer; all, if the last message is none."""
    if _role(chat[-1]) not in _POLICY:
        return chat
    return list(itertools.takewhile(lambda message: _role(message) not in _POLICY, chat))


def _contains(whole: Text, part: Text) -> bool:
    if isinstance(part, str) and isinstance(whole, str):
        return part.strip() in whole
    return part == whole


def _responses(value: Any) -> list[Text]:
    """All that a value holds: n for n samples."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, dict) and _is_output(value.get("output")):
        return _responses(value["output"])
    if isinstance(value, dict):
        several = next((value[name] for name in _SEVERAL if value.get(name)), None)
        if several is not None:
            return _responses(several)
        return [_text(value)] if _role(value) or any(name in value for name in _TEXT) else []
    if _is_output(value):
        text = _said(value)
        return [text] if text else []
    if _is_chat(value) and any(_role(message) not in _POLICY for message in value):
        return [_said(value)]
    return [text for one in value for text in _responses(one)] if isinstance(value, list) else []


def _prompt(value: Any) -> Text:
    """The text or the token ids of a prompt; a chat as verl decodes it, roles and texts in lines."""
    if _is_chat(value):
        return "".join(f"{_role(message)}\n{_text(message)}\n" for message in value)
    while value and isinstance(value, (list, dict)) and not _is_ids(value):
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
    return value if isinstance(value, str) or _is_ids(value) else ""


def _text(value: Any) -> Text:
    if isinstance(value, dict) and value.get("type") == "function_call":
        return _call(value)
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
    """What the policy wrote. What tools and users answered is left out: no engine decodes it."""
    own = (each for each in messages if (_role(each) or "assistant") in _POLICY)
    texts = (_text(each) for each in own if _role(each) or each.get("type") in _ITEMS)
    return "\n".join(str(text) for text in texts if text)


def _calls(value: Any) -> list[str]:
    calls = value if isinstance(value, list) else [value]
    return [call if isinstance(call, str) else _call(call) for call in calls if isinstance(call, (dict, str))]


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": "{function.get("name")}", "arguments": {arguments}}}'


def _step(value: Any) -> int | None:
    """None for what is no number, nor the digits of one."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        return int(value)
    return int(value) if isinstance(value, (int, float)) and value == value else None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and _role(m) for m in value)


def _is_output(value: Any) -> bool:
    """Whether it is the output of OpenAI's Responses API: items of one response."""
    return (
        isinstance(value, list)
        and all(isinstance(item, dict) and isinstance(item.get("type"), str) for item in value)
        and any(item["type"] in _ITEMS for item in value)
    )


def _role(message: Mapping[str, Any]) -> str:
    return str(message.get("role") or message.get("from") or "")
