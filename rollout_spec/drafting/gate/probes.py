"""Which steps the automatic gate measures, whatever it believes."""

from typing import NamedTuple

PROBE_EVERY = 256  # steps, of which one is plain and two have drafts, to be measured


class Probes(NamedTuple):
    """What the gate measures in the step that it decides on, and soon after."""

    is_probe: bool = False  # that step goes without drafts
    is_trial: bool = False  # it has drafts, though they seem not to pay
    probe_in_two: bool = False  # the second step after it is a probe


def probes_after(number: int) -> Probes:
    """For the step after the one with this number, which ranks that step together share.

    Trials are three and four steps before a probe. Of two, the second can have drafts also where a step gets
    room for them because the one before it asked for it.
    """
    is_trial = _is_probe(number + 3) or _is_probe(number + 4)
    return Probes(_is_probe(number), is_trial, probe_in_two=_is_probe(number + 2))


def _is_probe(number: int) -> bool:
    """More often at first: engines start slowly."""
    return number % PROBE_EVERY == 0 or number & (number - 1) == 0
