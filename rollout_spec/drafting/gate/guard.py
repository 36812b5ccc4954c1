"""The guard of the automatic gate: it pauses drafting where drafts lose time, whatever costs are expected."""

from __future__ import annotations

import numpy as np

from rollout_spec.metrics import EngineCounters

GUARD_STEPS = 48  # steps with drafts that the guard judges by
GUARD_LOSS = 0.02  # the share of time lost to drafting at which the guard acts
GUARD_WINDOW = 8  # steps without drafts in which it then sees whether plain steps take what they did
GUARD_EVERY = 8  # times it judges of which one has such a window, whatever the plain steps before took
MIN_PAUSE, MAX_PAUSE = 128, 1024  # steps; a pause is twice as long as the one before until drafting wins


class Guard:
    """Suspects, looks, and pauses.

    Where the steps with drafts took longer than plain ones would have for the same tokens, a window of plain
    steps tells whether the whole engine has become slower; if it has not, drafting pauses. Now and then, and
    the first time, it looks without a suspicion: what is known of plain steps may be too high, as after a
    cold start.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []  # (seconds, seconds of plain steps) with drafts
        self._suspicion: tuple[float, float] | None = None  # their sums, while a window judges them
        self._window: list[float] = []  # the plain steps since: seconds over those expected
        self._window_left = 0  # steps that it lasts at most
        self._num_judged = 0
        self._pause, self._pause_steps, self._pause_rows = 0, MIN_PAUSE, 0

    def blocks(self, num_rows: int, counters: EngineCounters) -> bool:
        """Whether the step that begins must be one without drafts; a stop counts in num_guard_stops."""
        if self._suspicion is not None:
            self._window_left -= 1
            if len(self._window) < GUARD_WINDOW and self._window_left > 0:
                return True
            self._judge(num_rows, counters)
        if self._pause == 0:
            return False
        # With a quarter fewer rows what lost may win.
        self._pause = self._pause - 1 if 4 * num_rows > 3 * self._pause_rows else 0
        return True

    def learn_plain(self, slowness: float) -> None:
        """A step without drafts took so many times what was expected."""
        if self._suspicion is not None:
            self._window.append(slowness)

    def learn_drafted(self, seconds: float, plain_seconds: float) -> None:
        """A step with drafts took so long, and plain ones would have so long for the same tokens."""
        self._steps.append((seconds, plain_seconds))
        if len(self._steps) < GUARD_STEPS:
            return
        taken, plain = (sum(column) for column in zip(*self._steps, strict=True))
        self._steps.clear()
        self._num_judged += 1
        # Where hardly a step can be compared, a window must end all the same.
        self._window_left = 4 * GUARD_WINDOW + 1  # the step that opens it is none of its own
        if taken <= plain * (1.0 + GUARD_LOSS):
            self._pause_steps = MIN_PAUSE
            if self._num_judged % GUARD_EVERY != 1:
                return
            self._window_left = GUARD_WINDOW + 1
        self._suspicion = taken, plain
        self._window.clear()

    def _judge(self, num_rows: int, counters: EngineCounters) -> None:
        """The window is over: pause if it has borne the suspicion out."""
        assert self._suspicion is not None
        taken, plain = self._suspicion
        self._suspicion = None
        # A step or two could be the fast ones.
        slowdown = float(np.median(self._window)) if 2 * len(self._window) >= GUARD_WINDOW else 1.0
        if taken > slowdown * plain * (1.0 + GUARD_LOSS):
            self._pause, self._pause_rows = self._pause_steps, num_rows
            self._pause_steps = min(2 * self._pause_steps, MAX_PAUSE)
            self._steps.clear()
            counters.num_guard_stops += 1
