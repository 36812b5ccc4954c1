"""A rollout server's part in sharing the history: between its own engine cores, and with other servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from rollout_spec.verl.engine_drafters import Drafters, kept


class ServerHistory:
    """Hands texts on between two versions of the weights only: no engine step waits for that.

    Args:
        drafters: of the server's engine.
        is_quiet: whether the engine works for nobody.
    """

    def __init__(self, drafters: Drafters, is_quiet: Callable[[], bool]) -> None:
        self._drafters, self._is_quiet = drafters, is_quiet
        # What other servers are to have, once one has asked for it, and what this one is to take in.
        self._is_sharing, self._shared, self.received = False, list[bytes](), list[bytes]()

    async def end_window(self) -> None:
        """No request is in flight."""
        if self._is_sharing:
            await self._exchange()

    async def take(self) -> list[bytes]:
        """The responses that this server has served, each once, as its history keeps them.

        While requests are in flight, those up to the last weight sync.
        """
        self._is_sharing = True
        if self._is_quiet():
            await self._exchange()
        taken, self._shared = self._shared, []
        return taken

    async def add(self, contents: Sequence[Sequence[bytes]]) -> None:
        """Add what other servers' `take` returned, or what is in the file of a checkpoint.

        While requests are in flight the engine does not wait for that: it is done at the next weight sync.
        """
        self.received += chain.from_iterable(contents)
        if self._is_quiet():
            await self._add_received()

    async def pack(self) -> bytes | None:
        """The whole history of this server, for a file; None where its drafter is off."""
        await self._add_received()
        packed = await self._drafters.call("pack_history", *self._drafters.take_ended())
        return next(iter(kept(packed)), None)  # all engine cores have the same

    async def _exchange(self) -> None:
        """Hand on what every engine core has served: to the others at once, to other servers when asked."""
        taken = await self._drafters.call("take_history", *self._drafters.take_ended())
        self._shared += kept(taken)
        if len(taken) > 1:
            others = [kept(taken[:core] + taken[core + 1 :]) for core in range(len(taken))]
            await self._drafters.call_each("add_history", [(texts,) for texts in others])
        await self._add_received()

    async def _add_received(self) -> None:
        if self.received:
            received, self.received = self.received, []
            await self._drafters.call("add_history", received)
