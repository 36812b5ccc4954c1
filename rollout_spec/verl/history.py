"""Shares the history between the rollout servers, so that a prompt finds its responses wherever it is served,
and keeps it in verl's checkpoints: one file for all servers, beside the state of the data loader.

Each function does nothing where `rollout.spec` keeps no history.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from rollout_spec.drafting.history import HistoryError, read_file, write_file
from rollout_spec.verl.drafters import Drafters, kept
from rollout_spec.verl.trainer import num_ranks, option, servers

FILE = "rollout_spec_history"

logger = logging.getLogger(__name__)


def keeps_history(trainer: Any) -> bool:
    return option(trainer, "method") not in (None, "off") and bool(option(trainer, "history"))


def share_history(trainer: Any) -> None:
    """Let every server add what the others have served since the last call.

    A server that is serving gives what it had at its last weight sync, and adds the others' at its next one:
    no engine step waits for that. The texts go from server to server through Ray's object store.
    """
    handles = servers(trainer) if keeps_history(trainer) else []
    if len(handles) * num_ranks(trainer) < 2:
        return
    taken = [handle.take_history.remote() for handle in handles]  # a server's own ranks share theirs here
    others = [taken[:i] + taken[i + 1 :] for i in range(len(taken))]
    ray.get([handle.add_history.remote(*parts) for handle, parts in zip(handles, others, strict=True)])


def save_history(trainer: Any) -> None:
    """Write what all servers have served to the folder of the checkpoint that is about to be saved.

    Where that fails there is a warning, and the checkpoint has no history.
    """
    if not keeps_history(trainer):
        return
    share_history(trainer)
    packed = (ray.get(handle.pack_history.remote()) for handle in servers(trainer))  # all have the same
    content = next((content for content in packed if content is not None), None)
    if content is None:
        logger.warning("rollout_spec: the checkpoint has no history: no engine gives one, and says why")
        return
    folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"
    try:
        write_file(folder / FILE, content)
    except OSError as error:
        logger.warning("rollout_spec: the checkpoint has no history: %s", error)


def remove_orphans(trainer: Any) -> None:
    """Remove the history of checkpoints whose actor verl has removed (max_actor_ckpt_to_keep)."""
    if not keeps_history(trainer):
        return
    for file in Path(trainer.config.trainer.default_local_dir).glob(f"global_step_*/{FILE}"):
        # verl may be writing the latest one still.
        is_latest = file.parent.name == f"global_step_{trainer.global_steps}"
        if not is_latest and not (file.parent / "actor").exists():
            try:
                file.unlink()
            except OSError as error:
                logger.warning("rollout_spec: cannot remove an old history: %s", error)


def load_history(trainer: Any) -> None:
    """Give every server the history of the checkpoint that training resumes from, if it has one.

    A file that cannot be used costs a warning that names it, not the training.
    """
    if not keeps_history(trainer) or not trainer.global_steps:
        return
    options = trainer.config.trainer
    if options.resume_mode == "resume_path":
        folder = Path(options.resume_from_path)
    else:
        folder = Path(options.default_local_dir) / f"global_step_{trainer.global_steps}"
    if not (folder / FILE).exists():
        logger.warning("rollout_spec: %s has no history: training begins without", folder)
        return
    try:
        content = ray.put([read_file(folder / FILE)])
    except (OSError, HistoryError) as error:
        logger.warning("rollout_spec: training goes on without the saved history: %s", error)
        return
    ray.get([handle.add_history.remote(content) for handle in servers(trainer)])


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
