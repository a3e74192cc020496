"""Slots: room, order of use, eviction."""

import pytest

from tinsmith.lifecycle.adapters import AdapterSlots


def test_slots_are_claimed_up_to_the_capacity_and_freed() -> None:
    slots = AdapterSlots(2)
    assert slots.claim("a")
    assert slots.claim("b")
    assert not slots.has_room
    assert not slots.claim("c")
    assert "c" not in slots
    assert slots.claim("a")
    assert len(slots) == 2
    slots.free("a")
    slots.free("a")
    assert slots.has_room
    assert slots.claim("c")


def test_the_least_recently_used_idle_lane_goes_first() -> None:
    slots = AdapterSlots(3)
    for lane in ("a", "b", "c", "a"):
        slots.claim(lane)
    assert slots.evictee(["a", "b", "c"]) == "b"
    assert slots.evictee(["a", "c"]) == "c"
    assert slots.evictee(["elsewhere"]) is None


def test_a_replica_without_slots_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one"):
        AdapterSlots(0)
