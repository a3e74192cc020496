"""Slots: which lanes' adapters are resident in this replica, how many more fit, which one goes first. Knows neither engine nor store."""

from collections import OrderedDict
from collections.abc import Iterable


class AdapterSlots:
    """`capacity` slots, one a lane, ordered by last use."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a replica needs at least one adapter slot")
        self.capacity = capacity
        self._lanes: OrderedDict[str, None] = OrderedDict()  # least recently used first

    def __contains__(self, lane: str) -> bool:
        return lane in self._lanes

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def has_room(self) -> bool:
        return len(self._lanes) < self.capacity

    def claim(self, lane: str) -> bool:
        """Take a slot for the lane, or note its use; False, with nothing changed, if all slots are taken by others."""
        if lane not in self._lanes and not self.has_room:
            return False
        self._lanes[lane] = None
        self._lanes.move_to_end(lane)
        return True

    def free(self, lane: str) -> None:
        """Give the lane's slot back; lanes without one are ignored."""
        self._lanes.pop(lane, None)

    def evictee(self, idle: Iterable[str]) -> str | None:
        """Of the idle lanes, the one whose last use lies furthest back; None if none of them is resident."""
        allowed = frozenset(idle)
        return next((lane for lane in self._lanes if lane in allowed), None)
