"""When to draft: speculation pays in the long tail, when few requests are left running."""

from __future__ import annotations


class Gate:
    """A fixed threshold on the number of running requests (the CANN recipe's rule).

    Args:
        batch_threshold: draft while at most this many requests run; 0 never drafts.
    """

    def __init__(self, batch_threshold: int) -> None:
        self._batch_threshold = batch_threshold

    def is_open(self, num_running: int) -> bool:
        return num_running <= self._batch_threshold
