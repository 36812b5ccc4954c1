"""Finished responses on their way to the other engines of a prompt, while the step runs.

A server sends what it has finished to all others at once, through Ray's object store, and hands on to its
engine what it gets of the prompts that it serves itself. Both happen every PERIOD_S: an engine stops for a
call between two steps, and not for one from every peer. Nothing waits for a response to arrive, and none
outlives the weights that it was generated with. With 1,000 requests in flight, verl's limit for calls of a
server, a server takes in nothing until there are fewer.

Source: grouped speculative decoding across instances, Seer (arXiv 2511.14617), without its central server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ray

from rollout_spec.verl.trainer import num_ranks, option, servers

PERIOD_S = 0.5  # at either end
MAX_BYTES = 16 << 20  # that wait at either end; what is beyond it is left out

logger = logging.getLogger(__name__)


def connect_servers(trainer: Any) -> None:
    """Let every server that drafts know the others, also one that a call has failed to reach.

    A server with several data-parallel ranks is one of its own, unless siblings are sent to one rank.
    """
    handles = servers(trainer) if option(trainer, "method") not in (None, "off") else []
    has_own_peers = num_ranks(trainer) > 1 and option(trainer, "routing") != "group"
    for handle in handles:
        handle.connect.remote([each for each in handles if each != handle or has_own_peers])


class Finished(NamedTuple):
    """A response, or a turn of one, that has come to its end."""

    group: str
    text: bytes  # int32 tokens
    place: str  # the engine core that served it, by a name that no other server's has


class Mailbox:
    """Responses that wait to be delivered together, one part at a time.

    Args:
        deliver: called with the version of the weights, and the responses that came in a PERIOD_S.
    """

    def __init__(self, deliver: Callable[[int | None, list[Finished]], Awaitable[None]]) -> None:
        self._deliver = deliver
        self._version: int | None = None
        self._waiting: list[Finished] = []
        self._num_bytes = 0
        self._task: asyncio.Task[None] | None = None

    def add(self, version: int | None, response: Finished) -> None:
        """A response that was generated with this version of the weights; those of other versions go."""
        if version != self._version:
            self._version, self._waiting, self._num_bytes = version, [], 0
        if self._num_bytes + len(response.text) > MAX_BYTES:
            return
        self._waiting.append(response)
        self._num_bytes += len(response.text)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(PERIOD_S)
            part, self._waiting, self._num_bytes = self._waiting, [], 0
            await self._deliver(self._version, part)


class Feed:
    """The two mailboxes of a server.

    A peer that has not taken in one part yet misses the next, and one that fails gets no more.

    Args:
        take: called with the version of the weights, and what peers have finished of the groups served here.
    """

    def __init__(self, take: Callable[[int | None, list[Finished]], Awaitable[None]]) -> None:
        self._name = uuid.uuid4().hex
        self._outbox, self._inbox = Mailbox(self._send), Mailbox(take)
        self._peers: list[Any] = []
        self._sending: dict[Any, asyncio.Task[None]] = {}  # to each peer, last
        # Requests in flight of each; where there are 0, there were some with the weights of now.
        self._groups = Counter[str | None]()

    def connect(self, peers: Sequence[Any]) -> None:
        """Send to these servers from now on, by their Ray handles."""
        self._peers = list(peers)

    def place(self, core: int) -> str:
        """The name of an engine core of this server."""
        return f"{self._name}:{core}"

    @contextlib.contextmanager
    def serving(self, group: str | None) -> Iterator[None]:
        """This server has a request of the group; None: of none."""
        self._groups[group] += 1
        try:
            yield
        finally:
            self._groups[group] -= 1

    def end_step(self) -> None:
        """The weights have changed."""
        self._groups = +self._groups

    def finish(self, version: int | None, group: str, token_ids: Sequence[int], core: int) -> None:
        """A response has come to its end.

        Args:
            version: of the weights that it was generated with.
            group: its name.
            token_ids: of the response, or of its last turn.
            core: the engine core that served it.
        """
        if self._peers:
            text = array("i", token_ids).tobytes()
            self._outbox.add(version, Finished(group, text, self.place(core)))

    def receive(self, version: int | None, responses: Sequence[Finished]) -> None:
        """A peer has finished these."""
        for response in responses:
            if response.group in self._groups:
                self._inbox.add(version, response)

    async def _send(self, version: int | None, responses: list[Finished]) -> None:
        reference = ray.put(responses)
        for peer in self._peers:
            if peer not in self._sending or self._sending[peer].done():
                self._sending[peer] = asyncio.create_task(self._send_to(peer, version, reference))

    async def _send_to(self, peer: Any, version: int | None, reference: Any) -> None:
        try:
            await peer.receive_siblings.remote(version, reference)
        except Exception as error:
            self._peers = [each for each in self._peers if each != peer]
            logger.warning("rollout_spec: a rollout server gets no more responses from here: %r", error)
