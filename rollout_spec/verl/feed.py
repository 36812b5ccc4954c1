"""Finished responses on their way to the other engines of a prompt, while the step runs.

A server sends what it has finished once a second, to all others at once, through Ray's object store. Nothing
waits for that, and nothing of it outlives the weights that it was generated with. Source: grouped speculative
decoding across instances, Seer (arXiv 2511.14617), without its central server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ray

from rollout_spec.verl.trainer import num_ranks, option, servers

PERIOD_S = 1.0
MAX_BYTES = 16 << 20  # of a period; what is beyond it is not sent

logger = logging.getLogger(__name__)


def connect_servers(trainer: Any) -> None:
    """Let every server that drafts know the others; a server with several engine cores is one of its own."""
    handles = servers(trainer) if option(trainer, "method") not in (None, "off") else []
    for handle in handles:
        peers = [each for each in handles if each != handle or num_ranks(trainer) > 1]
        handle.connect.remote(peers)


class Finished(NamedTuple):
    """A response that has come to its end."""

    group: str
    text: bytes  # int32 tokens, all that come behind the group's prompt
    place: str  # the engine core that served it, by `Feed.place`


class Feed:
    """What a server has finished since it sent last.

    A peer that has not taken in one part yet misses the next, and one that fails gets no more.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._peers: list[Any] = []
        self._busy = set[Any]()
        self._groups = Counter[str]()  # requests of each in this server
        self._version: int | None = None  # of the weights that what waits was generated with
        self._waiting: list[Finished] = []
        self._num_bytes = 0
        self._sender: asyncio.Task[None] | None = None

    def connect(self, peers: Sequence[Any]) -> None:
        """Send to these servers from now on, by their Ray handles."""
        self._peers = list(peers)

    def place(self, core: int) -> str:
        """A name for an engine core of this server, as no other server has it."""
        return f"{self._name}:{core}"

    @contextlib.contextmanager
    def serving(self, group: str | None) -> Iterator[None]:
        """This server has a request of the group."""
        if group is None:
            yield
            return
        self._groups[group] += 1
        try:
            yield
        finally:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]

    def wanted(self, responses: Sequence[Finished], core: int) -> list[tuple[str, bytes]]:
        """Group and text of the responses whose siblings are served here; not what this core served."""
        place = self.place(core)
        return [
            (each.group, each.text)
            for each in responses
            if each.group in self._groups and each.place != place
        ]

    def add(self, version: int | None, group: str, token_ids: Sequence[int], core: int) -> None:
        """A response has come to its end.

        Args:
            version: of the weights that it was generated with.
            group: its name.
            token_ids: all that come behind the group's prompt.
            core: the engine core that served it.
        """
        if version != self._version:
            self._version, self._waiting, self._num_bytes = version, [], 0
        text = array("i", token_ids).tobytes()
        if not self._peers or self._num_bytes + len(text) > MAX_BYTES:
            return
        self._waiting.append(Finished(group, text, self.place(core)))
        self._num_bytes += len(text)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_later())

    async def _send_later(self) -> None:
        await asyncio.sleep(PERIOD_S)
        responses, self._waiting, self._num_bytes = self._waiting, [], 0
        self._sender = None
        reference = ray.put(responses)
        free = [peer for peer in self._peers if peer not in self._busy]
        await asyncio.gather(*(self._send(peer, self._version, reference) for peer in free))

    async def _send(self, peer: Any, version: int | None, reference: Any) -> None:
        self._busy.add(peer)
        try:
            await peer.add_siblings.remote(version, reference)
        except Exception as error:
            self._peers = [each for each in self._peers if each != peer]
            logger.warning("rollout_spec: a rollout server gets no more responses from here: %r", error)
        finally:
            self._busy.discard(peer)
