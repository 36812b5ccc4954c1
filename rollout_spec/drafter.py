"""One engine's drafter: the life cycle of requests and groups, and what each step asks of the index.

It knows neither torch nor vLLM: a step is arrays of row numbers and token levels in, draft tokens out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from itertools import compress, islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rollout_spec.config import SpecConfig
from rollout_spec.gate import Step, make_gate
from rollout_spec.history import Backlog, History, Response, group_key, prompt_key
from rollout_spec.index import StepResult, SuffixIndex
from rollout_spec.metrics import EngineCounters
from rollout_spec.native import BudgetExceeded, Int32Array, InvalidArgument, OutOfMemory
from rollout_spec.price import make_index
from rollout_spec.rows import StepRows

# Siblings that wait in the engine's queue find their group's text here when they start.
# Few are enough: the samples of a prompt arrive together and are served in order.
MAX_IDLE_GROUPS = 32

# Tokens of history that one step indexes, and more for every row: as long as the rest takes, about.
_HISTORY_TOKENS = 256
_HISTORY_TOKENS_PER_ROW = 16
_HISTORY_SHARE = 0.875  # of the byte budget: beyond it no group gets its history
_BYTES_PER_TOKEN = 64  # about, of the index

# The share of steps, of about the last ALIKE_MEMORY, whose time can be compared: below it requests come and
# go all the time, and any step is as good as another.
ALIKE_SHARE, ALIKE_MEMORY = 0.25, 32

_UNTRACKED = -1
_T = TypeVar("_T")
_Key = tuple[str, Hashable]  # what the group is told by, and its value


@dataclasses.dataclass
class _Group:
    handle: int
    prompt: Int32Array
    history_key: bytes
    num_live: int = 0


@dataclasses.dataclass
class _Request:
    sequence: int  # _UNTRACKED: it has no place in the index
    group_key: _Key
    max_level: int  # no token is generated beyond this level
    after_prompt: bool  # its text in the index is what comes after the group's prompt


class Drafter:
    """Drafts for the rows of an engine's batch.

    Usage: `open` every new request, `close` every ended one, then `step` once per engine step.
    Not thread-safe; one per engine.

    Args:
        config: the options; `config.num_speculative_tokens` bounds every draft.
        clock: seconds, of which the gate learns what a step takes.
    """

    def __init__(self, config: SpecConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self.config = config
        self.counters = EngineCounters()
        self._gate = make_gate(config.batch_threshold)
        self._clock = clock
        self._last_start: float | None = None  # when the last step ended, and whether all its rows decoded
        self._all_decoded = False
        self._share_alike = 1.0
        self._index = make_index(config)
        self.history = History(config.history, config.max_index_mb << 20)
        self._backlog = Backlog(self._index)
        self._requests: dict[str, _Request] = {}
        self._groups: dict[_Key, _Group] = {}
        # The groups without live requests, which may be evicted; the one that has been idle longest first.
        self._idle: OrderedDict[_Key, None] = OrderedDict()
        self._row_ids: list[str] = []  # the rows of the last step
        self._rows: StepRows | None = None  # of these that have a place in the index; None: to be mapped anew

    @property
    def index(self) -> SuffixIndex:
        return self._index

    @property
    def request_ids(self) -> Collection[str]:
        return self._requests.keys()

    def open(
        self, request_id: str, prompt_token_ids: Int32Array, max_level: int, group: Hashable | None = None
    ) -> None:
        """Start a request.

        Args:
            request_id: unique among the open requests.
            prompt_token_ids: int32, shape [num_prompt_tokens].
            max_level: the most tokens, prompt included, that the request can reach.
            group: requests with the same value are siblings. By default the exact prompt decides.

        A group's first prompt is the group's prompt. A later request whose prompt begins with it (a resumed
        request, a later turn) continues behind it; any other starts at the root of the same automaton.
        """
        if not self.config.group_sharing:
            key: _Key = ("request", request_id)
        else:
            key = ("group", group) if group is not None else ("prompt", prompt_token_ids.tobytes())
        sequence, after_prompt = self._open_sequence(key, prompt_token_ids)
        self._requests[request_id] = _Request(sequence, key, max_level, after_prompt)
        self._rows = None

    def close(self, request_id: str) -> None:
        """End a request; its text stays in its group until the group is evicted."""
        self._untrack(self._requests.pop(request_id))

    def close_all(self) -> None:
        for request_id in list(self._requests):
            self.close(request_id)

    def _untrack(self, request: _Request) -> None:
        self._rows = None
        if request.sequence == _UNTRACKED:
            return
        group = self._groups[request.group_key]
        self._remember(request, group)
        self._index.close_sequence(request.sequence)
        request.sequence = _UNTRACKED
        group.num_live -= 1
        if not self.config.group_sharing:
            self._evict(request.group_key)
        elif group.num_live == 0:
            self._idle[request.group_key] = None
            self._evict_idle(len(self._idle) - MAX_IDLE_GROUPS)

    def step(
        self,
        request_ids: Sequence[str],
        nums_new_tokens: Sequence[int],
        token_ids: Int32Array,
        levels: Int32Array,
    ) -> list[list[int]]:
        """Index every decoding row's new tokens and draft for it what the gate lets through.

        Args:
            request_ids: the request of each row; all are open.
            nums_new_tokens: list [num_rows], the tokens each row got in the step that has ended; 0 for a row
                that does not decode (a partial prefill).
            token_ids: shape [>= num_rows, max_model_len], row i holds the tokens of `request_ids[i]`.
            levels: int32, shape [>= num_rows], how many tokens each row has.

        Returns:
            The draft tokens of each row, most often empty.

        Raises:
            NativeError: out of memory, or an argument is wrong; nothing but idle groups has gone then. A full
                index raises nothing: idle groups leave it, then the requests that do not fit.
        """
        started = time.perf_counter()
        if len(nums_new_tokens) != len(request_ids):
            raise InvalidArgument(
                f"nums_new_tokens: has {len(nums_new_tokens)} entries, request_ids has {len(request_ids)}"
            )
        counters = self.counters
        step = self._ended_step(request_ids, nums_new_tokens, levels)
        self._index_history(len(request_ids))
        if step.num_rows == 0:
            return [[] for _ in request_ids]
        price = self._gate.begin(step, counters)
        least = max(price or 0.0, self._index.min_token_prob)
        decoding = None if step.num_rows == len(request_ids) else np.array(nums_new_tokens) > 0
        rows, result = self._step_index(decoding, token_ids, levels, price)
        counters.num_steps += 1
        counters.num_row_steps += step.num_rows
        counters.num_untracked_rows += step.num_rows - len(rows)
        drafts: list[list[int]] = []
        if result is not None and price is not None:
            drafts = self._chosen_drafts(result, least)
        if len(drafts) < len(request_ids):
            drafts = _spread(drafts, rows, len(request_ids))
        counters.draft_seconds += time.perf_counter() - started
        return drafts

    def _chosen_drafts(self, result: StepResult, min_token_prob: float) -> list[list[int]]:
        """What the gate takes of each draft."""
        counters = self.counters
        chosen = self._gate.choose(result.survivals, result.num_draft_tokens, counters)
        numbers = chosen.tolist()
        num_drafts = len(numbers) - numbers.count(0)
        is_on = num_drafts > 0 or not result.num_draft_tokens.any()
        counters.num_steps_on += is_on
        counters.sum_min_token_prob += is_on * min_token_prob
        counters.num_drafts += num_drafts
        counters.num_draft_tokens += sum(numbers)
        tokens = self._index.leading_tokens(chosen)
        end = 0
        return [tokens[end : (end := end + number)] for number in numbers]

    def _ended_step(
        self, request_ids: Sequence[str], nums_new_tokens: Sequence[int], levels: Int32Array
    ) -> Step:
        has_no_new_rows = self._map_rows(request_ids)
        num_rows = len(nums_new_tokens) - nums_new_tokens.count(0)
        if not self._gate.weighs_costs:
            return Step(num_rows)
        now = self._clock()
        # A step that prefills, or that new rows have come to, says nothing of what a decoding step costs.
        all_decode = num_rows == len(nums_new_tokens)
        is_alike = has_no_new_rows and all_decode and self._all_decoded
        self._share_alike += (is_alike - self._share_alike) / ALIKE_MEMORY
        seconds = None
        if self._last_start is not None and (is_alike or self._share_alike < ALIKE_SHARE):
            seconds = now - self._last_start
        self._last_start, self._all_decoded = now, all_decode
        context = sum(compress(levels[: len(nums_new_tokens)].tolist(), nums_new_tokens))
        return Step(num_rows, context, sum(nums_new_tokens), seconds)

    def _map_rows(self, request_ids: Sequence[str]) -> bool:
        """Whether all were rows of the step before, of which some may have ended; called once a step."""
        # Batches change seldom; comparing two lists of the same string objects is cheap.
        if self._rows is not None and self._row_ids == request_ids:
            return True
        self._rows = self._tracked_rows(request_ids)
        last, self._row_ids = self._row_ids, list(request_ids)
        return set(last).issuperset(request_ids)

    def _tracked_rows(self, request_ids: Sequence[str]) -> StepRows:
        rows = enumerate(self._requests[request_id] for request_id in request_ids)
        # The target adds a token of its own, so a draft that ends one short of the limit is enough.
        tracked = [(row, r.sequence, r.max_level - 1) for row, r in rows if r.sequence != _UNTRACKED]
        return StepRows(*np.array(tracked, np.int32).reshape(-1, 3).T.copy())

    def take_counters(self) -> EngineCounters:
        """The counts since the last call."""
        taken, self.counters = self.counters, EngineCounters()
        return taken

    def clear(self) -> None:
        """The target's weights have changed: forget every request and group, but for the history.

        A request that goes on is indexed anew.
        """
        for request in self._requests.values():
            if request.sequence != _UNTRACKED:
                self._remember(request, self._groups[request.group_key])
        self.history.new_policy()
        self._index.clear()
        self._backlog.clear()
        self._requests.clear()
        self._groups.clear()
        self._idle.clear()
        self._row_ids = []
        self._rows = None
        self._last_start = None  # the time until the next step is no step's

    def _remember(self, request: _Request, group: _Group) -> None:
        if self.config.history and request.after_prompt:
            self.history.add(group.history_key, self._index.text(request.sequence))

    def _step_index(
        self,
        decoding: npt.NDArray[np.bool_] | None,
        token_ids: Int32Array,
        levels: Int32Array,
        price: float | None,
    ) -> tuple[Int32Array, StepResult | None]:
        """Index and draft for the decoding rows (None: all) that have a place in the index.

        Returns:
            These rows, and the result unless there are none.
        """
        while True:
            assert self._rows is not None
            rows = self._rows if decoding is None else self._rows.among(decoding)
            if not len(rows):
                return rows.numbers, None
            rows.set_levels(levels, price is not None)
            attempt = partial(
                self._index.step,
                rows.sequences,
                token_ids,
                rows.numbers,
                rows.levels,
                rows.max_draft_tokens,
                price or 0.0,
            )
            try:
                return rows.numbers, self._evicting(attempt)
            except BudgetExceeded as error:
                # What was too much may be all rows' together; then the longest goes.
                entry = error.row if error.row >= 0 else int(np.argmax(rows.levels))
                self._untrack_row(rows.numbers[entry])

    def _untrack_row(self, row: int) -> None:
        self._untrack(self._requests[self._row_ids[row]])
        self._rows = self._tracked_rows(self._row_ids)

    def _open_sequence(self, key: _Key, prompt: Int32Array) -> tuple[int, bool]:
        """A new sequence in the group of `key`, and whether it comes after the group's prompt.

        _UNTRACKED where no slot or no memory is left for it.
        """
        group = self._group(key, prompt)
        if group is None:
            return _UNTRACKED, False
        after_prompt = np.array_equal(prompt[: len(group.prompt)], group.prompt)
        try:
            sequence = self._index.open_sequence(
                group.handle, after_prompt=after_prompt, keep_text=self.config.history > 0
            )
        except (BudgetExceeded, OutOfMemory):
            return _UNTRACKED, False
        group.num_live += 1
        self._idle.pop(key, None)
        return sequence, after_prompt

    def _group(self, key: _Key, prompt: Int32Array) -> _Group | None:
        """The group of `key`, opened if it is new; None where no slot or no memory is left for it."""
        group = self._groups.get(key)
        if group is not None:
            return group
        if len(self._groups) >= self.config.max_groups and not self._evict_idle(1):
            return None
        try:
            handle = self._evicting(partial(self._index.open_group, prompt))
        except (BudgetExceeded, OutOfMemory):
            return None
        kind, name = key
        history_key = group_key(name) if kind == "group" else prompt_key(prompt)
        self._groups[key] = group = _Group(handle, prompt.copy(), history_key)
        self._idle[key] = None
        self._add_history(handle, len(prompt), self.history.get(history_key))
        return group

    def _add_history(self, handle: int, num_prompt_tokens: int, responses: Sequence[Response]) -> None:
        # A full index does without history rather than without what is said now.
        num_tokens = sum(len(response.tokens) for response in responses) + self._backlog.num_tokens
        num_bytes = self._index.stats().num_bytes + num_tokens * _BYTES_PER_TOKEN
        if responses and num_bytes <= _HISTORY_SHARE * self._index.max_bytes:
            self._backlog.add(handle, num_prompt_tokens, responses)

    def _index_history(self, num_rows: int) -> None:
        if self._backlog:
            with contextlib.suppress(BudgetExceeded, OutOfMemory):
                self._backlog.index(_HISTORY_TOKENS + num_rows * _HISTORY_TOKENS_PER_ROW)

    def _evicting(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` returns, after as many idle groups are closed as it takes to give it room.

        An attempt costs as much as a step: each that fails has twice as many closed as the one before.

        Raises:
            BudgetExceeded, OutOfMemory: no idle group is left.
        """
        num = 1
        while True:
            try:
                return attempt()
            except (BudgetExceeded, OutOfMemory):
                if not self._evict_idle(num):
                    raise
                num *= 2

    def _evict_idle(self, num: int) -> bool:
        """Close up to `num` idle groups, those idle longest; False if none was closed."""
        evicted = list(islice(self._idle, max(0, num)))
        for key in evicted:
            self._evict(key)
        return bool(evicted)

    def _evict(self, key: _Key) -> None:
        handle = self._groups.pop(key).handle
        self._idle.pop(key, None)
        self._backlog.drop(handle)
        self._index.close_group(handle)


def _spread(drafts: list[list[int]], rows: Int32Array, num_rows: int) -> list[list[int]]:
    """The draft of each of num_rows rows: of `rows` the given ones, if any; of the others an empty one."""
    spread: list[list[int]] = [[] for _ in range(num_rows)]
    if not drafts:
        return spread
    for row, draft in zip(rows.tolist(), drafts, strict=False):
        spread[row] = draft
    return spread
