"""Weights from the trainer to rollout engines of their own (`trainer_mode=separate_async`), over gloo.

verl's own backends for that need an accelerator. `checkpoint_engine.custom_backend_module` names this module,
and verl imports it in every process that transfers weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "gloo"
SYNC_TIMEOUT_S = 180  # in which all others must take part in a weight
_OUTSIDE = -1  # the rank of an actor that sends nothing

_Endpoint = tuple[str, int]  # where the sender's store listens: host and port


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts weights, one after the other, from the first actor to all rollout workers.

    Store and process group are made for each sync, so replicas may come and go between two.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = SYNC_TIMEOUT_S) -> None:
        """bucket_size: verl's, but a weight is sent as a whole; is_master: the first actor, which sends."""
        self.is_master = is_master
        self._timeout = timedelta(seconds=timeout_s)
        self._rank = _OUTSIDE
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> _Endpoint | None:
        """The sender's store; None from everybody else."""
        if not self.is_master:
            return None
        import ray

        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[_Endpoint | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        world_size = 1 + rollout_world_size
        ranks = [0] + [_OUTSIDE] * (actor_wg_world_size - 1), list(range(1, world_size))
        actors, rollouts = (
            dict[str, list[Any]](
                rank=group, world_size=[world_size] * len(group), endpoint=[metadata[0]] * len(group)
            )
            for group in ranks
        )
        return actors, rollouts

    def init_process_group(self, rank: int, world_size: int, endpoint: _Endpoint) -> None:
        self._rank = rank
        if rank == _OUTSIDE:
            return
        if self._store is None:
            self._store = TCPStore(*endpoint, is_master=False, timeout=self._timeout)
        self._group = ProcessGroupGloo(self._store, rank, world_size, self._timeout)

    def finalize(self) -> None:
        """Close the connections, on which the others wait no longer then."""
        self._group = self._store = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Send all weights; an actor outside the group walks through them, since to gather one takes all.

        Raises RuntimeError: a receiver is gone or silent, or a weight could not be had (the receivers fail
        too).
        """
        if self._rank == _OUTSIDE:
            for _ in weights:
                pass
            return
        try:
            for name, weight in weights:
                await self._say([name, list(weight.shape), str(weight.dtype).removeprefix("torch.")])
                await self._broadcast(_bytes_of(weight))
        except _TransferError:
            raise
        except Exception as error:
            await self._say(repr(error))
            raise
        await self._say(None)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields names and weights. Raises RuntimeError: the sender failed, is gone or silent."""
        said: Any = ""
        try:
            while (said := await self._hear()) is not None:
                if isinstance(said, str):
                    raise _TransferError(f"the trainer could not send its weights: {said}")
                name, shape, dtype = said
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                await self._broadcast(_bytes_of(weight))
                yield name, weight
        finally:
            if said is not None:
                self.finalize()  # also where whoever loads the weights has failed

    async def _say(self, what: list[Any] | str | None) -> None:
        """Name, shape and dtype of the next weight, or why none can come; None: there are no more."""
        content = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
        await self._broadcast(torch.tensor([len(content)]))
        await self._broadcast(content)

    async def _hear(self) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        await self._broadcast(length)
        content = torch.empty(int(length), dtype=torch.uint8)
        await self._broadcast(content)
        return json.loads(content.numpy().tobytes())

    async def _broadcast(self, tensor: torch.Tensor) -> None:
        """Send from rank 0 to all, in a thread: an actor's other calls go on."""
        group = self._group
        assert group is not None, "init_process_group comes first"
        if not len(tensor):
            return
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            await asyncio.to_thread(lambda: group.broadcast([tensor], options).wait())
        except RuntimeError as error:
            self.finalize()  # the others must not wait for this one
            raise _TransferError(
                f"the weight transfer broke off at rank {self._rank}: {error}. The process that failed first "
                "has said why in its own log."
            ) from error


def _bytes_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(-1).view(torch.uint8)


class _TransferError(RuntimeError):
    """Nobody is left to tell."""
