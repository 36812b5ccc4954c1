"""What speaks against rollouts: rows that are there twice, and padding."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LONG = 16  # tokens or characters: what is shorter is the same by chance
_Text = str | npt.NDArray[np.int32]


class Repeats:
    """What is there twice: a prompt's step in the folders of two runs, or the same rows."""

    def __init__(self) -> None:
        self._files: dict[tuple[Any, ...], Path] = {}  # by step and prompt
        self._rows: dict[int, Path] = {}
        self._num_rows = self._num_again = 0
        self._runs = self._again = ""

    def note(self, key: tuple[Any, ...], responses: Sequence[_Text], file: Path) -> None:
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


def padding(responses: Sequence[npt.NDArray[np.int32]]) -> Iterator[str]:
    """Says it where most responses end in a run of one token."""
    full = [one for one in responses if len(one)]
    ends = Counter(int(one[-1]) for one in full if len(one) > LONG and (one[-LONG:] == one[-1]).all())
    for token, num in ends.most_common(1):
        if 2 * num > len(full):
            yield (
                f"{num} of {len(full)} responses end in a run of token {token}: if that is padding, remove "
                "it, because it counts and is easy to draft"
            )
