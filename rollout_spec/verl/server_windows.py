"""Counts what a rollout server serves, in windows between two weight syncs.

verl aborts what runs before a weight sync, so a request has one version of the weights from its admission to
its end. When a window ends, its counts are final. Requests that still run when a step is logged count in a
later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from contextvars import ContextVar

from rollout_spec.metrics import EngineCounters, RequestCounters, RolloutReport

ABORTED_END_S = 30.0  # for aborted requests to hand in their counts
_POLL_S = 0.005
# By asyncio task, not by request id: with full_determinism verl gives many requests one id.
_current: ContextVar[Request] = ContextVar("_current")


@dataclasses.dataclass(eq=False)
class Request:
    """One request from its arrival to its end."""

    is_training: bool
    is_admitted: bool = False  # else it waits for a weight sync, or was turned away


class Windows:
    """Counts the training requests of a server, and not those of a validation."""

    def __init__(self) -> None:
        self._open, self._ended = RolloutReport(), RolloutReport()
        self._requests: set[Request] = set()
        self._counted_until = 0.0  # seconds of rollout time
        self.is_untouched = True  # no request was admitted since the last window ended
        self.has_training = False  # a training request was, or ended since then

    @contextlib.contextmanager
    def request(self, is_training: bool) -> Iterator[Request]:
        """A request has arrived; the engine gets it when this task calls `admit`."""
        request = Request(is_training)
        self._requests.add(request)
        token = _current.set(request)
        try:
            yield request
        finally:
            _current.reset(token)
            self._count_time()
            self._requests.remove(request)

    def admit(self) -> None:
        """The engine gets the request of this task, and works on it from now on."""
        self._count_time()
        request = _current.get()
        request.is_admitted = True
        self.is_untouched = False
        self.has_training |= request.is_training

    def _count_time(self) -> None:
        """What has passed until now is rollout time if the engine had a training request."""
        now = time.perf_counter()
        if any(request.is_admitted and request.is_training for request in self._requests):
            self._open.rollout_seconds += now - self._counted_until
        self._counted_until = now

    @property
    def is_quiet(self) -> bool:
        """Whether the engine has no request."""
        return not any(request.is_admitted for request in self._requests)

    async def wait_until_quiet(self) -> bool:
        """Whether all requests, which were aborted, end in ABORTED_END_S."""
        end = time.monotonic() + ABORTED_END_S
        while not self.is_quiet and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        return self.is_quiet

    def count(self, request: Request, num_tokens: int, counts: RequestCounters | None, stop: str) -> None:
        """A request has ended. `counts`: its scheduler's, None where it gives none; `stop`: verl's."""
        if not request.is_training or not request.is_admitted:
            return
        self.has_training = True  # though it was admitted in an earlier window
        self._open.num_generated_tokens += num_tokens
        self._open.num_interrupted += stop == "aborted"
        if counts is not None:
            self._open.requests.add(counts)

    def end(self, engine: EngineCounters | None, aborted: RequestCounters) -> None:
        """The weights may change now. `engine`: what the drafter has counted since the last window ended, if
        there is one; `aborted`: the sums over the training requests that vLLM has aborted since then."""
        self._count_time()
        window = self._open.take()
        window.engine, window.aborted = engine, aborted
        if self.has_training:
            self._ended.add(window)
        self.is_untouched, self.has_training = True, False

    def take(self) -> RolloutReport:
        """The sums over the windows that have ended since the last call."""
        return self._ended.take()
