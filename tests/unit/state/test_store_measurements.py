"""A store that does not answer, and readers that lost their place, are counted where that is noticed."""

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence

import pytest
from ray.exceptions import RayActorError

from tinsmith import telemetry
from tinsmith.deployments.memory_state import RemoteStore
from tinsmith.protocol.errors import StateContention
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, Wake
from tinsmith.state.redis_link import RedisLink
from tinsmith.telemetry import Measurement


@pytest.fixture
def measured() -> Iterator[list[Measurement]]:
    found: list[Measurement] = []
    with telemetry.recording(found.append):
        yield found


def num(measured: list[Measurement], name: str) -> int:
    return sum(one.name == name for one in measured)


@pytest.fixture
async def link() -> object:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    link = RedisLink(f"redis://127.0.0.1:{port}/0")
    yield link
    await link.close()


async def test_commands_that_redis_does_not_answer_are_counted(link: RedisLink, measured: list[Measurement]) -> None:
    with pytest.raises(StateContention):
        await link.command("GET", "x")
    assert num(measured, telemetry.STORE_ERRORS) == 1


async def test_reads_that_block_and_break_are_counted(link: RedisLink, measured: list[Measurement]) -> None:
    with pytest.raises(StateContention):
        await link.block(1, "BLPOP", "x", 1)
    assert num(measured, telemetry.STORE_ERRORS) == 1


async def test_a_memory_store_that_is_gone_is_counted(measured: list[Measurement]) -> None:
    class Gone:
        class call:  # noqa: N801 - a method of the handle
            @staticmethod
            def remote(*_: object, **__: object) -> "asyncio.Future[object]":
                future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
                future.set_exception(RayActorError())
                return future

    with pytest.raises(StateContention):
        await RemoteStore(Gone()).now_ms()
    assert num(measured, telemetry.STORE_ERRORS) == 1
    assert num(measured, telemetry.STATE_CALLS) == 1


async def test_a_reader_that_has_to_look_at_everything_is_counted(measured: list[Measurement]) -> None:
    class Trimmed:
        def __init__(self) -> None:
            self._wakes = [Wake({}, {SETTLED: 5}, frozenset([SETTLED])), Wake({SETTLED: ["rid"]}, {SETTLED: 6}, frozenset())]

        async def tail(self, topics: Sequence[str]) -> dict[str, int]:
            return dict.fromkeys(topics, 0)

        async def wait(self, cursors: Mapping[str, int], timeout_s: float) -> Wake:
            if not self._wakes:
                await asyncio.Event().wait()
            return self._wakes.pop(0)

    reader = EventReader(Trimmed(), [SETTLED])  # type: ignore[arg-type]
    subscription = reader.subscribe()
    await reader.start()
    while not subscription.take():
        await subscription.wait(5)
    await reader.stop()
    assert num(measured, telemetry.EVENT_RESYNCS) == 1
