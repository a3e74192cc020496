"""A real Redis server for tests, in a directory of its own that goes with it, and handles onto what it holds."""

import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tinsmith.state.lanes import LaneLimits
from tinsmith.state.redis_lanes import RedisLanes
from tinsmith.state.redis_process import RedisProcess
from tinsmith.state.redis_store import RedisStore
from tinsmith.state.store import StoreInfo


@dataclass(frozen=True, slots=True)
class State:
    """A handle onto an opened store and the lanes in it. `info` is its identity at that time."""

    store: RedisStore
    lanes: RedisLanes
    info: StoreInfo

    async def close(self) -> None:
        await self.store.close()


async def open_state(url: str, limits: LaneLimits) -> State:
    store = RedisStore(url)
    try:
        info = await store.open()
    except BaseException:
        await store.close()
        raise
    return State(store, RedisLanes(store, limits), info)


class RedisServer:
    """Context manager; the server is ready inside it. `append_only` and `maxmemory_policy` are for tests of unfit servers."""

    def __init__(self, *, append_only: bool = True, maxmemory_policy: str = "noeviction") -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tinsmith-redis-"))
        self._process = RedisProcess(self._directory, append_only=append_only, maxmemory_policy=maxmemory_policy)

    @property
    def url(self) -> str:
        return self._process.url

    @property
    def directory(self) -> Path:
        """Where its data lie."""
        return self._directory

    def start(self) -> None:
        self._process.start()

    def pause(self) -> None:
        """It keeps its connections and answers nobody."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL: a crash; what the append-only file holds survives."""
        self._process.kill()

    def restart(self) -> None:
        """Again on the same port and data."""
        self._process.kill()
        self._process.start()

    def stop(self) -> None:
        """End the server and remove its data."""
        self._process.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
