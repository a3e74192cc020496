"""The lease of a process, kept alive by a thread of its own with its own loop and its own connection to the store.

Nothing that the rest of the process does can delay it, short of holding the interpreter lock for a whole lease. Each beat tells how the
process is (`Replica`), learns which lanes have work and no owner, and buries peers of the same machine whose process is gone, so their
lanes need not wait for the lease to run out.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import psutil

from tinsmith.protocol.errors import StateContention
from tinsmith.state.lanes import Lanes, Replica, Role
from tinsmith.state.store import Store

BEATS_A_LEASE = 3
RETRIES_A_BEAT = 4
START_TOLERANCE_S = 5.0  # start times are told relative to a boot time that the system clock's corrections move

_log = logging.getLogger(__name__)


class Connection(Protocol):
    """A way to the store that nobody else uses."""

    @property
    def store(self) -> Store: ...

    @property
    def lanes(self) -> Lanes: ...


Connect = Callable[[], Connection]
Describe = Callable[[], Replica]


def this_process(id: str, base: str, node: str, role: Role = Role.TRAINER) -> Replica:
    """This process as a replica. `node` must name one pid namespace: two replicas of one node see each other's processes."""
    pid = os.getpid()
    return Replica(id=id, base=base, node=node, pid=pid, started=f"{psutil.Process(pid).create_time():.2f}", role=role)


class Heartbeat:
    """Renews the lease three times within it until `stop`.

    All that it is given is called in its thread. connect: the connection belongs to the heartbeat's own loop. describe: the process as it
    is at that beat; its id and base never change. found: told of the base model's lanes without an owner. cut_off: told of each renewal
    that failed, also of an outage that nobody else has met. Pass on what they hear with call_soon_threadsafe.
    """

    def __init__(
        self,
        connect: Connect,
        describe: Describe,
        *,
        lease_s: float,
        found: Callable[[list[str]], None],
        cut_off: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._describe = describe
        self._beat_s = lease_s / BEATS_A_LEASE
        self._found = found
        self._cut_off = cut_off
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._has_started = threading.Event()

    @property
    def is_healthy(self) -> bool:
        """False once the thread is gone. A store that is away is no fault of this process."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Return once the thread runs; the first renewal may still be under way."""
        self._thread.start()
        self._has_started.wait()

    def stop(self) -> None:
        """Let the lease run out; returns when the thread has ended."""
        if self._loop is not None and self._stopped is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._beat_until_stopped())

    async def _beat_until_stopped(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._has_started.set()
        connection = self._connect()
        try:
            await self._beat_on(connection, self._stopped)
        finally:
            await connection.store.close()

    async def _beat_on(self, connection: Connection, stopped: asyncio.Event) -> None:
        is_cut_off = False
        while not stopped.is_set():
            began = time.monotonic()
            pause_s = self._beat_s
            try:
                if is_cut_off:
                    await connection.store.open()  # it may have come back empty; a lease remembers nothing and goes on in it
                await self._beat(connection.lanes)
                is_cut_off = False
            except StateContention as error:
                _log.warning("the lease of %s could not be renewed: %s", self._describe().id, error.message)
                is_cut_off = True
                self._cut_off()
                pause_s = self._beat_s / RETRIES_A_BEAT
            await self._pause(stopped, began + pause_s - time.monotonic())

    async def _beat(self, lanes: Lanes) -> None:
        replica = self._describe()
        unowned = await lanes.renew(replica)
        if unowned:
            self._found(unowned)
        for peer in await lanes.replicas(replica.base):
            if peer.node == replica.node and peer.id != replica.id and not _is_running(peer):
                _log.warning("replica %s (pid %d) is gone; its lanes are free", peer.id, peer.pid)
                await lanes.bury(peer.id)

    @staticmethod
    async def _pause(stopped: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(seconds, 0)):
                await stopped.wait()
        except TimeoutError:
            return


def _is_running(peer: Replica) -> bool:
    """Whether the peer's process is there, and is not another one under the same pid. A zombie is not there."""
    try:
        process = psutil.Process(peer.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return abs(process.create_time() - float(peer.started)) < START_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
