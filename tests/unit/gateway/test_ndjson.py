"""Answers of JSON lines: however they end, they end once, and what they held is released."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
from starlette.types import Message

from tinsmith.gateway.ndjson import LinesAnswer

Receive = Callable[[], Awaitable[Message]]


class Connection:
    """What the server would do with an answer. `leave` closes the connection; with `is_read` unset nobody reads it."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self._left = asyncio.Event()
        self.is_read = asyncio.Event()
        self.is_read.set()
        self.released = 0
        self.is_released = asyncio.Event()

    async def receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.is_read.wait()
        self.sent.append(message)

    def leave(self) -> None:
        self._left.set()

    async def release(self) -> None:
        await asyncio.sleep(0.01)
        self.released += 1
        self.is_released.set()

    def answer(self, lines: AsyncGenerator[bytes], bound_s: float = 60) -> "asyncio.Task[None]":
        return asyncio.create_task(LinesAnswer(lines, self.release, bound_s=bound_s)({"type": "http"}, self.receive, self.send))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Lines:
    """Two lines, and then nothing for ever."""

    def __init__(self) -> None:
        self.is_closed = False

    async def generate(self) -> AsyncGenerator[bytes]:
        try:
            yield b"1"
            yield b"2"
            await asyncio.Event().wait()
        finally:
            self.is_closed = True


@pytest.fixture
async def connection() -> Connection:
    return Connection()


async def two_lines() -> AsyncGenerator[bytes]:
    yield b"1"
    yield b"2"


async def test_lines_are_sent_as_they_come_and_the_answer_is_complete(connection: Connection) -> None:
    await connection.answer(two_lines())
    assert [message["type"] for message in connection.sent] == ["http.response.start"] + 3 * ["http.response.body"]
    assert (b"content-type", b"application/x-ndjson") in connection.sent[0]["headers"]
    assert connection.body == b"1\n2\n"
    assert connection.sent[-1]["more_body"] is False
    assert connection.released == 1


@pytest.mark.proves("R62")
async def test_a_closed_connection_ends_the_lines_and_releases_them(connection: Connection) -> None:
    lines = Lines()
    answer = connection.answer(lines.generate())
    await asyncio.sleep(0.01)
    assert connection.body == b"1\n2\n"
    connection.leave()
    async with asyncio.timeout(5):
        await answer
    assert lines.is_closed
    assert connection.released == 1
    assert connection.sent[-1]["more_body"] is True, "nothing pretends to be the end"


@pytest.mark.proves("R62")
async def test_a_connection_that_was_closed_before_the_first_line_is_released_too(connection: Connection) -> None:
    connection.is_read.clear()
    connection.leave()
    async with asyncio.timeout(5):
        await connection.answer(two_lines())
    assert connection.released == 1


@pytest.mark.proves("R61")
async def test_an_answer_that_nobody_reads_is_cut_at_its_bound(connection: Connection) -> None:
    lines = Lines()
    connection.is_read.clear()
    async with asyncio.timeout(5):
        await connection.answer(lines.generate(), bound_s=0.05)
    assert connection.sent == []
    assert connection.released == 1


@pytest.mark.proves("R62")
async def test_a_cancelled_answer_is_released_to_the_end_however_often_it_is_cancelled(connection: Connection) -> None:
    lines = Lines()
    answer = connection.answer(lines.generate())
    await asyncio.sleep(0.005)
    answer.cancel()
    await asyncio.sleep(0.002)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    async with asyncio.timeout(5):
        await connection.is_released.wait()
    assert lines.is_closed


async def test_a_defect_in_the_lines_is_raised_and_released(connection: Connection) -> None:
    async def broken() -> AsyncGenerator[bytes]:
        yield b"1"
        raise TypeError("a defect")

    with pytest.raises(TypeError, match="a defect"):
        await connection.answer(broken())
    assert connection.released == 1
