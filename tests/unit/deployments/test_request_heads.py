"""Heads of requests that are far over their bound, through a real socket."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable

import pytest
from fastapi import FastAPI

from tinsmith.deployments import request_heads
from tinsmith.deployments.gateway import HttpServer
from tinsmith.deployments.ports import listen_shared
from tinsmith.gateway.auth import MAX_HEAD

WAIT_S = 20
MEBIBYTE = 1024 * 1024
START = b"POST /native/v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"


class Server:
    """Counts what reaches its app."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        app = FastAPI()

        @app.post("/{path:path}")
        async def take(path: str) -> None:
            self.paths.append(path)

        listener = listen_shared("127.0.0.1", 0, 8)
        self.port = listener.getsockname()[1]
        self.http = HttpServer(app, listener, lambda: None)

    async def exchange(self, *chunks: bytes) -> bytes:
        """All that is answered until the connection closes; empty where it is cut."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        async with asyncio.timeout(WAIT_S):
            try:
                for chunk in chunks:
                    writer.write(chunk)
                    await writer.drain()
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.http.start()
    yield server
    await server.http.stop()


@pytest.mark.parametrize(
    "rest",
    [b"X: " + b"v" * 9 * MEBIBYTE, b"X" * 9 * MEBIBYTE + b": v", b"\r\n".join(b"X-%d: v" % number for number in range(200_000))],
    ids=["a value", "a name", "many headers"],
)
async def test_a_head_far_over_the_bound_is_answered_by_name_and_never_reaches_the_app(server: Server, rest: bytes) -> None:
    answer = await server.exchange(START, rest, b"\r\n\r", b"\n{}")
    status, _, body = answer.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400 ")
    payload = json.loads(body)
    assert (payload["reason"], f"more than {MAX_HEAD} bytes" in payload["error"]) == ("invalid_request", True)
    assert re.search(rb"x-request-id: " + payload["request_id"].encode(), status)
    assert server.paths == []


async def test_a_path_without_end_is_refused(server: Server) -> None:
    answer = await server.exchange(b"POST /" + b"p" * MEBIBYTE, b" HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert server.paths == []


async def test_a_head_without_end_is_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_heads, "MAX_DROPPED", MEBIBYTE)
    assert await server.exchange(START, b"X: ", *[b"v" * MEBIBYTE] * 16) == b""
    assert server.paths == []


def closing(path: bytes) -> bytes:
    return b"POST /" + path + b" HTTP/1.1\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("join", [lambda parts: [b"".join(parts)], list], ids=["at once", "one by one"])
async def test_long_bodies_and_following_requests_are_no_heads(server: Server, join: Callable[[list[bytes]], list[bytes]]) -> None:
    body = b"b" * MEBIBYTE
    first = b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    await server.exchange(*join([first, body, closing(b"b")]))
    assert server.paths == ["a", "b"]
