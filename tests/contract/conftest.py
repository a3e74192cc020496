"""One parametrised fixture: every implementation of the state seams runs the same tests.

`state` is an empty store and its lanes with the usual limits; `make_state` takes other limits. The memory implementation runs on a clock
that the tests move; Redis runs on real time, so tests in which a lease must lapse make it short.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Protocol

import pytest
import redis.asyncio as redis

from tests.redis_server import RedisServer
from tinsmith.state.lanes import LaneLimits, Lanes
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore, wall_clock_ms
from tinsmith.state.redis_lanes import RedisLanes
from tinsmith.state.redis_store import RedisStore
from tinsmith.state.store import Store

DEFAULT_SEED = 20_260


class State(Protocol):
    """What a test sees of an implementation. is_slow: an operation costs a round trip, so random runs are shorter."""

    is_slow: bool
    limits: LaneLimits
    store: Store
    lanes: Lanes

    async def connect(self) -> tuple[Store, Lanes]:
        """Further handles onto the same data, as another process has them."""
        ...

    def now_ms(self) -> int:
        """The store's clock, without asking the store."""
        ...

    async def pass_ms(self, duration_ms: int) -> None:
        """Let time pass on the store's clock."""
        ...

    async def cut_connections(self) -> None:
        """Break every connection to the store."""
        ...

    async def keys(self) -> list[str]:
        """A name for each thing that is stored."""
        ...

    async def close(self) -> None: ...


class MemoryState:
    is_slow = False

    def __init__(self, limits: LaneLimits) -> None:
        self._now_ms = 1_700_000_000_000
        self.limits = limits
        self.store = MemoryStore(lambda: self._now_ms)
        self.lanes = MemoryLanes(self.store, limits)

    async def connect(self) -> tuple[Store, Lanes]:
        return self.store, self.lanes

    def now_ms(self) -> int:
        return self._now_ms

    async def pass_ms(self, duration_ms: int) -> None:
        self._now_ms += duration_ms
        await asyncio.sleep(0)

    async def cut_connections(self) -> None:
        """It has none."""

    async def keys(self) -> list[str]:
        futures, logs = self.lanes._futures, self.lanes._lanes
        return [
            *(f"body:{rid}" for rid in futures._bodies),
            *(f"result:{rid}" for rid in futures._results),
            *(f"record:{rid}" for rid in futures._records),
            *(f"lane:{name}" for name in logs),
            *(f"lane:{name}:{seq}" for name, log in logs.items() for seq in (*log.entries, *log.voids)),
            *(f"quota:{name}" for name in self.store._quotas._units),
            *(f"topic:{name}" for name, topic in self.lanes._events._topics.items() if topic.events),
        ]

    async def close(self) -> None:
        await self.store.close()


class RedisState:
    is_slow = True

    def __init__(self, url: str, limits: LaneLimits) -> None:
        self._url = url
        self._handles: list[Store] = []
        self._admin = redis.Redis.from_url(url)
        self.limits = limits

    async def start(self) -> None:
        await self._admin.flushall()
        self.store, self.lanes = await self.connect()

    async def connect(self) -> tuple[Store, Lanes]:
        store = RedisStore(self._url)
        self._handles.append(store)
        await store.open()
        return store, RedisLanes(store, self.limits)

    def now_ms(self) -> int:
        return wall_clock_ms()

    async def pass_ms(self, duration_ms: int) -> None:
        await asyncio.sleep(duration_ms / 1000)

    async def cut_connections(self) -> None:
        await self._admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def keys(self) -> list[str]:
        return [key.decode() async for key in self._admin.scan_iter(count=10_000)]

    async def close(self) -> None:
        for store in self._handles:
            await store.close()
        await self._admin.aclose()


MakeState = Callable[..., Awaitable[State]]


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture(params=["memory", "redis"])
async def make_state(request: pytest.FixtureRequest) -> AsyncIterator[MakeState]:
    """`await make_state(lease_ms=250)` is a fresh, empty state with these limits."""
    async with AsyncExitStack() as stack:

        async def make(**limits: int) -> State:
            state: State
            if request.param == "memory":
                state = MemoryState(replace(LaneLimits(), **limits))
            else:
                state = RedisState(request.getfixturevalue("redis_url"), replace(LaneLimits(), **limits))
                await state.start()
            stack.push_async_callback(state.close)
            return state

        yield make


@pytest.fixture
async def state(make_state: MakeState) -> State:
    return await make_state()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the random simulations")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """--seed, else $TINSMITH_TEST_SEED, else always the same."""
    chosen: int | None = request.config.getoption("--seed", default=None)
    return int(os.environ.get("TINSMITH_TEST_SEED", DEFAULT_SEED)) if chosen is None else chosen
