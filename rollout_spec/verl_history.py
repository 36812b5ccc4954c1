"""Shares the history between the rollout servers, so that a prompt finds its responses wherever it is served,
and keeps it in verl's checkpoints: one file for all servers, beside the state of the data loader."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_spec.history import HistoryError, read_file, write_file
from rollout_spec.patches import Patch, replace_function
from rollout_spec.verl_trainer import option, servers

FILE = "rollout_spec_history"

_SHARE = Patch(
    name="verl-history-share",
    reason="a rollout server does not know the others, nor when a step has ended",
    upstream="verl/trainer/ppo/v1/trainer_base.py, PPOTrainer._compute_metrics",
    until="verl has a callback at the end of a step",
)
_SAVE = Patch(
    name="verl-history-save",
    reason="verl's checkpoint_callback_class is one class, the user's own, and comes when the save is over",
    upstream="verl/trainer/ppo/v1/trainer_base.py, PPOTrainer._save_checkpoint",
    until="verl has a list of callbacks before a checkpoint is complete",
)
_LOAD = Patch(
    name="verl-history-load",
    reason="verl has no callback for a resumed checkpoint",
    upstream="verl/trainer/ppo/v1/trainer_base.py, PPOTrainer._load_checkpoint",
    until="verl has one",
)

logger = logging.getLogger(__name__)


def install() -> None:
    """Wrap the V1 trainer's checkpoints and the end of its steps. Called where verl_metrics.install is."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    compute, save, load = (
        PPOTrainer._compute_metrics,
        PPOTrainer._save_checkpoint,
        PPOTrainer._load_checkpoint,
    )

    @functools.wraps(compute)
    def compute_and_share(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = compute(self, *args, **kwargs)
        if keeps_history(self):
            share(servers(self))
        return result

    @functools.wraps(save)
    def save_with_history(self: Any) -> None:
        # First: verl's last act is to declare the checkpoint complete.
        if keeps_history(self):
            save_history(self)
        save(self)
        if keeps_history(self):
            remove_orphans(Path(self.config.trainer.default_local_dir), self.global_steps)

    @functools.wraps(load)
    def load_with_history(self: Any) -> None:
        load(self)
        if keeps_history(self) and self.global_steps:
            load_history(self)

    replace_function(PPOTrainer, "_compute_metrics", compute_and_share, patch=_SHARE)
    for name, function, patch in (
        ("_save_checkpoint", save_with_history, _SAVE),
        ("_load_checkpoint", load_with_history, _LOAD),
    ):
        replace_function(PPOTrainer, name, function, patch=patch, expected_signature="(self)")


def keeps_history(trainer: Any) -> bool:
    return option(trainer, "method") not in (None, "off") and bool(option(trainer, "history"))


def share(handles: Sequence[Any]) -> None:
    """Let every server add what the others have served since the last call.

    The texts go from server to server through Ray's object store, not through this process.

    Args:
        handles: actors with the methods take_history and add_history of SpecHttpServer, none of them serving.
    """
    import ray

    if len(handles) < 2:
        return
    taken = [handle.take_history.remote() for handle in handles]
    others = [taken[:i] + taken[i + 1 :] for i in range(len(taken))]
    added = [handle.add_history.remote(*parts) for handle, parts in zip(handles, others, strict=True)]
    ray.get(added)


def save_history(trainer: Any) -> None:
    """Write what all servers have served to the folder of the checkpoint that is about to be saved.

    Where that fails there is a warning, and the checkpoint has no history.
    """
    import ray

    handles = servers(trainer)
    share(handles)
    packed = (ray.get(handle.pack_history.remote()) for handle in handles)  # with luck the first is enough
    content = next((content for content in packed if content is not None), None)
    if content is None:
        logger.warning("rollout_spec: the checkpoint has no history: no engine gives one, and says why")
        return
    folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}"
    try:
        write_file(folder / FILE, content)
    except OSError as error:
        logger.warning("rollout_spec: the checkpoint has no history: %s", error)


def remove_orphans(folder: Path, latest_step: int) -> None:
    """Remove the history of checkpoints whose actor verl has removed (max_actor_ckpt_to_keep)."""
    for file in folder.glob(f"global_step_*/{FILE}"):
        is_latest = file.parent.name == f"global_step_{latest_step}"  # which may be written still
        if not is_latest and not (file.parent / "actor").exists():
            try:
                file.unlink()
            except OSError as error:
                logger.warning("rollout_spec: cannot remove an old history: %s", error)


def load_history(trainer: Any) -> None:
    """Give every server the history of the checkpoint that training resumes from, if it has one.

    A file that cannot be used costs a warning that names it, not the training.
    """
    import ray

    options = trainer.config.trainer
    if options.resume_mode == "resume_path":
        folder = Path(options.resume_from_path)
    else:
        folder = Path(options.default_local_dir) / f"global_step_{trainer.global_steps}"
    if not (folder / FILE).exists():
        logger.warning("rollout_spec: %s has no history: training begins without", folder)
        return
    try:
        content = ray.put(read_file(folder / FILE))
    except (OSError, HistoryError) as error:
        logger.warning("rollout_spec: training goes on without the saved history: %s", error)
        return
    ray.get([handle.add_history.remote(content) for handle in servers(trainer)])
