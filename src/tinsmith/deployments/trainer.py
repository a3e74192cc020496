"""The trainer deployment: a replica holds a base model and serves the model lanes that it owns.

What is wired here: an engine behind its gate, the executor over the lanes, a lease, and the events that ring the executor's bells.
Imports no PyTorch unless the configured engine needs it.
"""

import asyncio
import logging
from collections.abc import Mapping

from tinsmith import telemetry
from tinsmith.config import ServerConfig
from tinsmith.deployments.training_backend import TrainingBackend
from tinsmith.deployments.wiring import Blueprint, connect
from tinsmith.deployments.worker import DRAIN_S, Worker, WorkerEnded, configure_logging, engine_builders, listen, new_replica
from tinsmith.engines.base import TrainingEngine
from tinsmith.lifecycle.adapters import AdapterSlots
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.training import Kind, TrainingCommand
from tinsmith.protocol.wire import decode_command
from tinsmith.queue.executor import Executor, SnapshotPolicy
from tinsmith.queue.gate import Gate
from tinsmith.state.catalog import Catalog
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import bell_topic, work_topic

_log = logging.getLogger(__name__)


class Trainer:
    """A replica. Serve awaits `reconfigure` before it counts a replica as running, and `stop` as it stops one."""

    def __init__(self, blueprint: Blueprint, base: str) -> None:
        configure_logging(blueprint, "trainer")
        self._blueprint = blueprint
        self._base = base
        self._worker: Worker | None = None

    async def reconfigure(self, _: Mapping[str, object]) -> None:
        """Load the base model and begin to serve. Raises what the engine raises, StateContention."""
        with telemetry.span(telemetry.WORKER_LOAD, role="trainer"):
            engine = await asyncio.to_thread(_build_engine, self._blueprint, self._base)
        self._worker = await _start_worker(self._blueprint, self._base, engine)
        _log.info("%s: ready for %d adapters", self._base, engine.capacity)

    async def check_health(self) -> None:
        """Raises WorkerEnded."""
        if self._worker is None:
            raise WorkerEnded("the replica has not started")
        self._worker.check()

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()


def _build_engine(blueprint: Blueprint, base: str) -> TrainingEngine:
    trainer = blueprint.config.model(base).trainer
    return engine_builders(trainer.engine).training_engine(blueprint.models[base], trainer, blueprint.config.execution.threads)


async def _start_worker(blueprint: Blueprint, base: str, engine: TrainingEngine) -> Worker:
    config = blueprint.config
    connection, replica = connect(blueprint), new_replica(base)
    gate = Gate(bound_s=config.execution.timeout_s, exclusive=True, ping=engine.ping)
    checkpoints, catalog = Checkpoints(config.checkpoints.dir), Catalog(connection.store)
    executor = Executor(
        connection.lanes,
        TrainingBackend(engine, gate, checkpoints, catalog, connection.store.now_ms),
        AdapterSlots(engine.capacity),
        replica,
        decode=_decode,
        snapshots=_snapshot_policy(config),
        drain_s=DRAIN_S,
    )
    work, bell = work_topic(base), bell_topic(replica.id)
    events = EventReader(connection.lanes, [work, bell], store=connection.store)
    worker = Worker(connection, replica, gate, executor, events)
    await worker.start(
        blueprint,
        executor.offer,
        executor.spare,
        [
            listen(events.subscribe(work), executor.offer, executor.resync),
            listen(events.subscribe(bell), lambda lanes: _ring(executor, lanes), executor.resync),
        ],
    )
    return worker


def _snapshot_policy(config: ServerConfig) -> SnapshotPolicy:
    return SnapshotPolicy(max_bytes=config.checkpoints.snapshot_bytes, max_engine_s=config.checkpoints.snapshot_engine_s)


def _ring(executor: Executor, lanes: list[str]) -> None:
    for lane in lanes:
        executor.ring(lane)


def _decode(kind: Kind, body: bytes) -> TrainingCommand:
    command = decode_command(kind, body)
    if isinstance(command, Sample):
        raise TypeError("a sample lies in a model lane")
    return command
