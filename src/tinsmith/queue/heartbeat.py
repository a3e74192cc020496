"""The lease of a replica, kept alive by a thread of its own with its own loop and its own connection to the store.

Nothing that the rest of the process does can delay it, short of holding the interpreter lock for a whole lease. Each beat also learns
which lanes have work and no owner, and buries peers of the same machine whose process is gone, so their lanes need not wait for the
lease to run out.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable

import psutil

from tinsmith.protocol.errors import StateContention
from tinsmith.state.lanes import Lanes, Replica

BEATS_A_LEASE = 3
RETRIES_A_BEAT = 4
START_TOLERANCE_S = 5.0  # start times are told relative to a boot time that the system clock's corrections move

Connect = Callable[[], Awaitable[Lanes]]

_log = logging.getLogger(__name__)


def this_process(id: str, base: str, node: str) -> Replica:
    """This process as a replica. `node` must name one pid namespace: two replicas of one node see each other's processes."""
    pid = os.getpid()
    return Replica(id=id, base=base, node=node, pid=pid, started=f"{psutil.Process(pid).create_time():.2f}")


class Heartbeat:
    """Renews `replica` three times a lease until `stop`.

    `found` is called in the heartbeat's thread with the unowned lanes of the base model; pass them on with call_soon_threadsafe.
    """

    def __init__(self, connect: Connect, replica: Replica, *, lease_s: float, found: Callable[[list[str]], None]) -> None:
        self._connect = connect
        self._replica = replica
        self._beat_s = lease_s / BEATS_A_LEASE
        self._found = found
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._has_started = threading.Event()
        self._renewed_at = time.monotonic()

    @property
    def healthy(self) -> bool:
        """False once the thread is gone. A store that is away is no fault of this process."""
        return self._thread.is_alive()

    @property
    def age_s(self) -> float:
        """Seconds since the last renewal that the store confirmed."""
        return time.monotonic() - self._renewed_at

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
        lanes: Lanes | None = None
        while not self._stopped.is_set():
            began = time.monotonic()
            pause_s = self._beat_s
            try:
                if lanes is None:
                    lanes = await self._connect()
                await self._beat(lanes)
            except StateContention as error:
                _log.warning("the lease of %s could not be renewed: %s", self._replica.id, error.message)
                pause_s = self._beat_s / RETRIES_A_BEAT
            await self._pause(self._stopped, began + pause_s - time.monotonic())

    async def _beat(self, lanes: Lanes) -> None:
        unowned = await lanes.renew(self._replica)
        self._renewed_at = time.monotonic()
        if unowned:
            self._found(unowned)
        for peer in await lanes.replicas(self._replica.base):
            if self._is_gone(peer):
                _log.warning("replica %s (pid %d) is gone; its lanes are free", peer.id, peer.pid)
                await lanes.bury(peer.id)

    def _is_gone(self, peer: Replica) -> bool:
        return peer.node == self._replica.node and peer.id != self._replica.id and not _is_running(peer)

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
