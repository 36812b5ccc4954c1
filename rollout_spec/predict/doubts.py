"""What speaks against rollouts: rows that are there twice, padding, responses with their prompt or known."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec.drafting.corpus import read_corpus
from rollout_spec.predict.row_fields import Text
from rollout_spec.trace import Rollout

LONG = 16  # tokens or characters: what is shorter is the same by chance
REMOVE = "remove it, because it counts and is easy to draft"

logger = logging.getLogger(__name__)


class Repeats:
    """What is there twice: a prompt's step in the folders of two runs, or the same rows."""

    def __init__(self) -> None:
        self._files: dict[tuple[Any, ...], Path] = {}  # by step and prompt
        self._rows: dict[int, Path] = {}
        self._num_rows = self._num_again = 0
        self._runs = self._again = ""

    def note(self, key: tuple[Any, ...], responses: Sequence[Text], file: Path) -> None:
        """A row. Its key begins with its step, and then names its prompt."""
        other = self._files.setdefault(key, file)
        if other.parent != file.parent and key[0] is not None:
            self._runs = f"step {key[0]} of a prompt is in {other} and in {file}"
        self._num_rows += 1
        if max(map(len, responses), default=0) < LONG:
            return
        row = hash((*key, *(text if isinstance(text, str) else text.tobytes() for text in responses)))
        if row in self._rows:
            self._num_again += 1
            self._again = f"the first time in {self._rows[row]}, then in {file}"
        self._rows.setdefault(row, file)

    def doubts(self) -> Iterator[str]:
        if self._runs:
            yield f"{self._runs}: the runs count as one, and draft from each other's responses"
        elif self._num_again and 10 * self._num_again >= self._num_rows:  # fewer may be alike by chance
            yield f"{self._num_again} of {self._num_rows} rows are there again, {self._again}: each counts"


def padding(responses: Sequence[Text]) -> Iterator[str]:
    """Says it where most responses end in a run of one token, or of one piece of text."""
    full = [one for one in responses if len(one)]
    ends = Counter(end for end in map(_run_at_end, full) if end)
    for end, num in ends.most_common(1):
        if 2 * num > len(full):
            yield f"{num} of {len(full)} responses end in a run of {end}: if that is padding, {REMOVE}"


def _run_at_end(text: Text) -> str | None:
    if isinstance(text, str):
        pieces = (text[-size:] for size in range(1, 41))
        return next((repr(piece) for piece in pieces if text.endswith(piece * LONG)), None)
    is_run = len(text) > LONG and bool((text[-LONG:] == text[-1]).all())
    return f"token {text[-1]}" if is_run else None


def prompts_within(lines: Iterable[tuple[Text, Sequence[Text]]]) -> Iterator[str]:
    """Says it where most responses begin with their prompt; a line is a prompt and its responses."""
    num = num_within = 0
    for prompt, responses in lines:
        for response in responses if len(prompt) >= LONG else ():
            begin = response[: len(prompt)]
            num += 1
            num_within += begin == prompt if isinstance(begin, str) else np.array_equal(begin, prompt)
    if 2 * num_within > num:
        yield f"{num_within} of {num} responses begin with their prompt: {REMOVE}"


def warn_of_same_texts(lines: Iterable[Rollout], corpus: str) -> None:
    """Say it where the corpus holds these responses: a training's next responses are new."""
    held = {text.tobytes() for text in read_corpus(corpus)}
    texts = [text.tobytes() for line in lines for text in line.responses if len(text) >= LONG]
    num_held = sum(text in held for text in texts)
    if 10 * num_held > len(texts):  # a few are the same by chance
        logger.warning(
            "%s holds %d of %d responses of %d tokens or more word for word, so the figures promise "
            "too much: build it from other responses", corpus, num_held, len(texts), LONG,
        )  # fmt: skip
