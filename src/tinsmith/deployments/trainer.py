"""The trainer deployment: a replica holds a base model and serves the model lanes that it owns.

What is wired here: an engine behind its gate, the executor over the lanes, a lease, and the events that ring the executor's bells.
Imports no PyTorch unless the configured engine needs it.
"""

import asyncio
import logging

from tinsmith import telemetry
from tinsmith.config import ServerConfig
from tinsmith.deployments.presence import Use, listen, new_replica
from tinsmith.deployments.training_backend import TrainingBackend
from tinsmith.deployments.wiring import Blueprint, connect
from tinsmith.deployments.worker import DRAIN_S, Worker, WorkerReplica, engine_builders
from tinsmith.engines.base import TrainingEngine
from tinsmith.lifecycle.adapters import AdapterSlots
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.protocol.wire import decode_command
from tinsmith.queue.executor import Executor, SnapshotPolicy
from tinsmith.queue.gate import Gate
from tinsmith.state.catalog import Catalog
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import bell_topic, inbox_topic, work_topic

_log = logging.getLogger(__name__)


class Trainer(WorkerReplica):
    """A replica that owns model lanes and trains their adapters."""

    def __init__(self, blueprint: Blueprint, base: str) -> None:
        super().__init__(blueprint, base, role="trainer", begin=_begin)


async def _begin(blueprint: Blueprint, base: str) -> Worker:
    with telemetry.span(telemetry.WORKER_LOAD, role="trainer"):
        engine = await asyncio.to_thread(_build_engine, blueprint, base)
    worker = await _start_worker(blueprint, base, engine)
    _log.info("%s: ready for %d adapters", base, engine.capacity)
    return worker


def _build_engine(blueprint: Blueprint, base: str) -> TrainingEngine:
    trainer = blueprint.config.model(base).trainer
    return engine_builders(trainer.engine).training_engine(blueprint.models[base], trainer, blueprint.config.execution.threads)


async def _start_worker(blueprint: Blueprint, base: str, engine: TrainingEngine) -> Worker:
    config = blueprint.config
    connection, replica = connect(blueprint), new_replica(base)
    gate = Gate(bound_s=config.execution.timeout_s, exclusive=True, ping=engine.ping)
    checkpoints, catalog = Checkpoints.open(config.checkpoints), Catalog(connection.store)
    executor = Executor(
        connection.lanes,
        TrainingBackend(engine, gate, checkpoints, catalog, connection.store.now_ms),
        AdapterSlots(engine.capacity),
        replica,
        decode=decode_command,
        snapshots=_snapshot_policy(config),
        drain_s=DRAIN_S,
        describe=lambda: worker.presence.describe(),
    )
    work, bell = work_topic(base), bell_topic(replica.id)
    events = EventReader(connection.lanes, [work, bell, inbox_topic(replica.id)], store=connection.store)
    worker = Worker(connection, replica, gate, executor, events, lambda: Use(len(executor.lanes), engine.capacity))
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
