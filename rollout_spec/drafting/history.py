"""The responses of earlier training steps: the last ones to every prompt, as tokens.

Four bytes a token are all that it costs to keep them; a group that is opened again indexes its own.
"""

import hashlib
import io
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rollout_spec.drafting.native import Int32Array

_MAGIC = b"rollout_spec history 4\n"
_LENGTH_BYTES = 8  # that say how long a piece's content is
_PIECE_BYTES = 1 << 20  # about, of a piece's texts; a longer text is a piece of its own
_DIGEST_BYTES = hashlib.sha256().digest_size
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES + _LENGTH_BYTES
_KEY_BYTES = 16
_OVERHEAD_BYTES = 200  # that a response and a prompt take beyond their tokens


class HistoryError(ValueError):
    """A file that is damaged or not a history; the message names it."""


class Responses:
    """The last responses to every prompt, int32 [n] each, within a budget.

    Args:
        num_responses: kept per prompt, the latest.
        max_bytes: of everything; beyond it the prompts that have most responses lose their earliest, in turn,
            so that as many prompts as possible keep one. No call drops more than it takes the place of.
    """

    def __init__(self, num_responses: int, max_bytes: int) -> None:
        self.num_responses = num_responses
        self._max_bytes = max_bytes
        # The prompt that was met longest ago first.
        self._responses: OrderedDict[bytes, deque[Int32Array]] = OrderedDict()
        # By number of responses, the prompts that have that many; first the one that has had it longest.
        self._prompts_with: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self.num_bytes = 0

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._responses)

    def add(self, prompt_key: bytes, response: Int32Array) -> None:
        """Keep a response as the latest of its prompt, unless it is none: empty, or with negative tokens.

        It takes the place of those that it begins with: what its sample had said before.
        """
        is_text = len(response) > 0 and response.min() >= 0
        if not is_text or response.nbytes + 2 * _OVERHEAD_BYTES > self._max_bytes:
            return
        if prompt_key not in self._responses:
            self._responses[prompt_key] = deque()
            self.num_bytes += _OVERHEAD_BYTES
        self._responses.move_to_end(prompt_key)
        responses = self._responses[prompt_key]
        responses.append(response)
        self.num_bytes += response.nbytes + _OVERHEAD_BYTES
        self._move(prompt_key, len(responses) - 1, len(responses))
        for number in range(len(responses) - 2, -1, -1):
            earlier = responses[number]
            if len(earlier) < len(response) and np.array_equal(earlier, response[: len(earlier)]):
                self._drop(prompt_key, number)
        if len(responses) > self.num_responses:
            self._drop(prompt_key)
        while self.num_bytes > self._max_bytes:
            most = self._prompts_with[max(self._prompts_with)]
            self._drop(next(iter(most)))

    def _drop(self, prompt_key: bytes, number: int = 0) -> None:
        """By default the earliest of the prompt."""
        responses = self._responses[prompt_key]
        self.num_bytes -= responses[number].nbytes + _OVERHEAD_BYTES
        del responses[number]
        self._move(prompt_key, len(responses) + 1, len(responses))
        if not responses:
            del self._responses[prompt_key]
            self.num_bytes -= _OVERHEAD_BYTES

    def _move(self, prompt_key: bytes, before: int, now: int) -> None:
        """Among the prompts with `now` responses, from those with `before`."""
        if before:
            del self._prompts_with[before][prompt_key]
            if not self._prompts_with[before]:
                del self._prompts_with[before]
        if now:
            self._prompts_with[now][prompt_key] = None

    def get(self, prompt_key: bytes) -> list[Int32Array]:
        """The responses to a prompt, the earliest first."""
        return list(self._responses.get(prompt_key, ()))

    def pack(self) -> Iterator[bytes]:
        """Everything that is there now, in pieces with a version and a checksum each; at least one."""
        kept = [(key, response) for key, responses in self._responses.items() for response in responses]
        begin = num_bytes = 0
        for end, (_, response) in enumerate(kept, 1):
            num_bytes += response.nbytes
            if num_bytes >= _PIECE_BYTES and end < len(kept):
                yield _packed(kept[begin:end])
                begin, num_bytes = end, 0
        yield _packed(kept[begin:])


class History(Responses):
    """The responses to a prompt, of this engine and of others; what is new can be shared."""

    def __init__(self, num_responses: int, max_bytes: int) -> None:
        super().__init__(num_responses, max_bytes)
        self._new = Responses(num_responses, max_bytes)
        self.pieces: Iterator[bytes] = iter(())
        """The pieces of what was asked for last that are still to be handed on."""

    def add(self, prompt_key: bytes, response: Int32Array) -> None:
        """Keep a response of this engine as the latest of its prompt."""
        super().add(prompt_key, response)
        self._new.add(prompt_key, response)

    def take_new(self) -> Iterator[bytes]:
        """What `add` has kept since the last call, in pieces for `merge` of other engines' histories."""
        taken, self._new = self._new, Responses(self.num_responses, self._max_bytes)
        return taken.pack()

    def merge(self, content: bytes) -> None:
        """Keep a piece that another history's `take_new` or `pack` has given, as the latest of its prompts.

        Raises HistoryError: it is of another version or damaged; nothing was added.
        """
        for key, response in _unpack(content, "history of another engine"):
            super().add(key, response)


def read_file(path: Path) -> list[bytes]:
    """The pieces of a file of what `pack` made, for `merge`.

    Raises:
        OSError: the file cannot be read.
        HistoryError: it is not one of ours, of another version, or damaged.
    """
    content, pieces, begin = path.read_bytes(), list[bytes](), 0
    while begin < len(content) or not pieces:
        head = content[begin : begin + _HEAD_BYTES]
        end = begin + _HEAD_BYTES + int.from_bytes(head[-_LENGTH_BYTES:], "little")
        pieces.append(content[begin:end])
        _checked(pieces[-1], str(path))
        begin = end
    return pieces


def _packed(kept: Sequence[tuple[bytes, Int32Array]]) -> bytes:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        keys=np.frombuffer(b"".join(key for key, _ in kept), np.uint8).reshape(-1, _KEY_BYTES),
        lengths=np.array([len(response) for _, response in kept], np.int64),
        tokens=np.concatenate([np.empty(0, np.int32), *(response for _, response in kept)]),
    )
    content = buffer.getbuffer()
    length = len(content).to_bytes(_LENGTH_BYTES, "little")
    return b"".join((_MAGIC, hashlib.sha256(content).digest(), length, content))


def _checked(piece: bytes, where: str) -> bytes:
    """Take version, checksum and length off a piece. Raises HistoryError, beginning with `where`."""
    if not piece.startswith(_MAGIC):
        raise HistoryError(f"{where}: not a history of this version")
    content = piece[_HEAD_BYTES:]
    if hashlib.sha256(content).digest() != piece[len(_MAGIC) :][:_DIGEST_BYTES]:
        raise HistoryError(f"{where}: damaged, its checksum does not match")
    return content


def _unpack(piece: bytes, where: str) -> list[tuple[bytes, Int32Array]]:
    """Prompt keys and responses. Raises HistoryError, beginning with `where`."""
    with np.load(io.BytesIO(_checked(piece, where))) as arrays:
        texts = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
        # Where there is no text, split makes an empty one.
        return [(key.tobytes(), tokens.copy()) for key, tokens in zip(arrays["keys"], texts, strict=False)]


def prompt_key(prompt_token_ids: Int32Array) -> bytes:
    return hashlib.blake2b(b"prompt" + prompt_token_ids.tobytes(), digest_size=_KEY_BYTES).digest()


def group_key(group: Hashable) -> bytes:
    return hashlib.blake2b(f"group{type(group).__name__}{group}".encode(), digest_size=_KEY_BYTES).digest()
