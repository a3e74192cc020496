"""A small world for the training side: memory store, lanes, a catalog, and trainer replicas that can be killed, paused and cut off.

A replica is the real executor over the real backend, gate, checkpoints and slots, with the fake engine. Time of the lanes is a number
that tests move.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.deployments.training_backend import TrainingBackend
from tinsmith.engines.fake import Before, FakeTrainingEngine
from tinsmith.lifecycle.adapters import AdapterSlots
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.protocol.futures import FutureRecord, Write
from tinsmith.protocol.ids import WorkKind, request_id
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.sessions import ModelRecord
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import AdamParams, Compute, CreateModel, LoraConfig, OptimStep, TrainingCommand
from tinsmith.protocol.wire import decode_command, digest, encode_command
from tinsmith.queue.executor import Executor, SnapshotPolicy
from tinsmith.queue.gate import Gate
from tinsmith.queue.residents import Resident
from tinsmith.state.catalog import Catalog, model_write
from tinsmith.state.lanes import LaneLimits, Lanes, Replica, Submission, bell_topic, work_topic
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore

TENANT, SESSION, BASE = "local", "5e55", "tiny"
LORA = LoraConfig(rank=8, seed=1)
NEVER = SnapshotPolicy(max_bytes=1 << 40, max_engine_s=1e9)
ALWAYS = SnapshotPolicy(max_bytes=0, max_engine_s=1e9)


def model_input(*tokens: int) -> ModelInput:
    return ModelInput((TextChunk(b"".join(token.to_bytes(4, "little") for token in tokens)),))


def int64(*values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DType.INT64, (len(values),) if shape is None else shape, b"".join(v.to_bytes(8, "little", signed=True) for v in values))


def train(*tokens: int, backward: bool = True) -> Compute:
    """cross_entropy on one sequence; each target is its input token plus one."""
    datum = Datum(model_input(*tokens), {"target_tokens": int64(*(token + 1 for token in tokens))})
    return Compute((datum,), "cross_entropy", {}, backward=backward)


def optim(learning_rate: float = 0.1) -> OptimStep:
    return OptimStep(optimizer=AdamParams(learning_rate=learning_rate))


def lane_of(index: int = 0) -> str:
    return f"{SESSION}:train:{index}"


@dataclass(eq=False)
class TrainerReplica:
    """One replica's parts. Start it with `World.start`."""

    replica: Replica
    lanes: Lanes
    engine: FakeTrainingEngine
    gate: Gate
    slots: AdapterSlots
    backend: TrainingBackend
    executor: Executor
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.replica.id

    def kill(self) -> None:
        """As kill -9: nothing is finished, released or settled. Its lease still has to run out, or to be buried."""
        for task in self.tasks:
            task.cancel()

    async def stop(self) -> None:
        """A drain."""
        self.executor.stop()
        await self.tasks[0]
        self.kill()


class World:
    """What all replicas and gateways share."""

    def __init__(self, root: Path, *, limits: LaneLimits | None = None) -> None:
        self.root = root
        self.now_ms = 1_000_000
        self.store = MemoryStore(lambda: self.now_ms)
        self.lanes = MemoryLanes(self.store, LaneLimits() if limits is None else limits)
        self.catalog = Catalog(self.store)
        self.checkpoints = Checkpoints(DirectoryStorage(root))
        self.replicas: list[TrainerReplica] = []

    async def submit(self, seq: int, command: TrainingCommand, *, lane: str | None = None) -> str:
        """Answers the request id."""
        lane = lane_of() if lane is None else lane
        info = await self.store.open()
        rid = request_id(WorkKind.TRAINING, epoch=info.epoch, secret=info.secret, tenant=TENANT, lane=lane, seq=seq)
        body = encode_command(command)
        tokens = command.num_tokens if isinstance(command, Compute) else 0
        writes: tuple[Write, ...] = ()
        if seq == 0:
            lora = command.lora if isinstance(command, CreateModel) else LORA
            writes = (
                model_write(
                    ModelRecord(tenant=TENANT, session_id=SESSION, model_id=lane, base_model=BASE, lora=lora, created_ms=self.now_ms)
                ),
            )
        submission = Submission(TENANT, SESSION, lane, BASE, seq, command.kind, rid, digest(command), body, tokens, writes)
        return (await self.lanes.submit(submission)).rid

    async def submit_all(self, commands: Sequence[TrainingCommand], *, first: int = 0, lane: str | None = None) -> list[str]:
        return [await self.submit(first + index, command, lane=lane) for index, command in enumerate(commands)]

    async def settled(self, rid: str) -> FutureRecord:
        """The record, once it is terminal."""
        cursors = await self.lanes.tail(["settled"])
        async with asyncio.timeout(10):
            while True:
                record = await self.lanes.look(TENANT, rid)
                assert record is not None
                if record.state.is_terminal:
                    return record
                cursors = dict((await self.lanes.wait(cursors, 5)).cursors)

    async def all_settled(self, rids: Sequence[str]) -> list[FutureRecord]:
        return [await self.settled(rid) for rid in rids]

    async def bury(self, replica: TrainerReplica) -> None:
        """What the peers of a dead process do."""
        await self.lanes.bury(replica.id)

    def build(
        self,
        name: str,
        *,
        capacity: int = 4,
        bound_s: float = 30.0,
        snapshots: SnapshotPolicy = NEVER,
        before: Before | None = None,
        lanes: Lanes | None = None,
    ) -> TrainerReplica:
        lanes = self.lanes if lanes is None else lanes
        engine = FakeTrainingEngine(capacity=capacity, before=before)
        gate = Gate(bound_s=bound_s, exclusive=True, ping=engine.ping)
        slots = AdapterSlots(capacity)
        backend = TrainingBackend(engine, gate, self.checkpoints, self.catalog, self.store.now_ms)
        replica = Replica(id=name, base=BASE, node="here", pid=1, started="")
        executor = Executor(lanes, backend, slots, replica, decode=decode_command, snapshots=snapshots, drain_s=1.0)
        self.replicas.append(TrainerReplica(replica, lanes, engine, gate, slots, backend, executor))
        return self.replicas[-1]

    async def start(self, replica: TrainerReplica) -> TrainerReplica:
        await self.lanes.renew(replica.replica)
        cursors = await self.lanes.tail(_topics(replica))
        replica.tasks += [asyncio.create_task(replica.executor.run()), asyncio.create_task(self._hear(replica, cursors))]
        return replica

    async def _hear(self, replica: TrainerReplica, cursors: dict[str, int]) -> None:
        bell, work = _topics(replica)
        while True:
            wake = await self.lanes.wait(cursors, 60)
            cursors = dict(wake.cursors)
            for lane in wake.events.get(bell, ()):
                replica.executor.ring(lane)
            replica.executor.offer(wake.events.get(work, ()))

    async def close(self) -> None:
        for replica in self.replicas:
            replica.kill()
            await asyncio.gather(*replica.tasks, return_exceptions=True)
            replica.gate.close()


def _topics(replica: TrainerReplica) -> tuple[str, str]:
    return bell_topic(replica.id), work_topic(BASE)


def resident(replica: TrainerReplica, lane: str | None = None) -> Resident:
    """What the replica's executor knows of a lane."""
    found = replica.executor._ring.find(lane_of() if lane is None else lane)
    assert found is not None
    return found


def state_of(replica: TrainerReplica, lane: str | None = None) -> tuple[tuple[float, ...], str]:
    """Weights and history of a model, for comparisons bit for bit."""
    lane = lane_of() if lane is None else lane
    return replica.engine.weights(lane), replica.engine.history(lane)


async def undisturbed(root: Path, commands: Sequence[TrainingCommand]) -> tuple[tuple[float, ...], str]:
    """Weights and history of a run of the commands that nothing disturbs."""
    world = World(root / "undisturbed")
    replica = await world.start(world.build("solo"))
    for record in await world.all_settled(await world.submit_all(commands)):
        assert record.failure is None, record.failure
    state = state_of(replica)
    await world.close()
    return state


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread or another task does; give up after 5 s."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - threads set no events of this loop
            await asyncio.sleep(0.002)
