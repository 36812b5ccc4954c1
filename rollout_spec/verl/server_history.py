"""How the engine cores of a rollout server share their history, with each other and with other servers."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain, product

from rollout_spec.verl.server_drafters import Drafters
from rollout_spec.vllm.proposing.control import NONE_HAS_ENDED, ProposerControl


class ServerHistory:
    """Exchanges texts only while the engine has no request (`is_quiet`), or for a checkpoint. So no
    step waits for it."""

    def __init__(self, drafters: Drafters, is_quiet: Callable[[], bool]) -> None:
        self._drafters, self._is_quiet = drafters, is_quiet
        self._is_sharing = False  # since the first `take`: it collects what it serves, for the others
        self._lock = asyncio.Lock()  # a drafter hands on the pieces of one answer at a time
        self._shared, self._received = list[bytes](), list[bytes]()  # for the others, and from them

    async def end_window(self) -> None:
        """The engine has no request."""
        if self._is_sharing:
            async with self._lock:
                await self._exchange()

    async def take(self) -> list[bytes]:
        """The responses that this server has served, each once, as its history keeps them.

        While requests are in flight, those up to the last weight sync.
        """
        self._is_sharing = True
        async with self._lock:
            if self._is_quiet():
                await self._exchange()
            taken, self._shared = self._shared, []
            return taken

    async def add(self, contents: Sequence[Sequence[bytes]]) -> None:
        """Add what other servers' `take` returned, or what the file of a checkpoint holds.

        While requests are in flight the engine does not wait for that: it follows at the next weight sync.
        """
        self._received += chain.from_iterable(contents)
        if self._is_quiet():
            await self._add_received()

    async def pack(self) -> list[bytes]:
        """The whole history of this server in pieces, for a file; none where its drafter is off."""
        async with self._lock:
            await self._add_received()
            await self._drafters.call(ProposerControl.note_ended, self._drafters.take_ended())
            for core in range(len(self._drafters.cores)):  # all have the same
                pieces = await self._drafters.pieces(core, ProposerControl.pack_history, NONE_HAS_ENDED)
                if pieces:
                    return pieces
            return []

    async def _exchange(self) -> None:
        """Pass on what every engine core has served: at once to the other cores, later to other servers."""
        ended, cores = self._drafters.take_ended(), range(len(self._drafters.cores))
        pieces = (self._drafters.pieces(core, ProposerControl.take_history, ended) for core in cores)
        taken = await asyncio.gather(*pieces)
        self._shared += chain.from_iterable(taken)
        for core, other in product(cores, cores):
            for piece in taken[other] if core != other else ():
                await self._drafters.call_core(core, ProposerControl.add_history, [piece])
        await self._add_received()

    async def _add_received(self) -> None:
        received, self._received = self._received, []
        for piece in received:
            await self._drafters.call(ProposerControl.add_history, [piece])
