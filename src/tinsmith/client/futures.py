"""A submitted command as its caller sees it, and the only loop that waits for one.

Knows nothing of what a result means: whoever submits says how to read it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import JsonValue, ValidationError

from tinsmith.client.errors import ClientError, HttpError, RecordLost, Report, TaskCancelled, TaskFailed, UnexpectedAnswer, WaitTimedOut
from tinsmith.client.polls import Polls
from tinsmith.client.transport import Transport, unreadable
from tinsmith.protocol.envelopes import Answer, TaskEnvelope
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.futures import State
from tinsmith.protocol.native import CancelFuture, StrictRequest
from tinsmith.protocol.native_answers import CancelAnswer

WAIT_S = 7200.0  # for a result, all polls and retries together
CANCEL_S = 2.0  # for the cancel that an interrupted wait sends

T = TypeVar("T")
U = TypeVar("U")
A = TypeVar("A", bound=Answer)
Read = Callable[[JsonValue], T]
OnProgress = Callable[[TaskEnvelope], None]


@dataclass(frozen=True)
class Tasks:
    """What the futures of one client share."""

    transport: Transport
    polls: Polls
    wait_s: float = WAIT_S
    on_progress: OnProgress | None = None

    async def submit(self, request: StrictRequest, read: Read[T]) -> "AsyncFuture[T]":
        """Raises as `Transport.post`."""
        return AsyncFuture(self, await self.transport.post(request, TaskEnvelope), read)


class AsyncFuture(Generic[T]):
    """A command that the server has taken. `await future` is `await future.result()`; it may be awaited often, and by several tasks.

    Cancelling the task that waits (Ctrl-C too) sends the server a cancel, which drops a command that has not started. To stop waiting and
    let the command go on, give `result` a timeout.
    """

    def __init__(self, tasks: Tasks, envelope: TaskEnvelope, read: Read[T]) -> None:
        self._tasks = tasks
        self._envelope = envelope
        self._read = read
        self._values: list[T] = []  # the result, once it was read

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id!r}, {self._envelope.status})"

    def __await__(self) -> Generator[object, None, T]:
        return self.result().__await__()

    @property
    def request_id(self) -> str:
        """Good for `client.future(request_id, ...)`, from another process too."""
        return self._envelope.request_id

    async def result(self, timeout: float | None = None, on_progress: OnProgress | None = None) -> T:
        """Wait for the end. `timeout` in s, in place of the client's; `on_progress` is called with each new status or queue state.

        Raises TaskFailed, TaskCancelled, WaitTimedOut (the command goes on), RecordLost, ConnectionFailed, HttpError, ClientClosed.
        """
        if not self._values:
            envelope = await self._wait(self._tasks.wait_s if timeout is None else timeout, on_progress or self._tasks.on_progress)
            _raise_failure(envelope)
            value = self._read_result(envelope)
            if not self._values:  # another waiter may have been faster
                self._values.append(value)
        return self._values[0]

    async def cancel(self) -> bool:
        """Whether the command was dropped; one that runs or has ended goes its way. Raises RecordLost and as `Transport.post`."""
        try:
            answer = await self._tasks.transport.post(CancelFuture(request_id=self.request_id), CancelAnswer)
        except HttpError as error:
            raise _lost_or(error, self.request_id) from None
        return answer.cancelled

    async def status(self) -> TaskEnvelope:
        """What the server says of it. Of one that has not ended, the answer takes up to one window of a long poll. Raises as `result`,
        a failure of the command itself apart."""
        if not self._envelope.status.is_terminal:
            await self._poll()
        return self._envelope

    def mapped(self, make: Callable[[T], U]) -> "AsyncFuture[U]":
        """The same command, with `make` of its result as the result."""
        read = self._read
        return AsyncFuture(self._tasks, self._envelope, lambda result: make(read(result)))

    async def _wait(self, limit_s: float, on_progress: OnProgress | None) -> TaskEnvelope:
        try:
            async with asyncio.timeout(limit_s) as scope:
                return await self._end(on_progress)
        except TimeoutError:
            if not scope.expired():
                raise
        except asyncio.CancelledError:
            await self._cancel_quietly()
            raise
        raise WaitTimedOut(self.request_id, limit_s)

    async def _end(self, on_progress: OnProgress | None) -> TaskEnvelope:
        """The waiting loop: poll after poll, without a pause. The polls retry what may pass."""
        told: tuple[object, ...] = ()
        while True:
            envelope = self._envelope
            if on_progress is not None and told != (envelope.status, envelope.queue_state):
                told = (envelope.status, envelope.queue_state)
                on_progress(envelope)
            if envelope.status.is_terminal:
                return envelope
            await self._poll()

    async def _poll(self) -> None:
        try:
            envelope = await self._tasks.polls.next(self.request_id)
        except HttpError as error:
            raise _lost_or(error, self.request_id) from None
        if not self._envelope.status.is_terminal:  # another waiter may know more
            self._envelope = envelope

    async def _cancel_quietly(self) -> None:
        """Best effort: the interrupted caller does not wait for a server that does not answer."""
        if self._envelope.status.is_terminal:
            return
        with contextlib.suppress(ClientError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self._tasks.transport.post_once(CancelFuture(request_id=self.request_id), CancelAnswer)

    def _read_result(self, envelope: TaskEnvelope) -> T:
        try:
            return self._read(envelope.result)
        except ValidationError as error:
            unreadable(error, f"the result of {self.request_id}")


def reader(answer: type[A]) -> Read[A]:
    """Reads a result as that message."""
    return answer.model_validate


def as_json(result: JsonValue) -> JsonValue:
    """Reads a result as it is."""
    return result


def _raise_failure(envelope: TaskEnvelope) -> None:
    if envelope.status is State.COMPLETED:
        return
    if envelope.error is None:
        raise UnexpectedAnswer(f"task {envelope.request_id} is {envelope.status} and the server does not say why; its log does")
    report = Report.of(envelope.error)
    raise TaskCancelled(report) if envelope.status is State.CANCELLED else TaskFailed(report)


def _lost_or(error: HttpError, request_id: str) -> ClientError:
    return RecordLost(request_id) if error.status == NotFound.status else error
