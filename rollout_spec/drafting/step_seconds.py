"""What each step took, as far as it says something of later steps."""

# If less than this share of about the last ALIKE_MEMORY steps can be compared (requests come and go all the
# time), the gate learns from every step: otherwise it would learn next to nothing.
ALIKE_SHARE, ALIKE_MEMORY = 0.25, 32


class StepSeconds:
    """Seconds from the end of a step to the end of the next."""

    def __init__(self) -> None:
        self.last = 0.0  # what the last step took; 0.0: nobody knows
        self._last_end: float | None = None
        self._all_decoded = False  # whether all rows of the last step did
        self._share_alike = 1.0  # of late, the share of steps that can be compared

    def end_step(self, now: float, *, all_decode: bool, has_new_rows: bool) -> float | None:
        """A step ends now; returns what it took, None where that cannot be compared."""
        last_end, self._last_end = self._last_end, now
        self.last = 0.0 if last_end is None else now - last_end
        # A step that prefills, or that new rows have come to, does not show what a decoding step costs.
        is_alike = all_decode and self._all_decoded and not has_new_rows
        self._all_decoded = all_decode
        self._share_alike += (is_alike - self._share_alike) / ALIKE_MEMORY
        can_compare = last_end is not None and (is_alike or self._share_alike < ALIKE_SHARE)
        return self.last if can_compare else None

    def forget_last_end(self) -> None:
        """The time until the next step is no step's."""
        self._last_end = None
