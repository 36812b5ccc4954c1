"""A simulated engine: it serves recorded responses in virtual time, with the real drafter and gate.

Requests are served first come, first served, at most max_num_seqs at a time and as many as the KV cache
holds. A step takes what `Times` says. A draft token is accepted exactly when it equals the recorded token.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollout_spec.config import SpecConfig
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.drafts import NextStep, passes_for
from rollout_spec.drafting.gate.step import Work
from rollout_spec.metrics import Counters
from rollout_spec.predict.batch import Batch
from rollout_spec.predict.load import Request
from rollout_spec.predict.replay_drafters import drafts_at
from rollout_spec.predict.step_times import Times

TAIL_ROWS = 8  # a rollout is in its tail while an engine runs at most this many requests


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What engines there are, all alike."""

    num_replicas: int
    max_num_seqs: int
    group_size: int | None = None  # the first responses of each line, None: all
    num_ranks: int = 1  # data-parallel ranks of a replica
    kv_tokens: float = math.inf  # tokens that the KV cache of a rank holds
    pads_drafts: bool = False  # draft up to K tokens in every row, as `Drafter` does it
    max_num_batched_tokens: int = 8192  # of a step, prompts included; verl's default
    tool_seconds: float = 0.0  # between two turns of an agent; what it has said stays in the prefix cache


class SimulatedModel(NamedTuple):
    """A draft model of an engine. What it drafts was recorded or simulated, and is in the requests.

    It makes one pass over all tokens of every step, and one more over the rows for each further draft token.
    The further passes are left out while the gate lets nothing be drafted, and where they do not pay.
    """

    num_tokens: int  # the most that it drafts for a row
    times: Times  # of a pass


@dataclasses.dataclass
class EngineRun(Counters):
    """What one engine did in all its rollouts."""

    busy_seconds: float = 0.0  # without those in which all waited for tools
    tail_seconds: float = 0.0  # with at most TAIL_ROWS requests running
    num_steps: int = 0
    num_row_steps: int = 0  # those of rows that got tokens
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0


class Engine:
    """One rollout engine, or one of its data-parallel ranks.

    A step prefills as many tokens of prompts as `max_num_batched_tokens` leaves beside the rows that decode;
    siblings find a prompt in the prefix cache. When the KV cache is full, the newest request goes back to the
    queue and is prefilled again later, as in vLLM. With method=off all that the model drafts is verified.
    """

    def __init__(
        self, config: SpecConfig, times: Times, cluster: Cluster, model: SimulatedModel | None = None
    ) -> None:
        self.total = EngineRun()
        self.now = 0.0  # seconds since it was made
        self.times, self._cluster, self._model = times, cluster, model
        self.drafter: Drafter | None = None
        num_draft_tokens = model.num_tokens if model else 0  # of a row, at most
        if config.enabled:
            most = min(num_draft_tokens, config.num_speculative_tokens)
            self.drafter = Drafter(
                config, lambda: self.now, pads_drafts=cluster.pads_drafts, most_model_tokens=most
            )
            num_draft_tokens = config.num_speculative_tokens
        # What the model drafts for a row in the step that runs: as the drafter says, or all.
        self._num_model_tokens = 0 if self.drafter is not None or model is None else model.num_tokens
        self._row_tokens = times.row_tokens(num_draft_tokens)  # that it takes of the cache beside its own
        self._at_tools: deque[tuple[float, Request]] = deque()  # with the time at which the tool has answered
        self.queue: deque[tuple[Request, int]] = deque()  # each with the number of its tokens that exist
        self._batch = Batch(1, 1)
        self._prefilled: set[str] = set()  # groups whose prompt is in the prefix cache

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Take the requests of a rollout; none of the rollout before may be left."""
        self.queue.extend((request, 0) for request in requests)
        longest = max((turn.num_tokens for request in requests for turn in request.turns), default=0)
        self._batch = Batch(min(self._cluster.max_num_seqs, len(requests)), longest)
        self._prefilled.clear()

    def begin_step(self, now: float) -> Work:
        self.now = now
        while self._at_tools and self._at_tools[0][0] <= now:  # their tools have answered
            self.queue.append((self._at_tools.popleft()[1], 0))
        batch, may_admit = self._batch, not self._preempt()
        num_verified = batch.num_verified
        num_left = self._cluster.max_num_batched_tokens - num_verified
        num_prompt_tokens = batch.prefill(num_left)
        if may_admit:
            num_prompt_tokens += self._admit(num_left - num_prompt_tokens)
        num_tokens = num_verified + num_prompt_tokens
        return Work(num_tokens, num_prompt_tokens, has_drafts=any(batch.drafts))

    def seconds(self, work: Work, num_tokens_of_others: int) -> float:
        """What the step that has begun takes; the other data-parallel ranks bring `num_tokens_of_others`."""
        num_tokens, context, num_rows = work.num_tokens, self._batch.num_context, len(self._batch)
        seconds = self.times.seconds(num_tokens, work.has_drafts, context, num_tokens_of_others, num_rows)
        if self._model is None:
            return seconds
        passes, further = self._model.times, passes_for(self._num_model_tokens) - 1
        first = passes.seconds(num_tokens, False, context)
        return seconds + (first + further * passes.seconds(num_rows, False, context))

    def end_step(self, seconds: float, work: Work) -> int:
        """End the step; returns how many tokens it gave. `seconds`: that it and all other ranks' took."""
        total, batch = self.total, self._batch
        self.now += seconds
        total.busy_seconds += seconds
        total.tail_seconds += seconds if len(batch) <= TAIL_ROWS else 0.0
        total.num_steps += 1
        nums_new, nums_accepted = batch.advance()
        total.num_row_steps += sum(map(bool, nums_new))
        total.num_draft_tokens += sum(map(len, batch.drafts))
        total.num_accepted_tokens += sum(nums_accepted)
        total.num_tokens += sum(nums_new)
        batch.drafts, self._num_model_tokens = self._draft(nums_new, work)
        for row in reversed(np.flatnonzero(batch.nums_left <= 0)):
            self._end(int(row))
        return sum(nums_new)

    def _draft(self, nums_new: list[int], work: Work) -> tuple[list[list[int]], int]:
        """Drafts for the next step, by row, and how many tokens the model drafts for a row in that step."""
        model, batch = None, self._batch
        if self._num_model_tokens:
            of_requests = [request.model_drafts for request in batch.requests]
            model = drafts_at(of_requests, batch.nums_done, self._num_model_tokens)
        if self.drafter is not None:
            rows = [each.name for each in batch.requests], nums_new, batch.token_ids, batch.levels
            # If the model did not draft for it, the next step has begun already, without drafts of the index.
            next_step = NextStep(self._model is None or model is not None)
            drafts = self.drafter.draft(*rows, work, model, next_step)
            return drafts.lists(), self.drafter.to_come.num_model_tokens
        if model is None:
            return [[] for _ in batch.requests], 0
        room = (batch.nums_left - 1).tolist()
        lists = [
            [token for token in tokens[: max(0, most) if num_new else 0] if token >= 0]
            for tokens, most, num_new in zip(model.tokens.tolist(), room, nums_new, strict=True)
        ]
        return lists, self._num_model_tokens

    @property
    def _num_kept(self) -> float:
        """Tokens of the KV cache that the step fills."""
        batch = self._batch
        return batch.num_context + batch.num_verified + len(batch) * self._row_tokens

    def next_time(self) -> float | None:
        """When there is something to do: now, or once the first tool has answered; None: never again."""
        if len(self._batch) or self.queue:
            return self.now
        return max(self.now, self._at_tools[0][0]) if self._at_tools else None

    def _preempt(self) -> bool:
        """Send the newest requests back until the rest has room, or one is left; whether any went."""
        num_before = self.total.num_preemptions
        while len(self._batch) > 1 and self._num_kept > self._cluster.kv_tokens:
            row = self._batch.newest_row()
            num_done = self._batch.nums_done[row]
            self.queue.appendleft((self._remove(row), num_done))
            self.total.num_preemptions += 1
        return self.total.num_preemptions > num_before

    def _admit(self, num_left: int) -> int:
        """Fill the batch from the queue, while there are tokens left; returns how many it has prefilled."""
        num_tokens, needed = 0, self._num_kept
        while self.queue and len(self._batch) < self._cluster.max_num_seqs and num_tokens < num_left:
            request, num_done = self.queue[0]
            needed += len(request.prompt_token_ids) + num_done + 1 + self._row_tokens
            if len(self._batch) and needed > self._cluster.kv_tokens:
                break
            self.queue.popleft()
            shared, own = request.num_group_tokens, len(request.prompt_token_ids)
            if request.num_cached or request.group in self._prefilled:
                own -= request.num_cached or (own if shared is None else shared)
            self._prefilled.add(request.group)
            own = max(1, own + num_done)  # vLLM computes the last one again
            part = min(own, num_left - num_tokens)
            end = self._batch.add(request, num_done, own - part)
            if self.drafter is not None:
                names = request.group, request.num_group_tokens, request.sample
                self.drafter.add(request.name, request.prompt_token_ids, end, *names)
            num_tokens += part
        return num_tokens

    def _end(self, row: int) -> None:
        request = self._remove(row)
        if request.next_turn is not None:
            self._at_tools.append((self.now + self._cluster.tool_seconds, request.next_turn))
        elif self.drafter is not None:
            self.drafter.end_samples([request.sample])

    def _remove(self, row: int) -> Request:
        request = self._batch.remove(row)
        if self.drafter is not None:
            self.drafter.remove(request.name)
        return request


def step_together(ranks: Sequence[Engine]) -> int:
    """Run one step of data-parallel ranks, as long as the slowest's; the number of tokens that it gave."""
    begin = min(time for rank in ranks if (time := rank.next_time()) is not None)
    works = [rank.begin_step(begin) for rank in ranks]
    total = sum(work.num_tokens for work in works)
    took = max(rank.seconds(work, total - work.num_tokens) for rank, work in zip(ranks, works, strict=True))
    # What vLLM tells each of several.
    number = ranks[0].total.num_steps if len(ranks) > 1 else None
    most_tokens = max(work.num_tokens for work in works)
    told = [dataclasses.replace(work, num_tokens=most_tokens, number=number) for work in works]
    return sum(rank.end_step(took, work) for rank, work in zip(ranks, told, strict=True))
