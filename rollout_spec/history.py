"""What was said to a prompt in earlier training steps: the last responses of every prompt, as tokens.

Four bytes a token are all that it costs to keep them; a group that is opened again indexes its own.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np

from rollout_spec.index import Int32Array, SuffixIndex

_MAGIC = b"rollout_spec history 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_KEY_BYTES = 16
_OVERHEAD_BYTES = 200  # of a response and of a prompt, beyond the tokens


class HistoryError(ValueError):
    """A file that is damaged or not a history; the message names it."""


class History:
    """The last responses to every prompt.

    Args:
        num_responses: kept per prompt, the latest.
        max_bytes: of everything; beyond it the prompts that were met longest ago are dropped whole.
    """

    def __init__(self, num_responses: int, max_bytes: int) -> None:
        self._num_responses = num_responses
        self._max_bytes = max_bytes
        self._responses: OrderedDict[bytes, deque[Int32Array]] = OrderedDict()
        self.num_bytes = 0
        self._opened: Path | None = None

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._responses)

    def add(self, prompt_key: bytes, response: Int32Array) -> None:
        """Keep a response (int32 [n]) as the latest of its prompt."""
        if len(response) == 0:
            return
        if prompt_key not in self._responses:
            self._responses[prompt_key] = deque()
            self.num_bytes += _OVERHEAD_BYTES
        self._responses.move_to_end(prompt_key)
        responses = self._responses[prompt_key]
        responses.append(response)
        self.num_bytes += response.nbytes + _OVERHEAD_BYTES
        if len(responses) > self._num_responses:
            self.num_bytes -= responses.popleft().nbytes + _OVERHEAD_BYTES
        while self.num_bytes > self._max_bytes:
            _, dropped = self._responses.popitem(last=False)
            self.num_bytes -= _OVERHEAD_BYTES + sum(tokens.nbytes + _OVERHEAD_BYTES for tokens in dropped)

    def get(self, prompt_key: bytes) -> Sequence[Int32Array]:
        """The responses to a prompt, the earliest first."""
        return self._responses.get(prompt_key, ())

    def follow(self, path: str | Path) -> None:
        """Load the file, if there is one, at the first call; save to it at every later one.

        A file that was refused is never written to.

        Raises:
            OSError, HistoryError: the history in memory is as it was.
        """
        path = Path(path)
        if self._opened == path:
            self.save(path)
            return
        if path.exists():
            self.load(path)
        self._opened = path

    def save(self, path: str | Path) -> None:
        """Write a file with a version and a checksum; an older one is replaced in one move."""
        keys = [key for key, responses in self._responses.items() for _ in responses]
        texts = [tokens for responses in self._responses.values() for tokens in responses]
        buffer = io.BytesIO()
        np.savez(
            buffer,
            keys=np.frombuffer(b"".join(keys), np.uint8).reshape(-1, _KEY_BYTES),
            lengths=np.array([len(tokens) for tokens in texts], np.int64),
            tokens=np.concatenate([np.empty(0, np.int32), *texts]),
        )
        content = buffer.getvalue()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(_MAGIC + hashlib.sha256(content).digest() + content)
        partial.replace(path)

    def load(self, path: str | Path) -> None:
        """Add what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            HistoryError: it is not one of ours, of another version, or damaged; nothing was added.
        """
        content = Path(path).read_bytes()
        if not content.startswith(_MAGIC):
            raise HistoryError(f"{path}: not a history of this version")
        digest = content[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]
        content = content[len(_MAGIC) + _DIGEST_BYTES :]
        if hashlib.sha256(content).digest() != digest:
            raise HistoryError(f"{path}: damaged, its checksum does not match")
        with np.load(io.BytesIO(content)) as arrays:
            ends = np.cumsum(arrays["lengths"])
            texts = np.split(arrays["tokens"], ends[:-1])
            for key, tokens in zip(arrays["keys"], texts, strict=False):
                self.add(key.tobytes(), tokens.copy())


def prompt_key(prompt_token_ids: Int32Array) -> bytes:
    return hashlib.blake2b(b"prompt" + prompt_token_ids.tobytes(), digest_size=_KEY_BYTES).digest()


def group_key(group: Hashable) -> bytes:
    return hashlib.blake2b(f"group{type(group).__name__}{group}".encode(), digest_size=_KEY_BYTES).digest()


def index_responses(
    index: SuffixIndex, group: int, num_prompt_tokens: int, responses: Sequence[Int32Array]
) -> None:
    """Index responses of earlier steps in a group that was just opened.

    Raises:
        BudgetExceeded, OutOfMemory: nothing of them was indexed.
    """
    if not responses:
        return
    n = len(responses)
    levels = np.array([num_prompt_tokens + len(tokens) for tokens in responses], np.int32)
    # The index does not read the tokens of the prompt again.
    matrix = np.zeros((n, int(levels.max())), np.int32)
    for row, tokens in zip(matrix, responses, strict=True):
        row[num_prompt_tokens : num_prompt_tokens + len(tokens)] = tokens
    sequences = np.array([index.open_sequence(group) for _ in range(n)], np.int32)
    try:
        index.step(sequences, matrix, np.arange(n, dtype=np.int32), levels, np.zeros(n, np.int32))
    finally:
        for sequence in sequences:
            index.close_sequence(int(sequence))
