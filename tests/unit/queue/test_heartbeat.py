"""The lease's own thread: it renews whatever the rest of the process does, tells of lanes without an owner, and buries the dead."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.fakes.cut_off import CutOff
from tinsmith.protocol.errors import StateContention
from tinsmith.queue.heartbeat import Heartbeat, this_process
from tinsmith.state.lanes import LaneLimits, Lanes, Replica, Role
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.store import StoreInfo

LEASE_S = 0.15


def me() -> Replica:
    return this_process("me", "tiny", "here")


class Told:
    """What the heartbeat found."""

    def __init__(self) -> None:
        self.lanes: list[str] = []
        self.heard = threading.Event()
        self.num_cut_off = 0

    def __call__(self, lanes: list[str]) -> None:
        self.lanes = lanes
        self.heard.set()

    def cut_off(self) -> None:
        self.num_cut_off += 1


class Unowned(CutOff):
    """Lanes of which one has work and no owner; `renewed` is set by each renewal."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes)
        self.renewed = threading.Event()
        self.buried: list[str] = []
        self.bury_called = threading.Event()

    async def renew(self, replica: Replica) -> list[str]:
        await self.__getattr__("renew")(replica)
        self.renewed.set()
        return ["lonely"]

    async def bury(self, replica: str) -> None:
        await self.__getattr__("bury")(replica)
        self.buried.append(replica)
        self.bury_called.set()


class GuardedStore(MemoryStore):
    """A store that its user must open anew once it was emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.is_known = True
        self.was_closed = False

    async def open(self) -> StoreInfo:
        self.is_known = True
        return await super().open()

    async def close(self) -> None:
        self.was_closed = True


class Guarded:
    """A connection to lanes that refuse whoever remembers a store that was emptied."""

    def __init__(self, lanes: Lanes) -> None:
        self.store = GuardedStore()
        self.lanes = lanes


class Emptied(Unowned):
    """Renewals are refused until the store was opened anew."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes)
        self.connection = Guarded(self)
        self.connection.store.is_known = False

    async def renew(self, replica: Replica) -> list[str]:
        if not self.connection.store.is_known:
            raise StateContention("the store was emptied")
        return await super().renew(replica)


@pytest.fixture
def lanes() -> Unowned:
    return Unowned(MemoryLanes(MemoryStore(), LaneLimits(lease_ms=round(LEASE_S * 1000))))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def start(lanes: Unowned, told: Told) -> Iterator[Callable[[], Heartbeat]]:
    started: list[Heartbeat] = []

    def start() -> Heartbeat:
        started.append(Heartbeat(lambda: Guarded(lanes), me, lease_s=LEASE_S, found=told, cut_off=told.cut_off))
        started[-1].start()
        return started[-1]

    yield start
    for heartbeat in started:
        heartbeat.stop()
        assert not heartbeat.is_healthy


async def test_it_renews_and_tells_of_lanes_without_an_owner(start: Callable[[], Heartbeat], lanes: Unowned, told: Told) -> None:
    heartbeat = start()
    assert told.heard.wait(5)
    assert told.lanes == ["lonely"]
    assert heartbeat.is_healthy


@pytest.mark.proves("R5")
async def test_a_loop_that_is_busy_for_longer_than_a_lease_loses_none(start: Callable[[], Heartbeat], lanes: Unowned) -> None:
    start()
    assert lanes.renewed.wait(5)
    for _ in range(30):  # the test's own loop does not run meanwhile
        time.sleep(LEASE_S / 10)  # noqa: ASYNC251 - the loop is what must be busy here
    assert [replica.id for replica in await lanes.replicas("tiny")] == ["me"]


async def test_it_tells_of_an_outage_and_goes_on_when_the_store_comes_back(
    start: Callable[[], Heartbeat], lanes: Unowned, told: Told
) -> None:
    lanes.is_away = True
    heartbeat = start()
    deadline = time.monotonic() + 5
    while lanes.refused["renew"] < 2 and time.monotonic() < deadline:
        time.sleep(0.005)  # noqa: ASYNC251 - the heartbeat runs in a thread
    assert heartbeat.is_healthy
    assert not lanes.renewed.is_set()
    assert told.num_cut_off > 0
    lanes.is_away = False
    assert lanes.renewed.wait(5)


def test_it_goes_on_in_a_store_that_came_back_empty_and_closes_it_at_the_end(told: Told) -> None:
    lanes = Emptied(MemoryLanes(MemoryStore(), LaneLimits()))
    heartbeat = Heartbeat(lambda: lanes.connection, me, lease_s=LEASE_S, found=told, cut_off=told.cut_off)
    heartbeat.start()
    assert lanes.renewed.wait(5)
    heartbeat.stop()
    assert lanes.connection.store.was_closed


def gone_process(*, reap: bool) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if reap:
        process.wait()
    return process


async def test_it_buries_peers_of_its_node_whose_process_is_gone(start: Callable[[], Heartbeat], lanes: Unowned) -> None:
    ended, zombie = gone_process(reap=True), gone_process(reap=False)
    alive = this_process("alive", "tiny", "here")
    peers = [
        alive,
        Replica("ended", "tiny", "here", ended.pid, alive.started),
        Replica("zombie", "tiny", "here", zombie.pid, alive.started),
        Replica("pid used again", "tiny", "here", os.getpid(), "1.00"),
        Replica("elsewhere", "tiny", "there", ended.pid, alive.started),
    ]
    lanes.limits = LaneLimits(lease_ms=60_000)
    lanes._lanes = MemoryLanes(MemoryStore(), lanes.limits)
    for peer in peers:
        await lanes._lanes.renew(peer)
    start()
    deadline = time.monotonic() + 5
    while len(lanes.buried) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)  # noqa: ASYNC251 - the heartbeat runs in a thread
    zombie.wait()
    assert sorted(lanes.buried) == ["ended", "pid used again", "zombie"]


@pytest.mark.proves("R53")
async def test_each_renewal_tells_how_the_process_is_at_that_moment(lanes: Unowned, told: Told) -> None:
    state = {"num_used": 0, "is_draining": False}

    def describe() -> Replica:
        return replace(this_process("me", "tiny", "here", Role.SAMPLER), num_slots=4, **state)

    heartbeat = Heartbeat(lambda: Guarded(lanes), describe, lease_s=LEASE_S, found=told, cut_off=told.cut_off)
    heartbeat.start()
    seen: list[tuple[int, bool]] = []
    for change in ({"num_used": 3}, {"is_draining": True}):
        lanes.renewed.clear()
        assert lanes.renewed.wait(5)
        (known,) = await lanes.replicas("tiny")
        seen.append((known.num_used, known.is_draining))
        assert (known.role, known.num_slots) == (Role.SAMPLER, 4)
        state.update(change)
        lanes.renewed.clear()
        assert lanes.renewed.wait(5)
        lanes.renewed.clear()
        assert lanes.renewed.wait(5)
    (known,) = await lanes.replicas("tiny")
    heartbeat.stop()
    assert [*seen, (known.num_used, known.is_draining)] == [(0, False), (3, False), (3, True)]


async def test_one_that_was_not_started_is_not_healthy(lanes: Unowned, told: Told) -> None:
    heartbeat = Heartbeat(lambda: Guarded(lanes), me, lease_s=LEASE_S, found=told, cut_off=told.cut_off)
    assert not heartbeat.is_healthy
