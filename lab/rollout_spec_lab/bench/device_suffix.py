"""The rule of vLLM's `suffix` for MRV2, read in a branch (vllm-project/vllm 05084858, in no release)."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_spec.drafting.native import Int32Array
from rollout_spec.predict.proposers import Proposer
from rollout_spec.trace import Rollout

_DEPTH, _SLOTS, _KEYS, _BEFORE = 24, 8, (4, 2), 3
_BUCKETS, _HALF_LIFE = (1, 2, 3, 4, 5, 6, 10, 20), 1024


class DeviceSuffix(Proposer):
    """Drafts from the request's own longest suffix, or from a longer one in finished responses.

    Those are found by their last 4 and 2 tokens, 8 responses each, and vote token by token. How often such
    drafts were right, by source, length of the match and place, cuts a draft at a survival of `price`. The
    memory of 1 M tokens is not bounded here.
    """

    def __init__(self, k: int, price: float) -> None:
        self._k, self._price, self._num_steps = k, price, 0
        self._places: defaultdict[tuple[int, ...], deque] = defaultdict(lambda: deque(maxlen=_SLOTS))
        self._counts = np.zeros((2, len(_BUCKETS) + 1, k, 2))  # accepted and seen
        self._last: dict[int, tuple[int, int, list[int], int]] = {}  # by row: bucket, draft, level

    def start(self, line: Rollout, earlier: Sequence[Int32Array]) -> None:
        self._line, self._last = line, {}

    def draft(self, rows: Int32Array, token_ids: Int32Array, levels: Int32Array, budgets: Int32Array) -> Any:
        drafts, numbers = np.zeros((len(rows), self._k), np.int32), np.zeros(len(rows), np.int32)
        self._num_steps += 1
        if self._num_steps % _HALF_LIFE == 0:
            self._counts /= 2
        for i, (row, level, budget) in enumerate(zip(rows.tolist(), levels.tolist(), budgets, strict=True)):
            text = token_ids[row, :level]
            self._learn(row, text)
            length, found = _own(text)
            source, (other_length, other) = 0, self._voted(text.tolist())
            if other_length > length:
                source, length, found = 1, other_length, other
            bucket = int(np.searchsorted(_BUCKETS, length))
            accepted, seen = self._counts[source, bucket].T
            survivals = np.cumprod((accepted + 1) / (seen + 2))[: min(self._k, budget, len(found))]
            numbers[i] = (survivals >= self._price).sum()
            drafts[i, : numbers[i]] = found[: numbers[i]]
            self._last[row] = (source, bucket, drafts[i, : numbers[i]].tolist(), level)
        return drafts, numbers

    def _learn(self, row: int, text: Int32Array) -> None:
        source, bucket, draft, level = self._last.pop(row, (0, 0, [], 0))
        for place, (token, right) in enumerate(zip(draft, text[level:].tolist(), strict=False)):
            self._counts[source, bucket, place] += (token == right, 1)
            if token != right:
                return

    def _voted(self, text: list[int]) -> tuple[int, list[int]]:
        """The longest match in finished responses, and the chain of the highest sum of shares."""
        places = {place for n in _KEYS for place in self._places.get(tuple(text[-n:]), ())}
        found = [(_alike(text, document, end), document[end : end + self._k]) for document, end in places]
        best: tuple[float, int, list[int]] = (-1.0, 0, [])
        for length in {each for each, _ in found}:
            alive, share, score = [rest for each, rest in found if each >= length], 1.0, 0.0
            chain: list[int] = []
            while nexts := Counter(rest[len(chain)] for rest in alive if len(rest) > len(chain)):
                token, votes = nexts.most_common(1)[0]
                share *= votes / len(alive)
                score += share
                alive = [rest for rest in alive if rest[len(chain) : len(chain) + 1] == (token,)]
                chain.append(token)
            best = max(best, (score, length, chain))
        return best[1], best[2]

    def finish(self) -> None:
        before = self._line.prompt_token_ids[-_BEFORE:].tolist()
        for response in self._line.responses:
            document = tuple(before + response.tolist())
            newest: dict[tuple[int, ...], int] = {}
            for end in range(min(_KEYS), len(document)):
                newest |= {document[end - n : end]: end for n in _KEYS if n <= end}
            for key, end in newest.items():
                self._places[key].append((document, end))


def _own(text: Int32Array) -> tuple[int, list[int]]:
    """The longest suffix that came before in the text, the latest of these; what followed there."""
    ends, length = np.flatnonzero(text[:-1] == text[-1]) + 1, 0
    while len(ends) and length < _DEPTH:
        last, length = ends, length + 1
        ends = ends[ends > length]
        ends = ends[text[ends - 1 - length] == text[-1 - length]]
    return (length, text[last[-1] :].tolist()) if length else (0, [])


def _alike(text: list[int], document: tuple[int, ...], end: int) -> int:
    """How many tokens before `end` are the last of the text."""
    most = min(_DEPTH, end, len(text))
    return next((n for n in range(most) if document[end - 1 - n] != text[-1 - n]), most)
