"""From a URL to the state of the cluster: the one place that knows which implementation stands behind which scheme."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from tinsmith.config import ConfigError
from tinsmith.state.lanes import LaneLimits, Lanes
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.redis_lanes import RedisLanes
from tinsmith.state.redis_store import RedisStore
from tinsmith.state.store import Store, StoreInfo

_REDIS_SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class State:
    """An opened store and the lanes in it. `info` is its identity at that time."""

    store: Store
    lanes: Lanes
    info: StoreInfo

    async def close(self) -> None:
        """Drop the handle; the data stay."""
        await self.store.close()


async def open_state(url: str | None, limits: LaneLimits) -> State:
    """`url` None keeps everything in this process's memory; else it names a Redis primary. Raises ConfigError, StateContention."""
    if url is None:
        memory = MemoryStore()
        return State(memory, MemoryLanes(memory, limits), await memory.open())
    scheme = urlsplit(url).scheme  # the rest may hold a password
    if scheme not in _REDIS_SCHEMES:
        raise ConfigError([f"store.url: {scheme!r} is not a scheme of Redis; write redis://host:port/db"])
    store = RedisStore(url)
    try:
        info = await store.open()
    except BaseException:
        await store.close()
        raise
    return State(store, RedisLanes(store, limits), info)
