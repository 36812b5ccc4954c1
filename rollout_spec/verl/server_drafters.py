"""The drafters of a rollout server's engine, one in each engine core, as the server calls them."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from rollout_spec.metrics import EngineCounters, RequestCounters
from rollout_spec.vllm.engine_cores import EngineCores
from rollout_spec.vllm.plugin import TAKE_ABORTED
from rollout_spec.vllm.proposing.control import Ended, ProposerControl

Answer = TypeVar("Answer")
TELL_ENDED_AFTER_S = 0.5  # after a sample's end the engine cores are told: a call between two steps


class Drafters:
    """Calls the drafters of an engine, adds up their counts, and notices one that does not work."""

    def __init__(self, engine: Callable[[], Any], replica_rank: int) -> None:
        self._engine, self._replica_rank = engine, replica_rank
        self._decoded = set[int]()  # engine cores, since their drafters' counters were taken
        self._aborted, self._finished, self._ended_samples = list[str](), list[str](), set[str]()
        self._telling: asyncio.Task[None] | None = None
        self.defect: str | None = None
        """Why the run must end. It ends with its next report, because a weight sync is no place to fail."""

    def end_request(self, request_id: str, is_aborted: bool, core: int, has_decoded: bool) -> None:
        """A request has ended on this engine core; has_decoded: it got more than its first token."""
        (self._aborted if is_aborted else self._finished).append(request_id)
        if has_decoded:
            self._decoded.add(core)

    def end_sample(self, sample: str) -> None:
        """The sample of this name makes no more requests: its text gives up its place soon."""
        self._ended_samples.add(sample)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_ended_samples())

    async def _tell_ended_samples(self) -> None:
        await asyncio.sleep(TELL_ENDED_AFTER_S)
        while self._ended_samples:  # a call takes time, and further samples end meanwhile
            samples, self._ended_samples = self._ended_samples, set()
            with contextlib.suppress(Exception):  # of an engine that ends: nobody needs it then
                await self.call(ProposerControl.end_samples, list(samples))
            await asyncio.sleep(TELL_ENDED_AFTER_S)

    async def note_new_weights(self, step: int) -> None:
        """The weights have changed: those of this training step are served now."""
        await self.call(ProposerControl.note_new_weights, self.take_ended(), step)

    def take_ended(self) -> Ended:
        """What has ended since the last call, which a drafter cannot see by itself."""
        taken = Ended(self._aborted, self._finished, list(self._ended_samples))
        self._aborted, self._finished, self._ended_samples = [], [], set()
        return taken

    async def take_counters(self) -> EngineCounters | None:
        """The sums over the engine cores; None where none has a drafter."""
        decoded, self._decoded = self._decoded, set()
        of_cores = await self.call(ProposerControl.take_counters)
        for core, counts in enumerate(of_cores):
            self._check(core, counts, core in decoded)
        found = [EngineCounters(**counts) for counts in of_cores if counts is not None]
        return EngineCounters.sum(found) if found else None

    async def take_aborted(self) -> RequestCounters:
        """The sums over the requests that vLLM has aborted."""
        cores = self.cores
        of_cores = await asyncio.gather(*(cores.call(core, TAKE_ABORTED) for core in range(len(cores))))
        return RequestCounters.sum(RequestCounters(**(counts or {})) for counts in of_cores)

    def _check(self, core: int, counts: dict[str, Any] | None, has_decoded: bool) -> None:
        where = f"engine core {core} of replica {self._replica_rank}"
        if counts is None:
            self.defect = f"{where} has no drafter of rollout_spec"
        elif has_decoded and counts["num_steps"] + counts["num_failed_steps"] == 0:
            self.defect = f"{where} decoded without calling its drafter"

    @property
    def cores(self) -> EngineCores:
        return EngineCores(self._engine())

    async def call(self, method: Callable[..., Answer], *args: Any) -> list[Answer | None]:
        """What a method of `ProposerControl` returns in each engine core; None where none has a drafter."""
        return await asyncio.gather(*(self.call_core(core, method, *args) for core in range(len(self.cores))))

    async def call_core(self, core: int, method: Callable[..., Answer], *args: Any) -> Answer | None:
        answers = await self.cores.call_workers(core, "rollout_spec_call", method.__name__, *args)
        return next((answer for answer in answers if answer is not None), None)

    async def pieces(self, core: int, method: Callable[..., bytes | None], *args: Any) -> list[bytes]:
        """Those of a history whose first one the method gives; between two of them the engine can step."""
        pieces, piece = list[bytes](), await self.call_core(core, method, *args)
        while piece is not None:
            pieces.append(piece)
            piece = await self.call_core(core, ProposerControl.next_piece)
        return pieces
