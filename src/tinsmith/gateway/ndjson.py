"""An answer of JSON lines that are written as they come to be, and that ends with its caller.

The framework's own streaming answer learns of a closed connection only at some servers, and what it gives up it cancels at every await, its
clean-up included. This one watches for the disconnect itself, and `release` runs in any case, once, to its end. Knows nothing of what the
lines say.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

NDJSON = "application/x-ndjson"

_releasing: set["asyncio.Task[None]"] = set()  # the loop itself keeps no reference to a task


class LinesAnswer(StreamingResponse):
    """`lines`: one encoded line each, without its end. `release`: run when the answer has ended, by itself or with its connection.
    `bound_s`: after that time an answer that its caller does not read is cut."""

    media_type = NDJSON

    def __init__(self, lines: AsyncGenerator[bytes], release: Callable[[], Awaitable[None]], *, bound_s: float) -> None:
        super().__init__(lines, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._lines = lines
        self._release = release
        self._bound_s = bound_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), timeout=self._bound_s, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            ending = asyncio.create_task(self._end(sending, leaving))
            _releasing.add(ending)
            ending.add_done_callback(_releasing.discard)
            await asyncio.shield(ending)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._lines) as lines:
            async for line in lines:
                await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, *tasks: "asyncio.Task[None]") -> None:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self._release()
