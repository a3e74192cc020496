"""The long polls of one client. Ids that wait share them, so a thousand waiters cost a few connections.

Knows nothing of results: `next` answers what the server says of one task after at most one window.
"""

import asyncio
import copy
from collections.abc import Iterable, Iterator
from itertools import chain

from pydantic import ValidationError

from tinsmith.client.errors import ClientClosed, ClientError, HttpError
from tinsmith.client.transport import Transport
from tinsmith.protocol.envelopes import TaskEnvelope
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.native import MAX_RETRIEVED, RetrieveFuture, RetrieveFutures
from tinsmith.protocol.native_answers import TaskList

MAX_POLLS = 32  # at a time; an id that finds none free waits for the first that ends


class Polls:
    """At most `MAX_POLLS` requests at a time, each for one id or for up to `MAX_RETRIEVED`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiting: dict[str, list[asyncio.Future[TaskEnvelope]]] = {}  # in no poll yet, the oldest first
        self._running: set[asyncio.Task[None]] = set()

    async def next(self, request_id: str) -> TaskEnvelope:
        """The task's envelope, at once if it has ended, else after its end or the server's window. Raises as `Transport.post`."""
        self._transport.check_loop()
        waiter: asyncio.Future[TaskEnvelope] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request_id, []).append(waiter)
        self._start()
        return await waiter

    async def close(self) -> None:
        """End the polls. Who waits gets ClientClosed."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for waiters in self._waiting.values():
            _fail(waiters, ClientClosed())
        self._waiting.clear()

    def _start(self) -> None:
        if self._waiting and len(self._running) < MAX_POLLS:
            task = asyncio.get_running_loop().create_task(self._poll())
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.result()  # a defect of this module ends loudly
            self._start()

    async def _poll(self) -> None:
        await asyncio.sleep(0)  # who asks in the same turn of the loop comes along
        taken = self._take()
        try:
            await self._ask(taken)
        finally:
            for waiters in taken.values():
                _fail(waiters, ClientClosed())  # reached with somebody waiting only when `close` cancels this

    def _take(self) -> dict[str, list[asyncio.Future[TaskEnvelope]]]:
        taken: dict[str, list[asyncio.Future[TaskEnvelope]]] = {}
        for request_id in list(self._waiting):
            if len(taken) == MAX_RETRIEVED:
                break
            waiters = [waiter for waiter in self._waiting.pop(request_id) if not waiter.done()]
            if waiters:
                taken[request_id] = waiters
        return taken

    async def _ask(self, taken: dict[str, list[asyncio.Future[TaskEnvelope]]]) -> None:
        if len(taken) > 1:
            await self._ask_together(taken)
        elif taken:
            [(request_id, waiters)] = taken.items()
            await self._ask_alone(request_id, waiters)

    async def _ask_alone(self, request_id: str, waiters: list[asyncio.Future[TaskEnvelope]]) -> None:
        try:
            envelope = await self._transport.post(RetrieveFuture(request_id=request_id), TaskEnvelope)
        except ClientError as error:
            _fail(waiters, error)
        else:
            _tell(waiters, envelope)

    async def _ask_together(self, taken: dict[str, list[asyncio.Future[TaskEnvelope]]]) -> None:
        """One that the server does not know must not cost the others their answer: what is not told here is asked for alone."""
        try:
            answer = await self._transport.post(RetrieveFutures(request_ids=tuple(taken)), TaskList)
        except HttpError as error:
            if error.status != NotFound.status:
                _fail(chain.from_iterable(taken.values()), error)
                return
            answer = TaskList(tasks=())
        except ClientError as error:
            _fail(chain.from_iterable(taken.values()), error)
            return
        told = {envelope.request_id: envelope for envelope in _envelopes(answer)}
        for request_id, waiters in taken.items():
            if request_id in told:
                _tell(waiters, told[request_id])
        await asyncio.gather(*(self._ask_alone(request_id, waiters) for request_id, waiters in taken.items() if request_id not in told))


def _envelopes(answer: TaskList) -> Iterator[TaskEnvelope]:
    for task in answer.tasks:
        try:
            yield TaskEnvelope.model_validate(task)
        except ValidationError:
            continue  # an error in its place


def _tell(waiters: list[asyncio.Future[TaskEnvelope]], envelope: TaskEnvelope) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(envelope)


def _fail(waiters: Iterable[asyncio.Future[TaskEnvelope]], error: ClientError) -> None:
    """Each waiter raises an error of its own."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(copy.copy(error))
