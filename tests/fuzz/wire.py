"""A request as it goes over the wire, the connection that it takes, and what an answer to any of them must look like."""

import http.client
import json
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.protocol.errors import ReasonCode

MAX_ANSWER_S = 20.0  # long polls of a second; on a machine that is busy besides
_JSON = "application/json"
_SECRETS = re.compile(r"Traceback|File \"|site-packages|/tinsmith/|tml-[0-9a-f]{12}-")


@dataclass(frozen=True, slots=True)
class Shot:
    """One request. `target`: path and query, in ASCII. `how`: the mutations, for whoever reads a failure."""

    route: str
    target: str
    body: bytes | None
    headers: Mapping[str, str]
    how: tuple[str, ...]

    @property
    def method(self) -> str:
        return self.route.split()[0]

    @property
    def is_openai(self) -> bool:
        return self.target.startswith("/v1/")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    media_type: str
    body: bytes
    seconds: float

    @property
    def is_refusal(self) -> bool:
        return self.status >= 400


@dataclass
class Line:
    """A connection that is kept, and opened again where a server has closed it."""

    host: str
    port: int
    _connection: http.client.HTTPConnection | None = None

    def fire(self, shot: Shot) -> Answer:
        began = time.monotonic()
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.host, self.port, timeout=MAX_ANSWER_S)
        try:
            self._send(self._connection, shot)
            response = self._connection.getresponse()
            answer = Answer(response.status, response.getheader("content-type", ""), response.read(), time.monotonic() - began)
        except (http.client.HTTPException, OSError) as error:
            raise AssertionError(f"no answer to {shot}: {error!r}") from error
        if response.will_close:
            self.close()
        return answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def raw(self, sent: bytes) -> bytes:
        """What comes back for bytes that need be no HTTP, over a connection of their own that sends nothing more."""
        with socket.create_connection((self.host, self.port), timeout=MAX_ANSWER_S) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)

    @staticmethod
    def _send(connection: http.client.HTTPConnection, shot: Shot) -> None:
        headers = {name.lower(): value.encode("latin-1", "replace") for name, value in shot.headers.items()}
        connection.putrequest(shot.method, shot.target, skip_host="host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if shot.body is not None:
            connection.putheader("content-length", str(len(shot.body)))
        connection.endheaders(shot.body)


def check(shot: Shot, answer: Answer) -> None:
    """That an answer is one which this server may give to anything: within the bound, no fault of its own, in the form of the face."""
    told = f"{shot}\n-> {answer.status} {answer.media_type} in {answer.seconds:.1f} s: {answer.body[:2000]!r}"
    assert answer.seconds < MAX_ANSWER_S, told
    assert answer.status < 500, told
    if answer.status == 200:
        return
    assert not _SECRETS.search(answer.body.decode(errors="replace")), told
    if not answer.is_refusal:
        assert (answer.status, answer.body) in {(204, b""), (302, b"")}, told
        return
    if answer.status == 408 and "retrieve_future" in shot.route and b"try_again" in answer.body:
        return
    assert answer.media_type == _JSON, told
    body = json.loads(answer.body)
    if shot.is_openai:
        assert list(body) == ["error"], told
        assert set(body["error"]) == {"message", "type", "param", "code"}, told
        message = body["error"]["message"]
    else:
        assert set(body) == {"detail", "reason", "category"}, told  # and no `error`, which marks a failed future
        assert body["reason"] in set(ReasonCode), told
        message = body["detail"]
    assert isinstance(message, str), told
    assert message, told
    assert "\n" not in message, told
