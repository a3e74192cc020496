"""The session of a client: opened late, kept alive, ended."""

import asyncio
import logging

import httpx
import pytest

from tests.fakes.native_server import URL, NativeServer, refused
from tinsmith.client import AsyncClient, ClientValidationError, HttpError
from tinsmith.client.session import HEARTBEAT_S
from tinsmith.protocol.errors import NotFound, SessionEnded, StateContention, Unauthenticated

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
async def test_a_session_that_the_server_ended_is_over(server, clock, error, caplog):
    server.script(BEAT, refused(error))
    client = open_client(server, clock)
    await client.sampling(base_model="b")
    await clock.pass_one()
    await asyncio.gather(client._session._beats)
    assert error.message in caplog.text
    await client.close()
    assert "/end_session" not in server.paths()
    assert server.paths().count(BEAT) == 1


def session(number: int) -> httpx.Response:
    return httpx.Response(200, json={"session_id": f"session-{number}", "created_ms": 1})


@pytest.mark.parametrize("error", [SessionEnded("no beat for five minutes"), NotFound("the store was emptied")])
async def test_a_new_model_or_sampler_opens_a_new_session_where_a_heartbeat_found_the_old_one_over(server, clock, error):
    server.script("/create_session", session(1), session(2))
    server.script(BEAT, refused(error))
    async with open_client(server, clock) as client:
        await client.sampling(base_model="b")
        await clock.pass_one()
        await asyncio.gather(client._session._beats)
        await asyncio.gather(client.training(base_model="b"), client.sampling(base_model="b"))
        await clock.pass_one()
        await clock.sleeping.get()
    assert server.of("/create_model")[0].request.session_id == server.of("/create_sampler")[1].request.session_id == "session-2"
    assert [call.request.session_id for call in server.of(BEAT)] == ["session-1", "session-2"]
    assert [call.request.session_id for call in server.of("/end_session")] == ["session-2"]


@pytest.mark.parametrize("path", ["/create_model", "/create_sampler"])
@pytest.mark.parametrize("error", [SessionEnded("ended"), NotFound("session session-1 is unknown")])
async def test_a_refusal_for_a_session_that_is_over_is_answered_with_a_new_session_once(server, clock, path, error):
    server.script("/create_session", session(1), session(2))
    server.script(BEAT, refused(error))
    async with open_client(server, clock) as client:
        await client.sampling(base_model="b")
        server.script(path, refused(error))
        await (client.training(base_model="b") if path == "/create_model" else client.sampling(base_model="b"))
        assert [call.request.session_id for call in server.of(path)][-2:] == ["session-1", "session-2"]
        server.script(path, refused(error), refused(error))
        server.script(BEAT, refused(error))
        with pytest.raises(HttpError, match=error.message):
            await (client.training(base_model="b") if path == "/create_model" else client.sampling(base_model="b"))
        assert len(server.of("/create_session")) == 3


async def test_something_else_that_is_unknown_leaves_the_session_as_it_is(server, clock):
    async with open_client(server, clock) as client:
        await client.sampling(base_model="b")
        server.script("/create_model", refused(NotFound("base_model: unknown")))
        with pytest.raises(HttpError, match="base_model"):
            await client.training(base_model="x")
        server.script("/create_model", refused(NotFound("base_model: unknown")))
        server.script(BEAT, *[refused(StateContention("away"))], refused(Unauthenticated("no such key")))
        closing = asyncio.create_task(pass_all(clock))
        with pytest.raises(HttpError, match="no such key"):
            await client.training(base_model="x")
        closing.cancel()
        await client.sampling(base_model="b")
    assert len(server.of("/create_session")) == 1


async def pass_all(clock: Clock) -> None:
    while True:
        pause_s, awake = await clock.sleeping.get()
        if pause_s != HEARTBEAT_S:
            awake.set()


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
    with pytest.raises(ClientValidationError, match=r"^metadata.a: holds half of a surrogate pair"):
        AsyncClient(URL, metadata={"a": "x\ud800"})
