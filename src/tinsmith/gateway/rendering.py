"""The texts of base models in this process: their tokenizers and chat templates, read once each, and the threads that render.

Text has few threads of its own: however much of it waits, bodies are read and metrics answered meanwhile.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.conversations import Conversations

NUM_THREADS = 2  # so that a long text does not hold up all others; a template keeps the interpreter busy, so more would gain nothing

T = TypeVar("T")


class Renderers:
    """By base model. One that has no directory, or none with a tokenizer, has no text."""

    def __init__(self) -> None:
        self._read: dict[str, Conversations | None] = {}
        self._reading = asyncio.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")

    async def find(self, base: BaseModelInfo) -> Conversations | None:
        """None where the base model has no tokenizer."""
        if base.name not in self._read:
            async with self._reading:
                if base.name not in self._read:
                    self._read[base.name] = await asyncio.to_thread(Conversations.from_dir, base.path) if base.path else None
        return self._read[base.name]

    async def need(self, base: BaseModelInfo, field: str) -> Conversations:
        """Raises ValidationFailed naming the field that cannot be read without a tokenizer."""
        found = await self.find(base)
        if found is None:
            raise ValidationFailed(f"{field}: base model {base.name} has no tokenizer on this server; send token ids")
        return found

    async def run(self, caller: Request, work: Callable[[], T]) -> T:
        """Do the work in a thread, in turn. Raises ClientDisconnect where the caller leaves before it is done: work that has not begun is
        then never begun. The body of the request must have been read."""
        working = asyncio.get_running_loop().run_in_executor(self._threads, contextvars.copy_context().run, work)
        leaving = asyncio.create_task(_leaves(caller))
        either: tuple[asyncio.Future[Any], ...] = (working, leaving)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


async def _leaves(caller: Request) -> None:
    while (await caller.receive())["type"] != "http.disconnect":
        pass
