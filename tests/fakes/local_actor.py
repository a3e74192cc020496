"""A handle of the memory store's actor that needs no Ray: calls run in the caller's own loop."""

import asyncio

from tinsmith.deployments.memory_state import MemoryState


class LocalMethod:
    """`handle.method.remote(...)`: starts the call and answers something to await."""

    def __init__(self, actor: MemoryState) -> None:
        self._actor = actor

    def remote(self, *arguments: object, **options: object) -> "asyncio.Task[object]":
        return asyncio.ensure_future(self._actor.call(*arguments, **options))  # type: ignore[arg-type]


class LocalHandle:
    def __init__(self, actor: MemoryState) -> None:
        self.call = LocalMethod(actor)
