"""The lease's own thread: it renews whatever the rest of the process does, tells of lanes without an owner, and buries the dead."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.cut_off import CutOff
from tinsmith.queue.heartbeat import Heartbeat, this_process
from tinsmith.state.lanes import LaneLimits, Lanes, Replica
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore

LEASE_S = 0.15


class Told:
    """What the heartbeat found."""

    def __init__(self) -> None:
        self.lanes: list[str] = []
        self.heard = threading.Event()

    def __call__(self, lanes: list[str]) -> None:
        self.lanes = lanes
        self.heard.set()


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


@pytest.fixture
def lanes() -> Unowned:
    return Unowned(MemoryLanes(MemoryStore(), LaneLimits(lease_ms=round(LEASE_S * 1000))))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def start(lanes: Unowned, told: Told) -> Iterator[Callable[[], Heartbeat]]:
    started: list[Heartbeat] = []

    async def connect() -> Lanes:
        return lanes

    def start() -> Heartbeat:
        started.append(Heartbeat(connect, this_process("me", "tiny", "here"), lease_s=LEASE_S, found=told))
        started[-1].start()
        return started[-1]

    yield start
    for heartbeat in started:
        heartbeat.stop()
        assert not heartbeat.healthy


async def test_it_renews_and_tells_of_lanes_without_an_owner(start: Callable[[], Heartbeat], lanes: Unowned, told: Told) -> None:
    heartbeat = start()
    assert told.heard.wait(5)
    assert told.lanes == ["lonely"]
    assert heartbeat.healthy
    assert heartbeat.age_s < 5


@pytest.mark.proves("R5")
async def test_a_loop_that_is_busy_for_longer_than_a_lease_loses_none(start: Callable[[], Heartbeat], lanes: Unowned) -> None:
    start()
    assert lanes.renewed.wait(5)
    for _ in range(30):  # the test's own loop does not run meanwhile
        time.sleep(LEASE_S / 10)  # noqa: ASYNC251 - the loop is what must be busy here
    assert [replica.id for replica in await lanes.replicas("tiny")] == ["me"]


async def test_it_goes_on_when_the_store_comes_back(start: Callable[[], Heartbeat], lanes: Unowned) -> None:
    lanes.is_away = True
    heartbeat = start()
    deadline = time.monotonic() + 5
    while lanes.refused["renew"] < 2 and time.monotonic() < deadline:
        time.sleep(0.005)  # noqa: ASYNC251 - the heartbeat runs in a thread
    assert heartbeat.healthy
    assert not lanes.renewed.is_set()
    lanes.is_away = False
    assert lanes.renewed.wait(5)


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


async def test_one_that_was_not_started_is_not_healthy(lanes: Unowned, told: Told) -> None:
    async def connect() -> Lanes:
        return lanes

    heartbeat = Heartbeat(connect, this_process("me", "tiny", "here"), lease_s=LEASE_S, found=told)
    assert not heartbeat.healthy
