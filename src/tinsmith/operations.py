"""What an operator asks a running server over HTTP: its status, its sessions, its queues, and to replace processes one at a time.

Speaks the native protocol's own classes. Prints nothing and reads no environment; `cli` does both.
"""

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import ValidationError

from tinsmith.protocol.envelopes import Answer
from tinsmith.protocol.native import PREFIX, Drain
from tinsmith.protocol.native_answers import ProcessStatus, ServerStatus, SessionList

A = TypeVar("A", bound=Answer)

POLL_S = 0.25  # between two looks at the status
ORDER_S = 5.0  # an order of which nothing shows after this time is given again: an inbox may lose a message
REQUEST_S = 30.0  # of one request
PROCESS_S = 1800.0  # of one process: a drain finishes the running call, whose own bound is a configured one
ROLES = ("sampler", "trainer", "gateway")  # in this order: callers lose nothing by any, and gateways tell of the others


class OperationFailed(Exception):
    """The server cannot be asked, or refused; the message is one line and ends with the remedy. `status_code`: of its answer, if any."""

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class ProcessNotThere(OperationFailed):
    """The server has no process of that id; it may have been replaced."""


class Operations:
    """One server, seen by its operator. A context manager. Every method raises OperationFailed."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = url.rstrip("/")
        headers = {} if api_key is None else {"X-API-Key": api_key}
        try:
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=REQUEST_S, transport=transport)
        except httpx.InvalidURL as error:
            raise OperationFailed(f"--url: {url!r} is no URL ({error}); write http://HOST:PORT") from error
        self._clock = clock
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def status(self) -> ServerStatus:
        return self._read("/status", ServerStatus)

    def sessions(self) -> SessionList:
        return self._read("/sessions", SessionList)

    def drain(self, process_id: str, *, within_s: float = PROCESS_S) -> None:
        """Replace one process: return when it is gone and a new healthy one of its role and base model serves. Raises ProcessNotThere."""
        before = self.status()
        process = next((candidate for candidate in before.processes if candidate.process_id == process_id), None)
        if process is None:
            raise ProcessNotThere(f"--process: {process_id!r} is not there; `tinsmith status` lists those that are")
        known = {peer.process_id for peer in before.processes}
        ordered_at = float("-inf")
        for said in self._waiting(process, lambda: self._undone(process, known), within_s):
            if said == _NOT_DRAINING and self._clock() - ordered_at >= ORDER_S:
                self._order(process_id)
                ordered_at = self._clock()

    def drain_all(self) -> Iterator[ProcessStatus]:
        """Replace every process that serves now, one at a time; yields each before its turn. One that another has replaced meanwhile is
        done, once as many of its role and base model serve as did at the start."""
        status = self.status()
        for role in ROLES:
            for process in status.processes:
                if process.role != role:
                    continue
                yield process
                try:
                    self.drain(process.process_id)
                except ProcessNotThere:
                    self._await_peers(process, len(_serving(status, process)))

    def _await_peers(self, process: ProcessStatus, count: int) -> None:
        """Return when that many serve in its place."""

        def missing() -> str | None:
            try:
                return None if len(_serving(self.status(), process)) >= count else _NOT_REPLACED
            except _Unreachable:
                return _NOT_ANSWERED

        for _ in self._waiting(process, missing, PROCESS_S):
            pass

    def _waiting(self, process: ProcessStatus, undone: Callable[[], str | None], within_s: float) -> Iterator[str]:
        """Yields what is waited for, from look to look, until nothing is. Raises OperationFailed after `within_s`."""
        deadline = self._clock() + within_s
        while (said := undone()) is not None:
            if self._clock() >= deadline:
                raise OperationFailed(f"{_name(process)} {said} after {within_s:g} s; the server's log says why")
            yield said
            self._sleep(POLL_S)

    def _undone(self, process: ProcessStatus, known: set[str]) -> str | None:
        """What the replacement still waits for; None when it is done. A gateway that is leaving may end the connection that asks."""
        try:
            status = self.status()
        except _Unreachable:
            return _NOT_ANSWERED
        now = next((candidate for candidate in status.processes if candidate.process_id == process.process_id), None)
        if now is not None:
            return _DRAINING if now.is_draining else _NOT_DRAINING
        fresh = [peer for peer in _serving(status, process) if peer.process_id not in known]
        return None if fresh else _NOT_REPLACED

    def _order(self, process_id: str) -> None:
        try:
            self._send("POST", Drain.path, Drain(process_id=process_id).model_dump_json())
        except _Unreachable:
            return  # given again
        except OperationFailed as error:
            if error.status_code != httpx.codes.NOT_FOUND:  # it has ended since the last look
                raise

    def _read(self, path: str, answer: type[A]) -> A:
        content = self._send("GET", path)
        try:
            return answer.model_validate_json(content)
        except ValidationError as error:
            raise OperationFailed(f"{self._url} does not answer as this version does; use the tinsmith of the server's version") from error

    def _send(self, method: str, path: str, body: str | None = None) -> bytes:
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            response = self._http.request(method, f"{PREFIX}{path}", content=body, headers=headers)
        except httpx.HTTPError as error:
            said = f"{self._url} cannot be reached ({_one_line(error)})"
            raise _Unreachable(f"{said}; start the server, or name its address with --url") from error
        if response.is_success:
            return response.content
        failed = _Unreachable if response.status_code in _RETRIED else OperationFailed
        raise failed(f"{self._url}: {_said(response)}", response.status_code)


class _Unreachable(OperationFailed):
    """Nobody answered, or somebody who may later."""


_RETRIED = frozenset({429, 502, 503, 504})
_DRAINING = "still drains"
_NOT_DRAINING = "has not begun to drain"
_NOT_ANSWERED = "cannot be asked for"
_NOT_REPLACED = "has no successor"
_REMEDIES = {
    401: "pass the key with --api-key or TINSMITH_API_KEY",
    403: "use a key that may do this",
    404: "check --url: this path is not served there",
}


def _serving(status: ServerStatus, process: ProcessStatus) -> list[ProcessStatus]:
    """The healthy processes of its role and base model that take work."""
    return [
        peer
        for peer in status.processes
        if (peer.role, peer.base_model) == (process.role, process.base_model) and peer.is_healthy and not peer.is_draining
    ]


def _name(process: ProcessStatus) -> str:
    return f"{process.role} {process.process_id}"


def _said(response: httpx.Response) -> str:
    """The server's own line, which ends with its remedy, or one of ours."""
    try:
        said = response.json().get("error")
    except (ValueError, AttributeError):
        said = None
    if isinstance(said, str) and said and response.status_code != httpx.codes.UNAUTHORIZED:
        return f"{response.status_code} {said}"
    remedy = _REMEDIES.get(response.status_code, "the log of the server says why")
    return f"{response.status_code} {response.reason_phrase}; {remedy}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
