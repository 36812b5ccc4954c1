"""The time that functions take, in all."""

from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Counts the seconds of what it is told to time, by a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds = 0.0

    def time(self, owner: Any, *names: str) -> None:
        """From now on count these functions of `owner`, which do not call each other."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock()
            found = function(*args, **kwargs)
            self.seconds += self._clock() - begin
            return found

        return timed
