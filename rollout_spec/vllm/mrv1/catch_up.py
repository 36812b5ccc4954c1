"""Where the host indexes text in a step of MRV1."""

from collections.abc import Callable

import torch


class CatchUp:
    """Lets the host index text while it waits for the device: once in a step, where it waits first."""

    def __init__(self, catch_up: Callable[[Callable[[], bool]], None]) -> None:
        self._catch_up = catch_up  # asks before each piece of text whether there is time
        self._may_wait = False

    def expect_wait(self) -> None:
        self._may_wait = True

    def before_wait(self) -> None:
        """All that the host is about to wait for has been launched."""
        if self._may_wait:
            self._may_wait = False
            event = torch.cuda.Event()
            event.record()
            self._catch_up(lambda: not event.query())
