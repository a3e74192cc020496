"""The threads that render: few, apart from those of bodies, and never for a caller that has left."""

import asyncio
import threading

import pytest
from starlette.requests import ClientDisconnect, Request

from tinsmith.gateway import bodies
from tinsmith.gateway.rendering import NUM_THREADS, Renderers


class Connection:
    """A caller whose body has been read; it stays until it is told to leave."""

    def __init__(self) -> None:
        self._left = asyncio.Event()
        self.request = Request({"type": "http"}, self._receive)

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> dict[str, object]:
        await self._left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Holds a thread until it is let go."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.goes_on = threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.goes_on.wait(30)
        return threading.current_thread().name


async def test_what_waits_for_its_turn_is_dropped_when_its_caller_leaves() -> None:
    renderers, stays, leaves = Renderers(), Connection(), Connection()
    held = [Work() for _ in range(NUM_THREADS)]
    running = [asyncio.create_task(renderers.run(stays.request, work)) for work in held]
    await asyncio.gather(*(asyncio.to_thread(work.began.wait, 30) for work in held))
    waiting = Work()
    waiting.goes_on.set()
    dropped = asyncio.create_task(renderers.run(leaves.request, waiting))
    leaves.leave()
    with pytest.raises(ClientDisconnect):
        await dropped
    for work in held:
        work.goes_on.set()
    names = await asyncio.gather(*running)
    assert await renderers.run(stays.request, lambda: "the next") == "the next"
    assert not waiting.began.is_set(), "nobody would read it"
    assert all(name.startswith("text") for name in names)


async def test_bodies_are_read_while_all_text_waits() -> None:
    renderers, caller = Renderers(), Connection()
    held = [Work() for _ in range(NUM_THREADS + 9)]
    running = [asyncio.create_task(renderers.run(caller.request, work)) for work in held]
    await asyncio.gather(*(asyncio.to_thread(work.began.wait, 30) for work in held[:NUM_THREADS]))
    async with asyncio.timeout(30):
        name = await bodies.off_loop(lambda: threading.current_thread().name, is_large=True)
        assert name.startswith("bodies")
        assert not (await asyncio.to_thread(lambda: threading.current_thread().name)).startswith(("bodies", "text"))
    assert not any(work.began.is_set() for work in held[NUM_THREADS:])
    for work in held:
        work.goes_on.set()
    await asyncio.gather(*running)


async def test_what_the_work_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await Renderers().run(Connection().request, fail)
