"""Has rollout servers share their history, and keeps it in verl's checkpoints.

So a prompt finds its earlier responses wherever it is served. A checkpoint has one file for all servers,
beside the state of the data loader. Where `rollout.spec` keeps no history, these functions do nothing.
"""

import logging
from pathlib import Path
from typing import Any

import ray

from rollout_spec.config import UserError
from rollout_spec.drafting.history_pieces import HistoryError, read_file
from rollout_spec.files import write_files
from rollout_spec.verl.settings import ROLLOUT, number, value
from rollout_spec.verl.trainer_servers import servers

FILE = "rollout_spec_history"

_with_actor: set[Path] = set()  # checkpoints that this process has seen complete

logger = logging.getLogger(__name__)


def keeps_history(trainer: Any) -> bool:
    is_drafting = value(trainer.config, "rollout.spec.method") == "sam"
    return is_drafting and bool(value(trainer.config, "rollout.spec.history"))


def share_history(trainer: Any) -> None:
    """Let every server add what the others have served since the last call; the first one begins it.

    A server that is serving gives what it had at its last weight sync, and adds the others' at its next one.
    """
    handles = servers(trainer) if keeps_history(trainer) else []
    if len(handles) * number(trainer.config, f"{ROLLOUT}.data_parallel_size") < 2:
        return
    taken = [handle.take_history.remote() for handle in handles]  # a server's own ranks share theirs here
    others = [taken[:i] + taken[i + 1 :] for i in range(len(taken))]
    ray.get([handle.add_history.remote(*parts) for handle, parts in zip(handles, others, strict=True)])


def save_history(trainer: Any) -> None:
    """Write what all servers have served into the folder of the checkpoint that is about to be saved.

    If that fails, there is a warning and the checkpoint has no history.
    """
    if not keeps_history(trainer):
        return
    share_history(trainer)
    packed = (ray.get(handle.pack_history.remote()) for handle in servers(trainer))  # all have the same
    pieces = next(filter(None, packed), None)
    if pieces is None:
        logger.warning("rollout_spec: the checkpoint has no history: no engine gives one; its log says why")
        return
    try:
        write_files(_checkpoint(trainer), {FILE: b"".join(pieces)})
    except UserError as error:
        logger.warning("rollout_spec: the checkpoint has no history: %s", error)


def remove_orphans(trainer: Any) -> None:
    """Remove the history of checkpoints whose actor verl has removed (max_actor_ckpt_to_keep).

    Those of an actor that was never seen here stay: it may be on another node.
    """
    if not keeps_history(trainer):
        return
    latest = _checkpoint(trainer)  # which verl may still be writing
    for file in latest.parent.glob(f"global_step_*/{FILE}"):
        if (file.parent / "actor").exists():
            _with_actor.add(file.parent)
        elif file.parent in _with_actor and file.parent != latest:
            try:
                file.unlink()
            except OSError as error:
                logger.warning("rollout_spec: cannot remove an old history: %s", error)


def load_history(trainer: Any) -> None:
    """Give every server the history of the checkpoint that training resumes from, if it has one.

    A file that cannot be used costs a warning that names it, and training goes on.
    """
    if not keeps_history(trainer) or not trainer.global_steps:
        return
    options = trainer.config.trainer
    folder = Path(options.resume_from_path) if options.resume_mode == "resume_path" else _checkpoint(trainer)
    if not (folder / FILE).exists():
        logger.warning("rollout_spec: %s has no history: training begins without", folder)
        return
    try:
        content = ray.put(read_file(folder / FILE))
    except (OSError, HistoryError) as error:
        logger.warning("rollout_spec: training goes on without the saved history: %s", error)
        return
    ray.get([handle.add_history.remote(content) for handle in servers(trainer)])


def _checkpoint(trainer: Any) -> Path:
    """Its folder, of the current step."""
    return Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"
