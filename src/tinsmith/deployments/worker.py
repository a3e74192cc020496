"""What trainer and sampler replicas have in common: an engine by its configured name, a lease, a reader of events, and an end.

The modules that build engines are imported by name: those that compute import PyTorch, which the process that starts the server and the
workers of fake engines do without.
"""

import asyncio
import contextlib
import gc
import importlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import ParamSpec, Protocol, cast

import ray

from tinsmith.config import SamplerConfig, TrainerConfig
from tinsmith.deployments.base_models import ServedModel
from tinsmith.deployments.wiring import Blueprint, Connection, configure_logging, connect
from tinsmith.engines.base import SamplingEngine, TrainingEngine
from tinsmith.protocol.errors import StateContention
from tinsmith.queue.gate import Gate
from tinsmith.queue.heartbeat import Heartbeat, this_process
from tinsmith.state.events import EventReader, Subscription
from tinsmith.state.lanes import Replica

P = ParamSpec("P")

DRAIN_S = 3.0  # how long a stop may wait for the store; below the time that Serve gives a replica to stop
LISTEN_S = 3600.0  # of one wait for an event; only bounds how long a forgotten task would live
_MODULES = {
    "fake": "tinsmith.deployments.fake_engines",
    "peft": "tinsmith.deployments.torch_engines",
    "hf": "tinsmith.deployments.torch_engines",
}


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
    """A replica at work: `executor` runs while the lease is kept and events are read."""

    def __init__(self, connection: Connection, replica: Replica, gate: Gate, executor: Serving, events: EventReader) -> None:
        self._connection = connection
        self._replica = replica
        self._gate = gate
        self._executor = executor
        self._events = events
        self._heartbeat: Heartbeat | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listening: list[asyncio.Task[None]] = []

    async def start(
        self,
        blueprint: Blueprint,
        found: Callable[[list[str]], None],
        cut_off: Callable[[], None],
        listeners: list[Coroutine[None, None, None]],
    ) -> None:
        """Take the lease, listen, serve. `found` hears, in this loop, of lanes without an owner, and `cut_off` of renewals that failed.
        Raises StateContention."""
        await self._events.start()
        found(await self._connection.lanes.renew(self._replica))
        self._heartbeat = self._start_heartbeat(blueprint, found, cut_off)
        self._listening = [asyncio.create_task(listener) for listener in listeners]
        self._serving = asyncio.create_task(self._executor.run())

    def check(self) -> None:
        """Raises WorkerEnded with the reason, once this replica should be replaced."""
        if not self._gate.healthy:
            raise WorkerEnded("the engine does not answer")
        if self._heartbeat is None or not self._heartbeat.healthy:
            raise WorkerEnded("nothing renews the lease")
        if not self._events.is_reading:
            raise WorkerEnded("nothing reads events")
        for task in (self._serving, *self._listening):
            if task is None or task.done():
                raise WorkerEnded("a task of this replica has ended by a defect") from _defect_of(task)

    async def stop(self) -> None:
        """Finish what runs, hand everything back, and give up the lease, so that others need not wait for its end."""
        self._executor.stop()
        if self._serving is not None:
            await asyncio.wait([self._serving])  # `check` tells of its defects; the lease is given up all the same
        for task in self._listening:
            task.cancel()
        if self._heartbeat is not None:
            await asyncio.to_thread(self._heartbeat.stop)
        with contextlib.suppress(StateContention):
            await self._connection.lanes.bury(self._replica.id)
        await self._events.stop()
        self._gate.close()
        await self._connection.store.close()

    def _start_heartbeat(self, blueprint: Blueprint, found: Callable[[list[str]], None], cut_off: Callable[[], None]) -> Heartbeat:
        loop = asyncio.get_running_loop()
        heartbeat = Heartbeat(
            lambda: connect(blueprint),
            self._replica,
            lease_s=blueprint.config.execution.lease_s,
            found=lambda unowned: _call_in(loop, found, unowned),
            cut_off=lambda: _call_in(loop, cut_off),
        )
        heartbeat.start()
        return heartbeat


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
        """Load the base model and begin to serve. Raises what the engine raises, StateContention."""
        self._worker = await self._begin(self._blueprint, self._base)

    async def check_health(self) -> None:
        """Raises WorkerEnded."""
        if self._worker is None:
            raise WorkerEnded("the replica has not started")
        self._worker.check()

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()


async def listen(subscription: Subscription, hear: Callable[[list[str]], None], resync: Callable[[], None]) -> None:
    """Pass on what the subscription hears, for ever. `resync`: events may have been missed."""
    while True:
        if await subscription.wait(LISTEN_S):
            if subscription.take_resync():
                resync()
            hear(subscription.take())


def engine_builders(engine: str) -> EngineBuilders:
    """`engine` as the configuration names it. Blocks for as long as its imports take.

    The garbage collector rests meanwhile: what an import makes stays, and looking through it took a sixth of the time (4.1 s to 3.4 s).
    """
    gc.disable()
    try:
        return cast(EngineBuilders, importlib.import_module(_MODULES[engine]))
    finally:
        gc.enable()


def new_replica(base: str) -> Replica:
    """This process under a fresh id. A node of Ray is one pid namespace."""
    return this_process(uuid.uuid4().hex, base, ray.get_runtime_context().get_node_id())


def _defect_of(task: asyncio.Task[None] | None) -> BaseException | None:
    return None if task is None or task.cancelled() else task.exception()


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(partial(call, *args, **kwargs))
