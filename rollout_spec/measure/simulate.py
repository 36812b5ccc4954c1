"""Whole rollouts without a model: recorded responses, the real drafter and gate, and a table of step times.

An engine serves its requests first come, first served, at most max_num_seqs at a time; a step takes what the
table says for the tokens it verifies; a draft token is accepted exactly when it equals the recorded token.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.config import SpecConfig, UserError
from rollout_spec.drafting.drafter import Drafter
from rollout_spec.drafting.history import History
from rollout_spec.drafting.native import Int32Array
from rollout_spec.drafting.step_cost import never_falling
from rollout_spec.measure.replay import Rollout

_Point = tuple[float, float, float]


class StepTimesError(UserError):
    """A table of step times that cannot be used; the message says why."""


class StepTimes:
    """Seconds of an engine step by the tokens it verifies.

    Linear between the points; before the first constant, behind the last on the line through the last two.
    What falls from point to point is noise and is averaged out.

    Args:
        points: (number of tokens, seconds, weight), any order.
        drafted: the same for steps with drafts, where engines run these through other code; else as `points`.

    Raises:
        StepTimesError: no points, or one that is not positive.
    """

    def __init__(self, points: Iterable[_Point], drafted: Iterable[_Point] = ()) -> None:
        self._plain = _curve(points)
        drafted = list(drafted)
        self._drafted = _curve(drafted) if drafted else self._plain

    @classmethod
    def parse(cls, text: str) -> StepTimes:
        """From "8:0.085,16:0.09,32:0.17", tokens and seconds, or the JSON file that `bench engine` writes."""
        path = Path(text)
        if path.is_file():
            return cls._from_file(path)
        try:
            return cls(
                [(float(n), float(s), 1.0) for n, s in (point.split(":") for point in text.split(","))]
            )
        except ValueError as error:
            raise StepTimesError(
                f"step times {text!r}: neither a file nor tokens:seconds,..., {error}"
            ) from None

    @classmethod
    def _from_file(cls, path: Path) -> StepTimes:
        try:
            table = json.loads(path.read_text())["step_times"]
            curves: dict[bool, list[_Point]] = {False: [], True: []}
            for row in table:
                point = (float(row["num_tokens"]), float(row["seconds"]), float(row["num_steps"]))
                curves[bool(row["drafted"])].append(point)
        except (ValueError, KeyError, TypeError) as error:
            raise StepTimesError(f"{path}: no step_times of `rollout-spec bench engine`: {error!r}") from None
        return cls(curves[False], curves[True])

    def seconds(self, num_tokens: int, drafted: bool) -> float:
        at, seconds = self._drafted if drafted else self._plain
        if num_tokens <= at[-1] or len(at) == 1:
            return float(np.interp(num_tokens, at, seconds))
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]))
        return float(seconds[-1] + slope * (num_tokens - at[-1]))


def _curve(points: Iterable[_Point]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    table = np.array(sorted(points), float).reshape(-1, 3)
    at, seconds, weights = table.T
    if not len(at) or not np.isfinite(table).all() or at[0] < 1 or min(*seconds, *weights) <= 0:
        raise StepTimesError("step times: need at least one point, tokens from 1 and seconds above 0")
    return at, never_falling(seconds, weights)


@dataclasses.dataclass(frozen=True)
class Request:
    name: str
    group: str
    prompt_token_ids: Int32Array
    response: Int32Array


@dataclasses.dataclass
class EngineRun:
    """What one engine did, in one rollout or in all."""

    seconds: float = 0.0
    tail_seconds: float = 0.0
    """Of these, with at most tail_rows requests running."""
    num_steps: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


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


def requests_of(lines: Sequence[Rollout], group_size: int | None) -> list[Request]:
    """One rollout: the first `group_size` responses of every line, in the order of the lines.

    A response without a token takes no step.
    """
    return [
        Request(f"{i}.{j}", line.group, line.prompt_token_ids, response)
        for i, line in enumerate(lines)
        for j, response in enumerate(line.responses[:group_size])
        if len(response)
    ]


def assign(requests: Sequence[Request], num_replicas: int, by_group: bool) -> list[list[Request]]:
    """The requests of every replica: in turn, as verl's least-loaded routing does, or by groups, in turn."""
    engines: list[list[Request]] = [[] for _ in range(num_replicas)]
    groups = list(dict.fromkeys(request.group for request in requests))
    turn = {group: i % num_replicas for i, group in enumerate(groups)}
    for i, request in enumerate(requests):
        engines[turn[request.group] if by_group else i % num_replicas].append(request)
    return engines


class Engine:
    """One rollout engine.

    A request's prompt is prefilled in the step that admits it, once per group (prefix caching), and its
    tokens count as verified ones.

    Args:
        config: of the drafter; method off: no drafts.
        tail_rows: the tail is the time with at most so many requests running.
    """

    def __init__(self, config: SpecConfig, times: StepTimes, max_num_seqs: int, tail_rows: int) -> None:
        self.total = EngineRun()
        """Of all rollouts so far."""
        self.drafter = Drafter(config, clock=lambda: self.total.seconds) if config.enabled else None
        self._times, self._max_num_seqs, self._tail_rows = times, max_num_seqs, tail_rows
        self._queue: deque[Request] = deque()
        self._names: list[str] = []
        self._drafts: list[list[int]] = []
        self._prefilled: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._queue)

    def rollout(self, requests: Sequence[Request], on_tokens: Callable[[int], None] | None = None) -> float:
        """Serve the requests of one training step; returns the seconds it took.

        Args:
            on_tokens: called with the tokens of each engine step.
        """
        begin = self.total.seconds
        self.enqueue(requests)
        while self._queue or self._names:
            num_gained = self.step()
            if on_tokens is not None:
                on_tokens(num_gained)
        if self.drafter is not None:
            self.drafter.clear()  # the weights change
        return self.total.seconds - begin

    def enqueue(self, requests: Sequence[Request]) -> None:
        """The requests of a rollout, while none is left of the one before."""
        self._queue.extend(requests)
        num_rows = min(self._max_num_seqs, len(requests))
        longest = max((len(r.prompt_token_ids) + len(r.response) for r in requests), default=0)
        self._token_ids = np.zeros((num_rows, longest), np.int32)
        self._levels, self._ends = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        self._prefilled.clear()

    def step(self) -> int:
        """One engine step; returns the tokens it gave."""
        result = self.total
        num_tokens = self._admit() + len(self._names) + sum(map(len, self._drafts))
        num_running = len(self._names)
        seconds = self._times.seconds(num_tokens, any(self._drafts))
        result.seconds += seconds
        result.tail_seconds += seconds if num_running <= self._tail_rows else 0.0
        result.num_steps += 1
        nums_new = self._verify()
        num_gained = sum(nums_new)
        result.num_tokens += num_gained
        self._levels[:num_running] += nums_new
        self._drafts = [[] for _ in self._names]
        if self.drafter is not None:
            self._drafts = self.drafter.step(self._names, nums_new, self._token_ids, self._levels)
        for row in reversed(np.flatnonzero(self._levels[:num_running] >= self._ends[:num_running])):
            self._remove(int(row))
        return num_gained

    def _admit(self) -> int:
        """Fill the batch; returns the tokens to prefill."""
        num_tokens = 0
        while self._queue and len(self._names) < self._max_num_seqs:
            request = self._queue.popleft()
            row, prompt = len(self._names), request.prompt_token_ids
            end = len(prompt) + len(request.response)
            self._token_ids[row, : len(prompt)] = prompt
            self._token_ids[row, len(prompt) : end] = request.response
            self._levels[row], self._ends[row] = len(prompt), end
            self._names.append(request.name)
            self._drafts.append([])
            if self.drafter is not None:
                self.drafter.open(request.name, prompt, end, request.group)
            if request.group not in self._prefilled:
                self._prefilled.add(request.group)
                num_tokens += len(prompt)
        return num_tokens

    def _verify(self) -> list[int]:
        """The tokens that every row gets: the accepted ones of its draft and one more."""
        nums_new = [1] * len(self._names)
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

    def _remove(self, row: int) -> None:
        """End a request; the last row takes its place, as in an engine's batch."""
        last = len(self._names) - 1
        if self.drafter is not None:
            self.drafter.close(self._names[row])
        for rows in (self._token_ids, self._levels, self._ends):
            rows[row] = rows[last]
        self._names[row], self._drafts[row] = self._names[last], self._drafts[last]
        self._names.pop()
        self._drafts.pop()


@dataclasses.dataclass(frozen=True)
class Cluster:
    num_replicas: int
    max_num_seqs: int
    group_size: int | None  # None: all responses of a line
    by_group: bool = False


def simulate(
    lines: Sequence[Rollout],
    cluster: Cluster,
    config: SpecConfig,
    times: StepTimes,
    tail_rows: int,
    on_tokens: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The rollouts of a trace on a cluster, one after the other; each takes as long as its slowest replica.

    With config.history the replicas share what they have served after each rollout, as verl's do.

    Returns:
        makespan_s, of all rollouts; tail_share, of the time that engines work, with at most tail_rows
        requests running; tokens_per_s; acceptance_rate (0 without drafts).

    The trace must have a response with a token in it.
    """
    engines = [Engine(config, times, cluster.max_num_seqs, tail_rows) for _ in range(cluster.num_replicas)]
    makespan = 0.0
    for rollout in rollouts_of(lines):
        parts = assign(requests_of(rollout, cluster.group_size), cluster.num_replicas, cluster.by_group)
        makespan += max(engine.rollout(part, on_tokens) for engine, part in zip(engines, parts, strict=True))
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
        "acceptance_rate": totals["num_accepted_tokens"] / max(1, totals["num_draft_tokens"]),
    }


def _share_history(histories: Sequence[History]) -> None:
    taken = [history.take_new() for history in histories]
    for i, history in enumerate(histories):
        for content in taken[:i] + taken[i + 1 :]:
            history.merge(content)
