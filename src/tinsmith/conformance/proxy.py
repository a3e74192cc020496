"""A proxy between an SDK and a server: answers in the server's place, loses its answers, holds or changes them, and writes all down.

Knows HTTP/1.1 and nothing of the wire; h11 and httpx come with every release of the SDK. It runs on a loop and in a thread of its own.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import h11
import httpx

START_S = 10.0
READ_BYTES = 65_536
LOOK_S = 0.05  # between two looks at a rule that holds its answers
_OF_A_CONNECTION = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive"})

Json = dict[str, Any]
Change = Callable[[Json], Json]


@dataclass(slots=True)
class Exchange:
    """A request that passed, and what its sender was answered. `answer`: what the server said, where it was asked, lost answers too.

    `status` is 0 while there is no answer, and for one that was lost. `at_s`: of a monotonic clock, when the request had come.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes
    at_s: float
    status: int = 0
    answer: bytes = b""

    def sent(self) -> Json:
        """The request as JSON."""
        return dict(json.loads(self.body))

    def told(self) -> Json:
        """The server's answer as JSON."""
        return dict(json.loads(self.answer))


@dataclass(slots=True)
class Rule:
    """What happens to the next `times` requests whose path ends with `name`; None: to all.

    `status`: what the sender is answered, with `body`; None leaves the server's answer. `is_executed`: the server is asked in any case.
    `is_lost`: the connection ends in place of an answer. While `is_held`, answers wait; who added the rule unsets it. `change_request` and
    `change_answer` see JSON objects.
    """

    name: str
    times: int | None = 1
    status: int | None = None
    body: Json = field(default_factory=lambda: {"detail": "injected"})
    headers: Mapping[str, str] = field(default_factory=dict)
    is_executed: bool = False
    is_lost: bool = False
    is_held: bool = False
    change_request: Change | None = None
    change_answer: Change | None = None

    @property
    def asks(self) -> bool:
        return self.status is None or self.is_executed


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Proxy:
    """Listens on a free port of loopback while its context is entered. Rules are tried in the order in which they were given."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream.rstrip("/")
        self._rules: list[Rule] = []
        self._exchanges: list[Exchange] = []
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="conformance-proxy", daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(START_S):
            raise TimeoutError("the proxy did not start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)

    def add(self, rule: Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def clear(self) -> None:
        """Every request passes from now on as it is."""
        with self._lock:
            self._rules.clear()

    def answer(self, name: str, status: int, body: Json | None = None, times: int | None = 1, **headers: str) -> None:
        """The server hears nothing of the next `times` requests."""
        told = {key.replace("_", "-"): value for key, value in headers.items()}
        self.add(Rule(name, times, status, {"detail": "injected"} if body is None else body, told))

    def lose(self, name: str, times: int = 1) -> None:
        """The server carries the request out, and its answer never arrives."""
        self.add(Rule(name, times, is_lost=True))

    def change_config(self, **flags: object) -> None:
        """Of the client: what `client/config` says."""
        self.add(Rule("client/config", None, change_answer=lambda config: config | flags))

    def seen(self, name: str) -> list[Exchange]:
        """Requests so far whose path ends with `name`, in the order of their coming."""
        with self._lock:
            return [exchange for exchange in self._exchanges if exchange.path.endswith(f"/{name}")]

    def _take(self, path: str) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if path.endswith(f"/{rule.name}"):
                    if rule.times is not None:
                        rule.times -= 1
                        if rule.times == 0:
                            self._rules.remove(rule)
                    return rule
        return None

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        async with httpx.AsyncClient(timeout=None, limits=limits, follow_redirects=False) as self._http:  # noqa: S113 (clients have timeouts)
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=4096)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._started.set()
            await self._stop.wait()
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        try:
            while (request := await _receive(connection, reader)) is not None:
                reply = await self._exchange(*request)
                if reply is None:
                    writer.transport.abort()
                    return
                writer.write(_encoded(connection, reply))
                await writer.drain()
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return
                connection.start_next_cycle()
        except (OSError, h11.ProtocolError, asyncio.CancelledError):
            return  # whoever asked has gone, or the proxy is to end
        finally:
            writer.close()

    async def _exchange(self, head: h11.Request, body: bytes) -> _Reply | None:
        """None where the answer is to be lost."""
        target = head.target.decode("ascii")
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in head.headers}
        exchange = Exchange(target.partition("?")[0], headers, body, time.monotonic())
        with self._lock:
            self._exchanges.append(exchange)
        rule = self._take(exchange.path) or Rule("")
        if rule.change_request is not None:
            body = json.dumps(rule.change_request(json.loads(body))).encode()
        reply = await self._ask(head.method.decode(), target, headers, body, exchange) if rule.asks else None
        while rule.is_held:  # noqa: ASYNC110 (another thread unsets it)
            await asyncio.sleep(LOOK_S)
        if rule.is_lost:
            return None
        if rule.status is not None:
            reply = _Reply(rule.status, (("content-type", "application/json"), *rule.headers.items()), json.dumps(rule.body).encode())
        elif reply is not None and rule.change_answer is not None:
            reply = _Reply(reply.status, reply.headers, json.dumps(rule.change_answer(json.loads(reply.body))).encode())
        exchange.status = 0 if reply is None else reply.status
        return reply

    async def _ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes, exchange: Exchange) -> _Reply:
        passed = {name: value for name, value in headers.items() if name not in _OF_A_CONNECTION and name != "accept-encoding"}
        try:
            response = await self._http.request(
                method, self._upstream + target, content=body, headers=passed | {"accept-encoding": "identity"}
            )
        except httpx.TransportError as error:
            return _Reply(502, (("content-type", "application/json"),), json.dumps({"detail": f"no answer: {error}"}).encode())
        exchange.answer = response.content
        kept = tuple(
            (name, value) for name, value in response.headers.items() if name not in _OF_A_CONNECTION and name != "content-encoding"
        )
        return _Reply(response.status_code, kept, response.content)


async def _receive(connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[h11.Request, bytes] | None:
    """The next request with its body; None when there is no further one. Raises h11.RemoteProtocolError."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return head, bytes(body)
        else:
            return None


def _encoded(connection: h11.Connection, reply: _Reply) -> bytes:
    # A status without a body may not tell the length of one.
    has_body = reply.status >= 200 and reply.status not in (204, 304)
    length = [("content-length", str(len(reply.body)))] if has_body else []
    parts = [connection.send(h11.Response(status_code=reply.status, headers=[*reply.headers, *length]))]
    if has_body and reply.body:
        parts.append(connection.send(h11.Data(data=reply.body)))
    parts.append(connection.send(h11.EndOfMessage()))
    return b"".join(part for part in parts if part is not None)
