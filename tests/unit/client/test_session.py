"""The session of a client: opened late, kept alive, ended."""

import asyncio
import logging

import httpx
import pytest

from tests.fakes.native_server import URL, NativeServer, refused
from tinsmith.client import AsyncClient, ClientValidationError, HttpError
from tinsmith.client.session import HEARTBEAT_S
from tinsmith.protocol.errors import NotFound, SessionEnded, StateContention

BEAT = "/heartbeat"


class Clock:
    """Sleeps end when a test says so."""

    def __init__(self) -> None:
        self.sleeping: asyncio.Queue[tuple[float, asyncio.Event]] = asyncio.Queue()

    async def sleep(self, pause_s: float) -> None:
        awake = asyncio.Event()
        await self.sleeping.put((pause_s, awake))
        await awake.wait()

    async def pass_one(self) -> float:
        pause_s, awake = await self.sleeping.get()
        awake.set()
        return pause_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_client(server: NativeServer, clock: Clock, **session: object) -> AsyncClient:
    return AsyncClient(URL, transport=server.transport, sleep=clock.sleep, **session)


async def test_one_session_is_opened_by_whatever_needs_it_first(server, clock):
    async with open_client(server, clock, tags=["a"], metadata={"k": "v"}, project_id="p", display_name="d") as client:
        server.script("/capacity", httpx.Response(200, json={"base_models": {}}))
        await client.capacity()
        assert "/create_session" not in server.paths()
        await asyncio.gather(client.training(base_model="b"), client.sampling(base_model="b"), client.sampling(base_model="b"))
        [call] = server.of("/create_session")
        sent = call.request
        assert (sent.tags, sent.metadata, sent.project_id, sent.display_name) == (("a",), {"k": "v"}, "p", "d")


async def test_heartbeats_follow_every_ten_seconds_and_survive_failures(server, clock, caplog):
    server.script(BEAT, httpx.ConnectError("refused"), refused(StateContention("away")))
    async with open_client(server, clock) as client:
        await client.sampling(base_model="b")
        with caplog.at_level(logging.WARNING):
            assert [await clock.pass_one() for _ in range(4)] == [HEARTBEAT_S] * 4 == [10.0] * 4
        assert [call.request.session_id for call in server.of(BEAT)] == ["session-1"] * 3
        assert "heartbeat of session session-1" in caplog.text


@pytest.mark.parametrize("error", [SessionEnded("no beat for five minutes"), NotFound("the store was emptied")])
async def test_a_session_that_the_server_ended_is_over(server, clock, error):
    server.script(BEAT, refused(error))
    async with open_client(server, clock) as client:
        await client.sampling(base_model="b")
        await clock.pass_one()
        await asyncio.gather(client._session._beats)
        for _ in range(2):
            with pytest.raises(HttpError, match=error.message):
                await client.training(base_model="b")
    assert "/end_session" not in server.paths()
    assert server.paths().count(BEAT) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [(None, "success"), (ValueError(), "errored"), (KeyboardInterrupt(), "interrupted"), (asyncio.CancelledError(), "interrupted")],
)
async def test_leaving_the_client_ends_its_session_and_says_why(server, clock, error, reason):
    client = open_client(server, clock)
    await client.sampling(base_model="b")
    await client.__aexit__(None if error is None else type(error), error, None)
    await client.close()
    [call] = server.of("/end_session")
    assert (call.request.session_id, call.request.reason) == ("session-1", reason)


async def test_a_client_without_a_session_ends_none(server, clock):
    async with open_client(server, clock):
        pass
    assert server.calls == []


@pytest.mark.parametrize("is_hanging", [False, True])
async def test_a_server_that_is_gone_does_not_keep_the_client_from_closing(server, clock, is_hanging, monkeypatch):
    monkeypatch.setattr("tinsmith.client.session.END_S", 0.05)

    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    server.script("/end_session", hang if is_hanging else httpx.ConnectError("refused"))
    client = open_client(server, clock)
    await client.sampling(base_model="b")
    await client.close()
    assert server.paths()[-1] == "/end_session"


async def test_a_session_that_could_not_be_opened_is_tried_again(server, clock):
    server.script("/create_session", refused(NotFound("no")))
    async with open_client(server, clock) as client:
        with pytest.raises(HttpError):
            await client.sampling(base_model="b")
        await client.sampling(base_model="b")


def test_what_describes_a_session_is_checked_at_once():
    with pytest.raises(ClientValidationError, match=r"^tags"):
        AsyncClient(URL, tags=["x" * 2000])
