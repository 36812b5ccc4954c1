"""Weights from the trainer to rollout engines of their own (`trainer_mode=separate_async`), over gloo.

verl's own backends for that need an accelerator. `checkpoint_engine.custom_backend_module` names this module,
and verl imports it in every process that transfers weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from torch.distributed.distributed_c10d import BroadcastOptions
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

BACKEND = "gloo"
SYNC_TIMEOUT_S = 180  # for one bucket of weights
_ALIGNMENT = 16  # bytes; a tensor of any dtype can be seen at such an offset
_OUTSIDE = -1  # the rank of an actor that sends nothing


class Endpoint(NamedTuple):
    """Where the sender's store listens."""

    host: str
    port: int


class _Header(NamedTuple):
    """What goes before the bytes of a bucket."""

    metas: list[TensorMeta]
    num_bytes: int
    is_last: bool
    failure: str = ""  # why the sender cannot go on

    def to_json(self) -> bytes:
        metas = [vars(meta) | {"dtype": str(meta.dtype).removeprefix("torch.")} for meta in self.metas]
        return json.dumps(self._replace(metas=metas)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> _Header:
        metas, *rest = json.loads(content)
        parsed = [
            TensorMeta(**meta | {"shape": torch.Size(meta["shape"]), "dtype": getattr(torch, meta["dtype"])})
            for meta in metas
        ]
        return cls(parsed, *rest)


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts buckets of weights from the first actor to all rollout workers.

    Store, process group and bucket are made for each sync, so replicas may come and go between two.

    Args:
        bucket_size: bytes sent at a time, and held in memory.
        is_master: whether this is the first actor, which sends.
        timeout_s: seconds that a process waits for another one to take part in a bucket.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = SYNC_TIMEOUT_S) -> None:
        self.bucket_size = bucket_size // _ALIGNMENT * _ALIGNMENT
        self.is_master = is_master
        self._timeout = timedelta(seconds=timeout_s)
        self._rank = _OUTSIDE
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> Endpoint | None:
        """The sender's store; None from everybody else."""
        if not self.is_master:
            return None
        import ray

        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return Endpoint(host, self._store.port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Endpoint | None]
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

    def init_process_group(self, rank: int, world_size: int, endpoint: Endpoint) -> None:
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
        bucket = torch.empty(self.bucket_size, dtype=torch.uint8)
        metas: list[TensorMeta] = []
        num_bytes = 0
        try:
            async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
                start = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
                if start + meta.chunk_size > self.bucket_size:
                    await self._send(_Header(metas, num_bytes, is_last=False), bucket)
                    metas, start = [], 0
                meta.offset = start
                num_bytes = start + meta.chunk_size
                bucket[start:num_bytes] = chunk
                metas.append(meta)
        except _TransferError:
            raise
        except Exception as error:
            await self._send(_Header([], 0, is_last=True, failure=repr(error)), bucket)
            raise
        await self._send(_Header(metas, num_bytes, is_last=True), bucket)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields each weight's name and the weight, which is valid until the next one is asked for.

        Raises RuntimeError: the sender failed, is gone or silent.
        """
        async for named in merge_weight_chunks(self._receive_chunks(), self.bucket_size):
            yield named

    async def _receive_chunks(self) -> AsyncIterator[tuple[TensorMeta, torch.Tensor]]:
        bucket = torch.empty(self.bucket_size, dtype=torch.uint8)
        is_last = False
        try:
            while not is_last:
                header = await self._receive(bucket)
                if header.failure:
                    raise _TransferError(f"the trainer could not send its weights: {header.failure}")
                for meta in header.metas:
                    yield meta, bucket[meta.offset : meta.offset + meta.chunk_size]
                is_last = header.is_last
        finally:
            if not is_last:
                self.finalize()  # also where whoever loads the weights has failed

    async def _send(self, header: _Header, bucket: torch.Tensor) -> None:
        content = torch.frombuffer(bytearray(header.to_json()), dtype=torch.uint8)
        await self._broadcast(torch.tensor([len(content)]))
        await self._broadcast(content)
        await self._broadcast(bucket[: header.num_bytes])

    async def _receive(self, bucket: torch.Tensor) -> _Header:
        length = torch.zeros(1, dtype=torch.int64)
        await self._broadcast(length)
        content = torch.empty(int(length), dtype=torch.uint8)
        await self._broadcast(content)
        header = _Header.from_json(content.numpy().tobytes())
        await self._broadcast(bucket[: header.num_bytes])
        return header

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


class _TransferError(RuntimeError):
    """Nobody is left to tell."""
