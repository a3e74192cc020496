"""What trainer and sampler replicas have in common: an engine by its configured name, a lease, a reader of events, and an end.

The modules that build engines are imported by name: those that compute import PyTorch, which the process that starts the server and the
workers of fake engines do without.
"""

import asyncio
import gc
import importlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Protocol, cast

from tinsmith.config import SamplerConfig, TrainerConfig
from tinsmith.deployments.base_models import ServedModel
from tinsmith.deployments.presence import Presence, Use
from tinsmith.deployments.wiring import Blueprint, Connection, configure_logging
from tinsmith.engines.base import SamplingEngine, TrainingEngine
from tinsmith.queue.gate import Gate
from tinsmith.state.events import EventReader
from tinsmith.state.inbox import Message
from tinsmith.state.lanes import Replica

DRAIN_S = 3.0  # how long a stop may wait for the store; below the time that Serve gives a replica to stop
_MODULES = {
    "fake": "tinsmith.deployments.fake_engines",
    "peft": "tinsmith.deployments.torch_engines",
    "hf": "tinsmith.deployments.torch_engines",
}


def _of_others(_: Message) -> None:
    """A message that is no business of this replica."""


class WorkerEnded(RuntimeError):
    """A replica that can no longer work; Serve starts another one in its place."""


class EngineBuilders(Protocol):
    """What a module of engine builders offers. Both calls block for as long as weights load."""

    def training_engine(self, model: ServedModel, trainer: TrainerConfig, threads: int) -> TrainingEngine: ...

    def sampling_engine(self, model: ServedModel, sampler: SamplerConfig, threads: int) -> SamplingEngine: ...


class Serving(Protocol):
    """The executor of a replica."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


class Worker:
    """A replica at work: `executor` runs while the lease is kept and events are read. `look`: how it is, but for its gate."""

    def __init__(
        self,
        connection: Connection,
        replica: Replica,
        gate: Gate,
        executor: Serving,
        events: EventReader,
        look: Callable[[], Use] = Use,
    ) -> None:
        self._connection = connection
        self._gate = gate
        self._executor = executor
        self._events = events
        self._presence = Presence(connection, replica, events, lambda: replace(look(), is_healthy=gate.is_healthy))
        self._serving: asyncio.Task[None] | None = None
        self._listening: list[asyncio.Task[None]] = []

    @property
    def presence(self) -> Presence:
        return self._presence

    async def start(
        self,
        blueprint: Blueprint,
        found: Callable[[list[str]], None],
        cut_off: Callable[[], None],
        listeners: list[Coroutine[None, None, None]],
        on_message: Callable[[Message], None] = _of_others,
    ) -> None:
        """Take the lease, listen, serve. `found` hears, in this loop, of lanes without an owner, `cut_off` of renewals that failed, and
        `on_message` of what comes to this replica's inbox, orders to drain apart. Raises StateContention."""
        await self._events.start()
        await self._presence.begin(blueprint, self._hand_back, on_message, found=found, cut_off=cut_off)
        self._listening = [asyncio.create_task(listener) for listener in listeners]
        self._serving = asyncio.create_task(self._executor.run())

    async def check(self) -> None:
        """Raises WorkerEnded with the reason, once this replica should be replaced; ends the actor of one that is drained."""
        await self._presence.leave_if_drained()
        if not self._gate.is_healthy:
            raise WorkerEnded("the engine does not answer")
        if self._presence.is_draining:
            return
        if not self._presence.is_kept:
            raise WorkerEnded("nothing renews the lease")
        if not self._events.is_reading:
            raise WorkerEnded("nothing reads events")
        for task in (self._serving, self._presence.inbox, *self._listening):
            if task is None or task.done():
                raise WorkerEnded("a task of this replica has ended by a defect") from _defect_of(task)

    async def stop(self) -> None:
        """Finish what runs, hand everything back, and give up the lease, so that others need not wait for its end."""
        await self._hand_back()
        await self._presence.drained()
        await self._presence.end()
        await self._events.stop()
        self._gate.close()
        await self._connection.store.close()

    async def _hand_back(self) -> None:
        self._executor.stop()
        if self._serving is not None:
            await asyncio.wait([self._serving])  # `check` tells of its defects; the lease is given up all the same
        for task in self._listening:
            task.cancel()


Begin = Callable[[Blueprint, str], Awaitable[Worker]]


class WorkerReplica:
    """What Serve sees of a replica with an engine: it awaits `reconfigure` before it counts the replica as running, and `stop` as it stops
    it. `begin` loads the base model and starts the worker."""

    def __init__(self, blueprint: Blueprint, base: str, *, role: str, begin: Begin) -> None:
        configure_logging(blueprint, role)
        self._blueprint = blueprint
        self._base = base
        self._begin = begin
        self._worker: Worker | None = None

    async def reconfigure(self, _: Mapping[str, object]) -> None:
        """Load the base model and begin to serve, once. Raises what the engine raises, StateContention."""
        if self._worker is None:
            self._worker = await self._begin(self._blueprint, self._base)

    async def check_health(self) -> None:
        """Raises WorkerEnded."""
        if self._worker is None:
            raise WorkerEnded("the replica has not started")
        await self._worker.check()

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()


def engine_builders(engine: str) -> EngineBuilders:
    """`engine` as the configuration names it. Blocks for as long as its imports take.

    The garbage collector rests meanwhile: what an import makes stays, and looking through it took a sixth of the time (4.1 s to 3.4 s).
    """
    gc.disable()
    try:
        return cast(EngineBuilders, importlib.import_module(_MODULES[engine]))
    finally:
        gc.enable()


def _defect_of(task: asyncio.Task[None] | None) -> BaseException | None:
    return None if task is None or task.cancelled() else task.exception()
