"""An event loop on a thread of its own, for callers that block.

Knows nothing of what runs on it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from tinsmith.client.errors import ClientClosed

INTERRUPT_S = 5.0  # for what an interrupted call still has to do: the cancel that it sends is bounded by 2 s

T = TypeVar("T")


class Loop:
    """The thread does not keep the process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: set[_Call[Any]] = set()
        self._is_over = False
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._serve, name="tinsmith-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its outcome. An interrupt (Ctrl-C) cancels the coroutine, and lets it put things in order before it goes on to the caller.

        Raises ClientClosed once the loop has ended, and what the coroutine raises.
        """
        call = _Call(coroutine)
        self._calls.add(call)
        try:
            self._schedule(call)
            return call.outcome.result()
        except concurrent.futures.CancelledError:  # by the end of the loop: nobody else cancels it
            raise ClientClosed from None
        finally:
            if not call.outcome.done():
                self._loop.call_soon_threadsafe(call.cancel)
                concurrent.futures.wait([call.outcome], INTERRUPT_S)
            self._calls.discard(call)

    def stop_after(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it, then end the loop. Does not wait, so the garbage collector may call it on any thread."""
        try:
            self._loop.call_soon_threadsafe(self._start_last, coroutine)
        except RuntimeError:  # the loop is closed already
            coroutine.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _schedule(self, call: "_Call[Any]") -> None:
        """`_serve` cancels what it finds at its end: a call that it does not find sees that it is over."""
        if self._is_over:
            call.cancel()
        else:
            self._loop.call_soon_threadsafe(call.start)

    def _start_last(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._ending = self._loop.create_task(self._last(coroutine))

    async def _last(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        finally:
            self._loop.stop()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._is_over = True
            self._loop.run_until_complete(self._wind_up())
        finally:
            self._loop.close()
            for call in list(self._calls):
                call.cancel()

    async def _wind_up(self) -> None:
        await asyncio.sleep(0)  # calls that were scheduled a moment ago begin
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


class _Call(Generic[T]):
    """One coroutine on its way through the loop. All but `outcome` belongs to the loop's thread while that runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._settle)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.outcome.done():
            self._coroutine.close()
            self._give_up()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._give_up()
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())

    def _give_up(self) -> None:
        self.outcome.cancel()
        self.outcome.set_running_or_notify_cancel()  # wakes who waits
