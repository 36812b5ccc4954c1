"""What the host does while MRV1 waits for a device."""

from collections.abc import Callable

import torch


class IdleHost:
    """Lets the host work while it waits for the device: once in a step, where it waits first.

    Args:
        while_waiting: what it does; asks before each piece of it whether there is time.
    """

    def __init__(self, while_waiting: Callable[[Callable[[], bool]], None]) -> None:
        self._while_waiting, self._may_work = while_waiting, False

    def begin_step(self) -> None:
        self._may_work = True

    def before_wait(self) -> None:
        """All that the host is about to wait for has been launched."""
        if self._may_work:
            self._may_work = False
            event = torch.cuda.Event()
            event.record()
            self._while_waiting(lambda: not event.query())
