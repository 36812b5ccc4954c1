"""The drafters of a rollout server's engine, one in each engine core: how it calls them, and how they share
their history."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from itertools import chain, product
from typing import Any, TypeVar

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rollout_spec.metrics import EngineCounters, RequestCounters
from rollout_spec.vllm.control import Ended, ProposerControl
from rollout_spec.vllm.engine_cores import EngineCores
from rollout_spec.vllm.plugin import TAKE_ABORTED
from rollout_spec.vllm.proposer import proposer_of

Answer = TypeVar("Answer")
MAX_IDLE_SYNCS = 3  # weight syncs without a request, after which a sample is taken to have ended
PASS_ENDS_S = 0.5  # after which the engine cores hear of samples that have ended: a call between two steps


class Drafters:
    """Calls the drafters of an engine, adds up their counts, and notices one that does not work."""

    def __init__(self, engine: Callable[[], Any], replica_rank: int) -> None:
        self._engine, self._replica_rank = engine, replica_rank
        self._decoded = set[int]()  # engine cores, since their drafters' counters were taken
        self._aborted, self._finished, self._samples = list[str](), list[str](), set[str]()
        self._num_idle_syncs = dict[str, int]()  # of the samples whose end nobody has told
        self._passing: asyncio.Task[None] | None = None  # ends of samples on, soon
        self.defect: str | None = None
        """Why the run must end. It ends with its next report, because a weight sync is no place to fail."""

    def end_request(self, request_id: str, is_aborted: bool, core: int, has_decoded: bool) -> None:
        """A request has ended on this engine core; has_decoded: it got more than its first token."""
        (self._aborted if is_aborted else self._finished).append(request_id)
        if has_decoded:
            self._decoded.add(core)

    def end_sample(self, sample: str) -> None:
        """The sample of this name makes no more requests: its text gives up its place soon, not in a weight
        sync only."""
        self._samples.add(sample)
        self._num_idle_syncs.pop(sample, None)
        if self._passing is None or self._passing.done():
            self._passing = asyncio.create_task(self._pass_ends_on())

    async def _pass_ends_on(self) -> None:
        while self._samples:  # a call takes time, and further samples end meanwhile
            await asyncio.sleep(PASS_ENDS_S)
            samples, self._samples = self._samples, set()
            with contextlib.suppress(Exception):  # of an engine that ends: nobody needs it then
                await self.call(ProposerControl.end_samples, list(samples))

    def note_sample(self, sample: str | None) -> None:
        """A request of the sample of this name has ended. Nobody may ever say that the sample has."""
        if sample is not None:
            self._num_idle_syncs[sample] = 0

    async def note_new_weights(self, step: int) -> None:
        """The weights have changed: those of this training step are served now.

        A sample that has been idle for too long is taken to have ended.
        """
        for sample, num_syncs in list(self._num_idle_syncs.items()):
            self._num_idle_syncs[sample] = num_syncs + 1
            if num_syncs == MAX_IDLE_SYNCS:
                self.end_sample(sample)
        await self.call(ProposerControl.note_new_weights, self.take_ended(), step)

    def take_ended(self) -> Ended:
        """What has ended since the last call, which a drafter cannot see by itself."""
        taken = Ended(self._aborted, self._finished, list(self._samples))
        self._aborted, self._finished, self._samples = [], [], set()
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
        cores = EngineCores(self._engine())
        of_cores = await asyncio.gather(*(cores.call(core, TAKE_ABORTED) for core in range(len(cores))))
        return RequestCounters.sum(RequestCounters(**(counts or {})) for counts in of_cores)

    def _check(self, core: int, counts: dict[str, Any] | None, has_decoded: bool) -> None:
        where = f"engine core {core} of replica {self._replica_rank}"
        if counts is None:
            self.defect = f"{where} has no drafter of rollout_spec"
        elif has_decoded and counts["num_steps"] + counts["num_failed_steps"] == 0:
            self.defect = f"{where} decoded without calling its drafter"

    @property
    def num_cores(self) -> int:
        return len(EngineCores(self._engine()))

    async def call(self, method: Callable[..., Answer], *args: Any) -> list[Answer | None]:
        """What a method of `ProposerControl` returns in each engine core; None where none has a drafter."""
        return await asyncio.gather(*(self.call_core(core, method, *args) for core in range(self.num_cores)))

    async def call_core(self, core: int, method: Callable[..., Answer], *args: Any) -> Answer | None:
        cores = EngineCores(self._engine())
        answers = await cores.call_workers(core, "rollout_spec_call", method.__name__, *args)
        return next((answer for answer in answers if answer is not None), None)

    async def pieces(self, core: int, method: Callable[..., bytes | None], *args: Any) -> list[bytes]:
        """Those of a history whose first one the method gives; between two of them the engine can step."""
        pieces, piece = list[bytes](), await self.call_core(core, method, *args)
        while piece is not None:
            pieces.append(piece)
            piece = await self.call_core(core, ProposerControl.next_piece)
        return pieces


class SpecWorkerExtension(vLLMColocateWorkerExtension):
    """In each of the engine's workers: how `Drafters` reaches the worker's drafter."""

    def rollout_spec_call(self, method: str, *args: Any) -> Any:
        """What this method of `ProposerControl` returns; None where there is no drafter that is used."""
        proposer = proposer_of(getattr(self, "model_runner", None))
        if proposer is None or not proposer.is_used:
            return None
        return getattr(ProposerControl(proposer), method)(*args)

    def _get_drafter_model(self) -> Any:
        """The MTP head that a weight sync loads into; verl and its helpers look for it where MRV1 has it."""
        runner = self.model_runner
        config, speculator = runner.vllm_config, getattr(runner, "speculator", None)
        if config.speculative_config.model != config.model_config.model:
            return None  # a head of the user's own: no sync has its weights
        if speculator is not None:
            runner.drafter = getattr(runner, "drafter", speculator)
            runner.drafter.model = speculator.model
        return super()._get_drafter_model()


class ServerHistory:
    """Passes texts on only between two weights, or into a checkpoint: no engine step waits else.

    `is_quiet`: whether the engine has no request.
    """

    def __init__(self, drafters: Drafters, is_quiet: Callable[[], bool]) -> None:
        self._drafters, self._is_quiet = drafters, is_quiet
        self._is_sharing = False  # another server has asked
        self._lock = asyncio.Lock()  # a drafter hands on the pieces of one answer at a time
        self._shared, self.received = list[bytes](), list[bytes]()  # for the others, and from them

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
        self.received += chain.from_iterable(contents)
        if self._is_quiet():
            await self._add_received()

    async def pack(self) -> list[bytes]:
        """The whole history of this server in pieces, for a file; none where its drafter is off."""
        async with self._lock:
            await self._add_received()
            await self._drafters.call(ProposerControl.note_ended, self._drafters.take_ended())
            for core in range(self._drafters.num_cores):  # all have the same
                pieces = await self._drafters.pieces(core, ProposerControl.pack_history, Ended((), ()))
                if pieces:
                    return pieces
            return []

    async def _exchange(self) -> None:
        """Pass on what every engine core has served: at once to the other cores, later to other servers."""
        ended, cores = self._drafters.take_ended(), range(self._drafters.num_cores)
        pieces = (self._drafters.pieces(core, ProposerControl.take_history, ended) for core in cores)
        taken = await asyncio.gather(*pieces)
        self._shared += chain.from_iterable(taken)
        for core, other in product(cores, cores):
            for piece in taken[other] if core != other else ():
                await self._drafters.call_core(core, ProposerControl.add_history, [piece])
        await self._add_received()

    async def _add_received(self) -> None:
        received, self.received = self.received, []
        for piece in received:
            await self._drafters.call(ProposerControl.add_history, [piece])
