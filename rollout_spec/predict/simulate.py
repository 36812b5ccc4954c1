"""Whole rollouts without a model: recorded responses, the real drafter and gate, and given step times.

An engine serves its requests first come, first served, at most max_num_seqs at a time and as many as its KV
cache holds; a step takes what a table or a roofline says for its tokens; a draft token is accepted exactly
when it equals the recorded token.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.gate.costs import Ranks
from rollout_spec.drafting.history import History
from rollout_spec.drafting.index import ModelDrafts
from rollout_spec.drafting.native import Int32Array
from rollout_spec.predict.step_times import Times
from rollout_spec.trace import Proposals, Rollout
from rollout_spec.verl.routing import Homes

MAX_IMBALANCE = 8  # as in `configs/rollout_spec_router/group.yaml`


@dataclasses.dataclass(frozen=True)
class Request:
    name: str
    group: str
    prompt_token_ids: Int32Array
    response: Int32Array
    proposals: Proposals | None = None


class ModelDrafter(NamedTuple):
    """A model that drafts in an engine; what it says, the requests have.

    It runs a pass over all tokens of every step, and one more over the rows for each further token of its
    drafts; these it leaves out while the gate is closed, and where they do not pay.
    """

    num_tokens: int
    times: Times
    """Of a pass."""

    def seconds(self, num_tokens: int, num_rows: int, num_context: int, num_passes: int) -> float:
        first = self.times.seconds(num_tokens, False, num_context)
        return first + (num_passes - 1) * self.times.seconds(num_rows, False, num_context)

    def drafts(self, requests: Sequence[Request], nums_done: Int32Array, num_tokens: int) -> ModelDrafts:
        """Of requests that have so many tokens of their response, [rows]; nothing where none is left."""
        shape = (len(requests), num_tokens)
        tokens, log_odds = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for row, (request, num_done) in enumerate(zip(requests, nums_done.tolist(), strict=True)):
            if request.proposals is not None and num_done < len(request.proposals.tokens):
                said = request.proposals.tokens[num_done, :num_tokens]
                tokens[row, : len(said)] = said
                log_odds[row, : len(said)] = request.proposals.log_odds[num_done, :num_tokens]
        return ModelDrafts(tokens, log_odds)


@dataclasses.dataclass
class EngineRun:
    """What one engine did, in one rollout or in all."""

    seconds: float = 0.0
    tail_seconds: float = 0.0
    """Of these, with at most tail_rows requests running."""
    num_steps: int = 0
    num_row_steps: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0


def model_of(lines: Iterable[Rollout], times: Times) -> ModelDrafter | None:
    """The model whose drafts the lines have; None where they have none. `times`: of one of its passes."""
    num_tokens = max((said.tokens.shape[1] for line in lines for said in line.proposals), default=0)
    return ModelDrafter(num_tokens, times) if num_tokens else None


def rollouts_of(lines: Iterable[Rollout]) -> list[list[Rollout]]:
    """The lines of each training step, in the order of the trace; lines without a step are one rollout."""
    rollouts: dict[int | None, list[Rollout]] = {}
    for line in lines:
        rollouts.setdefault(line.step, []).append(line)
    return list(rollouts.values())


def comes_back(lines: Iterable[Rollout]) -> bool:
    """Whether any group has lines in more than one rollout."""
    groups = [group for rollout in rollouts_of(lines) for group in {line.group for line in rollout}]
    return len(set(groups)) < len(groups)


def copied(lines: Sequence[Rollout], num_copies: int) -> list[Rollout]:
    """Every line so many times, each copy with groups and tokens of its own: what is learned of one says
    nothing of the others."""
    arrays = [array for line in lines for array in (line.prompt_token_ids, *line.responses) if len(array)]
    vocabulary = 1 + max((int(array.max()) for array in arrays), default=0)
    return [
        dataclasses.replace(
            line,
            group=f"{line.group}.{i}" if i else line.group,
            prompt_token_ids=line.prompt_token_ids + np.int32(i * vocabulary),
            responses=[response + np.int32(i * vocabulary) for response in line.responses],
            proposals=[
                each._replace(tokens=np.where(each.tokens < 0, -1, each.tokens + np.int32(i * vocabulary)))
                for each in line.proposals
            ],
        )
        for i in range(num_copies)
        for line in lines
    ]


def requests_of(lines: Sequence[Rollout], group_size: int | None) -> list[Request]:
    """One rollout: the first `group_size` responses of every line, in the order of the lines.

    A response without a token takes no step.
    """
    return [
        Request(
            f"{i}.{j}",
            line.group,
            line.prompt_token_ids,
            response,
            line.proposals[j] if line.proposals else None,
        )
        for i, line in enumerate(lines)
        for j, response in enumerate(line.responses[:group_size])
        if len(response)
    ]


def assign(requests: Sequence[Request], num_replicas: int, by_group: bool) -> list[list[Request]]:
    """The requests of every replica: each to the least loaded, as verl does, or by groups, as our router.

    All are placed before the first has ended.
    """
    engines: list[list[Request]] = [[] for _ in range(num_replicas)]
    homes = Homes(MAX_IMBALANCE)
    for request in requests:
        loads = {i: len(engine) for i, engine in enumerate(engines)}
        place = homes.choose(request.group, loads) if by_group else min(loads, key=loads.__getitem__)
        engines[place].append(request)
    return engines


class Load(NamedTuple):
    """What one engine, or one data-parallel rank of it, has to do in a step."""

    num_tokens: int
    num_context: int
    num_rows: int
    drafted: bool


class Engine:
    """One rollout engine, or one of its data-parallel ranks.

    A request's prompt is prefilled in the step that admits it, once per group (prefix caching), and its
    tokens count as verified ones. Where the KV cache is full the newest request goes back to the queue, and
    is prefilled again when it comes back, as in vLLM.

    Args:
        config: of the drafter; method off: none, and all that the model drafts is verified.
        model: that drafts too.
        tail_rows: the tail is the time with at most so many requests running.
        kv_tokens: that the KV cache holds.
        fills_drafts: up to K in every row, as `Drafter` does it.
    """

    def __init__(
        self,
        config: SpecConfig,
        times: Times,
        max_num_seqs: int,
        tail_rows: int,
        kv_tokens: float = math.inf,
        fills_drafts: bool = False,
        model: ModelDrafter | None = None,
    ) -> None:
        self.total = EngineRun()
        """Of all rollouts so far."""
        self.drafter: Drafter | None = None
        if config.enabled:
            self.drafter = Drafter(
                config,
                lambda: self.total.seconds,
                fills=fills_drafts,
                model_tokens=min(model.num_tokens, config.num_speculative_tokens) if model else 0,
            )
        self.times, self._model = times, model
        self._max_num_seqs, self._tail_rows, self._kv_tokens = max_num_seqs, tail_rows, kv_tokens
        self._queue: deque[tuple[Request, int]] = deque()  # with the tokens of its response that it has
        self._running: list[Request] = []
        self._admitted: dict[str, None] = {}  # the names of these, the newest last
        self._drafts: list[list[int]] = []
        self._prefilled: set[str] = set()
        self._num_interrupted_tokens = 0  # which the next step prefills again
        self._begin = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._running)

    def rollout(self, requests: Sequence[Request], on_tokens: Callable[[int], None] | None = None) -> float:
        """`rollout` of this engine alone."""
        return rollout([[self]], [[requests]], on_tokens)

    @property
    def elapsed_s(self) -> float:
        """Of this rollout."""
        return self.total.seconds - self._begin

    def enqueue(self, requests: Sequence[Request]) -> None:
        """The requests of a rollout, while none is left of the one before."""
        self._queue.extend((request, 0) for request in requests)
        num_rows = min(self._max_num_seqs, len(requests))
        longest = max((len(r.prompt_token_ids) + len(r.response) for r in requests), default=0)
        self._token_ids = np.zeros((num_rows, longest), np.int32)
        self._levels, self._ends = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        self._prefilled.clear()
        self._begin = self.total.seconds

    def step(self) -> int:
        """One engine step; returns the tokens it gave."""
        return step_together([self])

    def interrupt(self) -> None:
        """A weight sync of an asynchronous trainer: what runs is aborted, and goes on behind its own text."""
        self._num_interrupted_tokens = self._num_context
        self._prefilled.clear()
        self._drafts = [[] for _ in self._running]
        if self.drafter is None:
            return
        self.drafter.clear(aborted=list(self._admitted))
        for row, request in enumerate(self._running):
            text, num_group_tokens = self._token_ids[row, : self._levels[row]], len(request.prompt_token_ids)
            self.drafter.add(request.name, text, int(self._ends[row]), request.group, num_group_tokens)

    def begin_step(self) -> Load:
        num_tokens, self._num_interrupted_tokens = self._num_interrupted_tokens, 0
        num_tokens += 0 if self._preempt() else self._admit()
        num_tokens += self._num_verified
        return Load(num_tokens, self._num_context, len(self._running), any(self._drafts))

    def seconds(self, load: Load, num_tokens_of_others: int) -> float:
        """Of the step that began, where the other ranks bring so many tokens."""
        seconds = self.times.seconds(
            load.num_tokens, load.drafted, load.num_context, num_tokens_of_others, load.num_rows
        )
        if self._model is None:
            return seconds
        passes = max(1, self._model_tokens)
        return seconds + self._model.seconds(load.num_tokens, load.num_rows, load.num_context, passes)

    @property
    def _model_tokens(self) -> int:
        """That the model drafts in this step."""
        if self._model is None:
            return 0
        if self.drafter is None:
            return self._model.num_tokens
        return self.drafter.model_tokens if self.drafter.next_step_waits else 0

    def end_step(self, seconds: float, ranks: Ranks | None = None) -> int:
        """The step that began took this long, of all `ranks`; returns the tokens it gave."""
        result = self.total
        num_running = len(self._running)
        result.seconds += seconds
        result.tail_seconds += seconds if num_running <= self._tail_rows else 0.0
        result.num_steps += 1
        result.num_row_steps += num_running
        nums_new = self._verify()
        num_gained = sum(nums_new)
        result.num_tokens += num_gained
        self._levels[:num_running] += np.array(nums_new, np.int32)
        self._drafts = self._draft(nums_new, ranks)
        for row in reversed(np.flatnonzero(self._levels[:num_running] >= self._ends[:num_running])):
            self._remove(int(row))
        return num_gained

    def _draft(self, nums_new: list[int], ranks: Ranks | None) -> list[list[int]]:
        """Behind what every row has now."""
        model = None
        if self._model is not None and self._model_tokens:
            prompts = np.array([len(request.prompt_token_ids) for request in self._running], np.int32)
            nums_done = self._levels[: len(prompts)] - prompts
            model = self._model.drafts(self._running, nums_done, self._model_tokens)
        if self.drafter is not None:
            names = [request.name for request in self._running]
            # A step for which the model does not draft has begun already: there are no drafts of the text.
            in_time = self._model is None or model is not None
            return self.drafter.draft(
                names, nums_new, self._token_ids, self._levels, ranks, None, in_time, model
            )
        if model is None:
            return [[] for _ in self._running]
        rooms = self._ends[: len(self._running)] - self._levels[: len(self._running)] - 1
        return [
            [token for token in tokens[: max(0, room)] if token >= 0]
            for tokens, room in zip(model.tokens.tolist(), rooms.tolist(), strict=True)
        ]

    @property
    def _num_context(self) -> int:
        return int(self._levels[: len(self._running)].sum())

    @property
    def _num_verified(self) -> int:
        """Tokens that the rows bring to the step: one each, and their drafts."""
        return len(self._running) + sum(map(len, self._drafts))

    def _preempt(self) -> bool:
        """Send the newest rows back until the step's tokens have room; whether there were any. One stays."""
        num_before = self.total.num_preemptions
        while len(self._running) > 1 and self._num_context + self._num_verified > self._kv_tokens:
            newest = next(reversed(self._admitted))
            row = next(i for i, request in enumerate(self._running) if request.name == newest)
            request = self._running[row]
            self._queue.appendleft((request, int(self._levels[row]) - len(request.prompt_token_ids)))
            self._remove(row, has_ended=False)
            self.total.num_preemptions += 1
        return self.total.num_preemptions > num_before

    def _admit(self) -> int:
        """Fill the batch; returns the tokens to prefill."""
        num_tokens, needed = 0, self._num_context + self._num_verified
        while self._queue and len(self._running) < self._max_num_seqs:
            request, num_done = self._queue[0]
            row, prompt = len(self._running), request.prompt_token_ids
            level, end = len(prompt) + num_done, len(prompt) + len(request.response)
            needed += level + 1
            if self._running and needed > self._kv_tokens:
                break
            self._queue.popleft()
            self._token_ids[row, : len(prompt)] = prompt
            self._token_ids[row, len(prompt) : end] = request.response
            self._levels[row], self._ends[row] = level, end
            self._running.append(request)
            self._admitted[request.name] = None
            self._drafts.append([])
            if self.drafter is not None:
                self.drafter.add(request.name, prompt, end, request.group)
            if request.group not in self._prefilled:
                self._prefilled.add(request.group)
                num_tokens += len(prompt)
            num_tokens += num_done
        return num_tokens

    def _verify(self) -> list[int]:
        """The tokens that every row gets: the accepted ones of its draft and one more."""
        nums_new = [1] * len(self._running)
        for row, draft in enumerate(self._drafts):
            if not draft:
                continue
            level, end = int(self._levels[row]), int(self._ends[row])
            recorded = self._token_ids[row, level : min(end, level + len(draft))]
            agrees = np.append(recorded == draft[: len(recorded)], False)
            accepted = int(np.argmin(agrees))
            nums_new[row] = min(accepted + 1, end - level)
            self.total.num_draft_tokens += len(draft)
            self.total.num_accepted_tokens += accepted
        return nums_new

    def _remove(self, row: int, *, has_ended: bool = True) -> None:
        """Take a request out of the batch; the last row takes its place, as in an engine's."""
        last = len(self._running) - 1
        del self._admitted[self._running[row].name]
        if self.drafter is not None:
            self.drafter.remove(self._running[row].name, remember=has_ended)
        for rows in (self._token_ids, self._levels, self._ends):
            rows[row] = rows[last]
        self._running[row], self._drafts[row] = self._running[last], self._drafts[last]
        self._running.pop()
        self._drafts.pop()


def step_together(ranks: Sequence[Engine]) -> int:
    """One step of data-parallel ranks, as long as the slowest's; returns the tokens they gave."""
    loads = [rank.begin_step() for rank in ranks]
    total = sum(load.num_tokens for load in loads)
    seconds = max(
        rank.seconds(load, total - load.num_tokens) for rank, load in zip(ranks, loads, strict=True)
    )
    known = None
    if len(ranks) > 1:  # what vLLM tells each of them
        known = Ranks(ranks[0].total.num_steps, max(load.num_tokens for load in loads))
    return sum(rank.end_step(seconds, known) for rank in ranks)


def rollout(
    replicas: Sequence[Sequence[Engine]],
    parts: Sequence[Sequence[Sequence[Request]]],
    on_tokens: Callable[[int], None] | None = None,
    interrupt_every: int | None = None,
) -> float:
    """Serve the requests of one training step; returns the seconds until the slowest replica has.

    Args:
        replicas: the ranks of each; all ranks of one step while one of them has work.
        parts: the requests of each rank.
        on_tokens: called with the tokens of each step.
        interrupt_every: steps from one weight sync to the next within the rollout.
    """
    engines = [rank for ranks in replicas for rank in ranks]
    for rank, part in zip(engines, itertools.chain.from_iterable(parts), strict=True):
        rank.enqueue(part)
    # The replica that is least far steps first: what it sends must not come late.
    turns = [(0.0, i, 0) for i in range(len(replicas))]
    while turns:
        _, i, num_steps = heapq.heappop(turns)
        ranks = replicas[i]
        if not any(rank.has_work for rank in ranks):
            continue
        if interrupt_every and num_steps and num_steps % interrupt_every == 0:
            for rank in ranks:
                rank.interrupt()
        num_gained = step_together(ranks)
        if on_tokens is not None:
            on_tokens(num_gained)
        heapq.heappush(turns, (ranks[0].elapsed_s, i, num_steps + 1))
    for rank in engines:
        if rank.drafter is not None:
            rank.drafter.clear()  # the weights change
    return max(rank.elapsed_s for rank in engines)


@dataclasses.dataclass(frozen=True)
class Cluster:
    num_replicas: int
    max_num_seqs: int
    group_size: int | None  # None: all responses of a line
    by_group: bool = False
    num_ranks: int = 1  # data-parallel ones of a replica
    kv_tokens: float = math.inf  # of a rank
    interrupt_every: int | None = None  # engine steps from one weight sync to the next within a rollout
    fills_drafts: bool = False  # in every row up to K


def simulate(
    lines: Sequence[Rollout],
    cluster: Cluster,
    config: SpecConfig,
    times: Times,
    tail_rows: int,
    on_tokens: Callable[[int], None] | None = None,
    model: ModelDrafter | None = None,
) -> dict[str, Any]:
    """The rollouts of a trace on a cluster, one after the other; each takes as long as its slowest replica.

    With config.history the replicas share what they have served after each rollout, as verl's do.

    Returns:
        makespan_s, of all rollouts; tail_share, of the time that engines work, with at most tail_rows
        requests running (in a data-parallel rank); tokens_per_s; tokens_per_step, of one request;
        acceptance_rate (0 without drafts); num_preemptions.

    The trace must have a response with a token in it.
    """
    times = times if config.enabled else times.without_drafter
    replicas = [
        [
            Engine(
                config,
                times,
                cluster.max_num_seqs,
                tail_rows,
                cluster.kv_tokens,
                cluster.fills_drafts,
                model,
            )
            for _ in range(cluster.num_ranks)
        ]
        for _ in range(cluster.num_replicas)
    ]
    engines = [rank for ranks in replicas for rank in ranks]
    makespan = 0.0
    for lines_of_step in rollouts_of(lines):
        of_engines = iter(
            assign(requests_of(lines_of_step, cluster.group_size), len(engines), cluster.by_group)
        )
        parts = [list(itertools.islice(of_engines, cluster.num_ranks)) for _ in replicas]
        makespan += rollout(replicas, parts, on_tokens, cluster.interrupt_every)
        if config.history:
            _share_history([engine.drafter.history for engine in engines if engine.drafter is not None])
    totals = {
        field.name: sum(getattr(engine.total, field.name) for engine in engines)
        for field in dataclasses.fields(EngineRun)
    }
    return {
        "makespan_s": makespan,
        "tail_share": totals["tail_seconds"] / totals["seconds"],
        "tokens_per_s": totals["num_tokens"] / makespan,
        "tokens_per_step": totals["num_tokens"] / totals["num_row_steps"],
        "acceptance_rate": totals["num_accepted_tokens"] / max(1, totals["num_draft_tokens"]),
        "num_preemptions": totals["num_preemptions"],
    }


def _share_history(histories: Sequence[History]) -> None:
    taken = [history.take_new() for history in histories]
    for i, history in enumerate(histories):
        for content in taken[:i] + taken[i + 1 :]:
            history.merge(content)
