"""Where requests go so that the samples of a prompt stay together: to which server, to which rank of it."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

MAX_GROUPS = 10_000

Place = TypeVar("Place", bound=Hashable)


class Homes:
    """Keeps the requests of a group together while load allows.

    A request goes to the place that has served most of its siblings, unless that place has `max_imbalance`
    more requests in flight than the least loaded one; then to the place with the next most siblings, and if
    none is left, to the least loaded one. So a large group splits into parts of about `max_imbalance`. A
    prompt that returns in a later epoch goes where it was, because its history is there.

    Args:
        max_imbalance: in requests, at least 0.

    Raises ValueError: `max_imbalance` is not a whole number of at least 0.
    """

    def __init__(self, max_imbalance: Any) -> None:
        if type(max_imbalance) is not int or max_imbalance < 0:
            raise ValueError(f"max_imbalance={max_imbalance!r}: must be a whole number of at least 0")
        self._max_imbalance = max_imbalance
        # How many requests each place has served of each group; the group used last stands at the end.
        self._homes: OrderedDict[Hashable, Counter[Any]] = OrderedDict()
        self._num_groups: Counter[Any] = Counter()

    def choose(self, group: Hashable, loads: Mapping[Place, int]) -> Place:
        """Where a request of the group goes, by the requests in flight at each place (`loads`)."""
        homes = self._homes.setdefault(group, Counter())
        self._homes.move_to_end(group)
        if len(self._homes) > MAX_GROUPS:
            self._num_groups.subtract(self._homes.popitem(last=False)[1].keys())
        least = min(loads.values())
        near = [
            place
            for place, _ in homes.most_common()
            if place in loads and (loads[place] == least or loads[place] - least < self._max_imbalance)
        ]
        # Among equally loaded places, the one with the fewest groups.
        place = near[0] if near else min(loads, key=lambda each: (loads[each], self._num_groups[each]))
        if place not in homes:
            self._num_groups[place] += 1
        homes[place] += 1
        return place
