"""The sampler deployment: a replica holds a base model and serves the pools of its tenants.

What is wired here: an engine behind its gate, the pool executor, a lease, and the events that wake the executor. Imports no PyTorch
unless the configured engine needs it.
"""

import asyncio
import logging
from functools import partial

from tinsmith import telemetry
from tinsmith.deployments.presence import Use, listen, new_replica, of_trainers
from tinsmith.deployments.sampling_backend import SamplingBackend
from tinsmith.deployments.wiring import Blueprint, connect
from tinsmith.deployments.worker import Worker, WorkerReplica, engine_builders
from tinsmith.engines.base import Files, SamplingEngine
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.training import Kind
from tinsmith.protocol.wire import decode_command, encode_sample_output
from tinsmith.queue.gate import Gate
from tinsmith.queue.pool import PoolExecutor
from tinsmith.state.events import EventReader
from tinsmith.state.inbox import Message, SampleAbort
from tinsmith.state.lanes import Role, inbox_topic, work_topic

_log = logging.getLogger(__name__)


class Sampler(WorkerReplica):
    """A replica that samples for the pools of its base model."""

    def __init__(self, blueprint: Blueprint, base: str) -> None:
        super().__init__(blueprint, base, role="sampler", begin=_begin)


async def _begin(blueprint: Blueprint, base: str) -> Worker:
    with telemetry.span(telemetry.WORKER_LOAD, role="sampler"):
        engine = await asyncio.to_thread(_build_engine, blueprint, base)
    worker = await _start_worker(blueprint, base, engine)
    _log.info("%s: ready for %d sequences at once", base, engine.max_rows)
    return worker


def _build_engine(blueprint: Blueprint, base: str) -> SamplingEngine:
    sampler = blueprint.config.model(base).sampler
    return engine_builders(sampler.engine).sampling_engine(blueprint.models[base], sampler, blueprint.config.execution.threads)


async def _start_worker(blueprint: Blueprint, base: str, engine: SamplingEngine) -> Worker:
    config = blueprint.config
    connection, replica = connect(blueprint), new_replica(base, Role.SAMPLER)
    gate = Gate(bound_s=config.execution.timeout_s, exclusive=False, ping=engine.ping)
    checkpoints = Checkpoints.open(config.checkpoints)

    async def read_artifact(artifact: str) -> Files:
        return await asyncio.to_thread(checkpoints.read, artifact)

    backend = SamplingBackend(engine, gate, read_artifact, encode_sample_output, base=base)
    executor = PoolExecutor(connection.lanes, base, replica.id, backend, _decode, timeout_s=config.execution.timeout_s)
    work = work_topic(base)
    events = EventReader(connection.lanes, [work, inbox_topic(replica.id)], store=connection.store)
    worker = Worker(connection, replica, gate, executor, events, lambda: Use(executor.num_held, engine.max_rows))
    listening = [listen(events.subscribe(work), lambda _: executor.wake(), executor.wake)]
    await worker.start(blueprint, of_trainers, of_trainers, listening, partial(_obey, executor))
    return worker


def _obey(executor: PoolExecutor, message: Message) -> None:
    if isinstance(message, SampleAbort):
        executor.abort(message.rid)


def _decode(body: bytes) -> Sample:
    command = decode_command(Kind.SAMPLE, body)
    if not isinstance(command, Sample):
        raise TypeError("a pool holds something other than a sample")
    return command
