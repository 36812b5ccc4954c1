"""Where requests go so that the samples of a prompt stay together: to which server, to which rank of it."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

MAX_GROUPS = 10_000
MAX_PLACED_SAMPLES = 20_000

Place = TypeVar("Place", bound=Hashable)


class GroupPlacement:
    """Keeps the requests of a group together while load allows.

    A request goes to the place that has served most of its siblings, unless that place has `max_imbalance`
    more requests in flight than the least loaded one; then to the place with the next most siblings, and if
    none is left, to the least loaded one. So a large group splits into parts of about `max_imbalance`. A
    prompt that returns in a later epoch goes where it was, because its history is there. Within the same
    bound, a turn goes where the turn before it was, because its text is there.

    Raises ValueError: `max_imbalance` is not a whole number of at least 0.
    """

    def __init__(self, max_imbalance: Any) -> None:
        if type(max_imbalance) is not int or max_imbalance < 0:
            raise ValueError(f"max_imbalance={max_imbalance!r}: must be a whole number of at least 0")
        self._max_imbalance = max_imbalance
        # How many requests each place has served of each group; the group used last stands at the end.
        self._homes: OrderedDict[Hashable, Counter[Any]] = OrderedDict()
        self._num_groups: Counter[Any] = Counter()
        # Where the last request of each sample went; the one used last stands at the end.
        self._samples: OrderedDict[Hashable, Any] = OrderedDict()

    def choose(self, group: Hashable, loads: Mapping[Place, int], sample: Hashable = None) -> Place:
        """Where a request of the group, and of this sample, goes, by the requests in flight at each place."""
        homes = self._homes.setdefault(group, Counter())
        self._homes.move_to_end(group)
        if len(self._homes) > MAX_GROUPS:
            self._num_groups.subtract(self._homes.popitem(last=False)[1].keys())
        least = min(loads.values())
        last = self._samples.pop((group, sample), None)
        near = [
            place
            for place in (last, *(place for place, _ in homes.most_common()))
            if place in loads and (loads[place] == least or loads[place] - least < self._max_imbalance)
        ]
        # Among equally loaded places, the one with the fewest groups.
        place = near[0] if near else min(loads, key=lambda each: (loads[each], self._num_groups[each]))
        if place not in homes:
            self._num_groups[place] += 1
        homes[place] += 1
        if sample is not None:
            self._samples[group, sample] = place
            if len(self._samples) > MAX_PLACED_SAMPLES:
                self._samples.popitem(last=False)
        return place
