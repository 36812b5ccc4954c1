"""The demo's rule reward: graded, so that a small model's answers to one prompt differ in score."""

import json
import re
from collections.abc import Iterator
from typing import Any

WEIGHTS = {"correct": 0.4, "close": 0.3, "format": 0.2, "length": 0.1}
# Full marks for the length up to the first bound, none from the second on; in characters.
_LENGTH_BOUNDS = (400, 1200)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ANSWER = re.compile(r"answer\W{0,4}:(.*)", re.IGNORECASE | re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """Score one response, as verl asks through `reward.custom_reward_function`; data_source ends in its kind.

    Returns `score`, the weighted sum, and its four parts, each in [0, 1]; verl logs them all.
    """
    grade = {"number": _number, "list": _list, "json": _json, "records": _records}
    parts = grade[data_source.rsplit("/", 1)[-1]](solution_str, ground_truth)
    low, high = _LENGTH_BOUNDS
    parts["length"] = min(1.0, max(0.0, (high - len(solution_str)) / (high - low)))
    score = sum(WEIGHTS[name] * value for name, value in parts.items())
    return {"score": score, **parts}


def _grades(has_format: float, close: float, is_correct: float) -> dict[str, float]:
    return {"format": float(has_format), "close": float(close), "correct": float(is_correct)}


def _answer_text(text: str) -> tuple[str, bool]:
    """What follows the last 'Answer:', else the whole text; and whether there was one."""
    start = text.lower().rfind("answer")
    match = _ANSWER.match(text, start) if start >= 0 else None
    return (match.group(1), True) if match else (text, False)


def _number(text: str, truth: str) -> dict[str, float]:
    answer, marked = _answer_text(text)
    found = _NUMBER.findall(answer)
    if not found:
        return _grades(0, 0, 0)
    # After 'Answer:' the first number counts, without it the last one of the text.
    value, right = float(found[0] if marked else found[-1]), float(truth)
    close = max(0.0, 1.0 - abs(value - right) / max(1.0, abs(right)))
    return _grades(marked, close, value == right)


def _list(text: str, truth: str) -> dict[str, float]:
    right = [float(x) for x in _NUMBER.findall(truth)]
    answer, marked = _answer_text(text)
    found = [float(x) for x in _NUMBER.findall(answer)]
    if not found:
        return _grades(0, 0, 0)
    hits = sum(a == b for a, b in zip(found, right, strict=False))
    return _grades(marked, hits / max(len(found), len(right)), found == right)


def _json(text: str, truth: str) -> dict[str, float]:
    right = json.loads(truth)
    found = next(_objects(text), None)
    if found is None:
        return _grades(0, 0, 0)
    hits = sum(key in found and _same(found[key], value) for key, value in right.items())
    return _grades(1, hits / len(right), hits == len(right))


def _records(text: str, truth: str) -> dict[str, float]:
    right = [json.loads(line) for line in truth.splitlines()]
    found = list(_objects(text))
    hits = sum(record in found for record in right)
    return _grades(bool(found), hits / len(right), found == right)


def _same(found: Any, right: Any) -> bool:
    return str(found).strip().casefold() == str(right).casefold()


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that stand in the text one after the other."""
    decoder = json.JSONDecoder()
    end = 0
    for brace in re.finditer(r"\{", text):
        if brace.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
