"""Shares the history between the rollout servers: a prompt finds its responses wherever it is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def share(handles: Sequence[Any]) -> None:
    """Let every server add what the others have served since the last call.

    The texts go from server to server through Ray's object store, not through this process.

    Args:
        handles: actors with the methods take_history and add_history of SpecHttpServer.
    """
    import ray

    if len(handles) < 2:
        return
    taken = [handle.take_history.remote() for handle in handles]
    others = [taken[:i] + taken[i + 1 :] for i in range(len(taken))]
    added = [handle.add_history.remote(*parts) for handle, parts in zip(handles, others, strict=True)]
    ray.get(added)
