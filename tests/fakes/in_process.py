"""A whole server in one thread: the gateway on a loopback port, one trainer and samplers with fake engines, the memory store.

The parts are the real ones; only engines and processes are not. A sampler can be killed: it then does nothing more, and its lease is gone,
as that of a process that a peer on its node has missed.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from tests.collecting import collect_quietly
from tinsmith import config
from tinsmith.deployments.sampling_backend import SamplingBackend
from tinsmith.deployments.training_backend import TrainingBackend
from tinsmith.engines.base import Files
from tinsmith.engines.fake import FakeTrainingEngine
from tinsmith.engines.fake_sampler import FakeSamplingEngine
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.gateway.streams import Streams
from tinsmith.lifecycle.adapters import AdapterSlots
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.wire import decode_command, encode_sample_output
from tinsmith.queue.executor import Executor, SnapshotPolicy
from tinsmith.queue.gate import Gate
from tinsmith.queue.pool import PoolExecutor
from tinsmith.state.events import EventReader
from tinsmith.state.inbox import SampleAbort, decode
from tinsmith.state.lanes import SETTLED, LaneLimits, Replica, Role, bell_topic, inbox_topic, work_topic
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore

BASE = "org/tiny"
INFO = BaseModelInfo(name=BASE, path="/nowhere", max_context=4096, vocab_size=49152, eos_token_ids=())
START_S = 30


@dataclass(frozen=True)
class Cast:
    """Who is there. `before_step`: called in the engine's thread with the sampler's id. `item_s`: as in `Streams`."""

    num_samplers: int = 1
    before_step: Callable[[str], None] = lambda _: None
    item_s: float = 60.0


@dataclass
class FakeSampler:
    engine: FakeSamplingEngine
    executor: PoolExecutor
    tasks: list[asyncio.Task[None]]

    async def kill(self, services: Services, replica: str) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await services.lanes.bury(replica)


@dataclass
class InProcessServer:
    """`url` is where it listens. `samplers` by their ids."""

    url: str
    services: Services
    loop: asyncio.AbstractEventLoop
    samplers: dict[str, FakeSampler] = field(default_factory=dict)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run on the server's loop, from a test's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(START_S)

    def kill(self, sampler: str) -> None:
        self.call(self.samplers[sampler].kill(self.services, sampler))


@contextlib.contextmanager
def serve(root: Path, cast: Cast = Cast(), **tree: object) -> Iterator[InProcessServer]:
    """A running server, gone when the context is left."""
    started: list[InProcessServer] = []
    is_up, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(root, cast, tree, started.append, is_up, stop)), name="server")
    thread.start()
    try:
        assert is_up.wait(START_S), "the server did not start"
        yield started[0]
    finally:
        stop.set()
        thread.join(START_S)
        collect_quietly()
    assert not thread.is_alive()


async def _serve(
    root: Path,
    cast: Cast,
    tree: dict[str, object],
    started: Callable[[InProcessServer], None],
    is_up: threading.Event,
    stop: threading.Event,
) -> None:
    store = MemoryStore()
    await store.open()
    lanes = MemoryLanes(store, LaneLimits())
    services = Services(
        config=config.validate({"models": [{"name": BASE}], "execution": {"long_poll_s": 5}, "checkpoints": {"dir": root}} | tree),
        store=store,
        lanes=lanes,
        events=EventReader(lanes, [SETTLED]),
        base_models={BASE: INFO},
        process_id="gateway",
        streams=Streams(cast.item_s),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn.Config(create_app(services), lifespan="on", log_config=None, timeout_graceful_shutdown=1))
    async with contextlib.AsyncExitStack() as stack:
        await _start_trainer(stack, services)
        samplers = {name: await _start_sampler(stack, services, name, cast) for name in _names(cast.num_samplers)}
        await _start_inbox(stack, services)
        # The listener takes connections from now on, and uvicorn answers them as soon as it is up.
        serving = asyncio.create_task(_quietly(http, listener))
        started(InProcessServer(f"http://127.0.0.1:{listener.getsockname()[1]}", services, asyncio.get_running_loop(), samplers))
        is_up.set()
        await asyncio.to_thread(stop.wait)
        http.should_exit = True
        await serving
        await _close_connections(http)
    await asyncio.get_running_loop().shutdown_default_executor()


async def _close_connections(http: uvicorn.Server) -> None:
    """Those whose request outlasted uvicorn's patience: it cancels their tasks and leaves their sockets to the end of the process."""
    for connection in list(http.server_state.connections):
        if connection.transport is not None:
            connection.transport.close()
    await asyncio.sleep(0)  # a closed transport lets go of its socket in the next turn of the loop


async def _quietly(http: uvicorn.Server, listener: socket.socket) -> None:
    """As uvicorn serves, without its signals: this is no main thread."""
    http.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    await http.serve(sockets=[listener])


async def _start_trainer(stack: contextlib.AsyncExitStack, services: Services) -> None:
    engine = FakeTrainingEngine(vocab_size=INFO.vocab_size, max_context=INFO.max_context)
    gate = Gate(bound_s=30, exclusive=True, ping=engine.ping)
    backend = TrainingBackend(engine, gate, services.artifacts, services.catalog, services.store.now_ms)
    replica = Replica(id="trainer", base=BASE, node="n", pid=1, started="0")
    policy = SnapshotPolicy(max_bytes=1 << 40, max_engine_s=1e9)
    slots = AdapterSlots(engine.capacity)
    executor = Executor(services.lanes, backend, slots, replica, decode=decode_command, snapshots=policy, drain_s=1)
    work, bell = work_topic(BASE), bell_topic(replica.id)

    def heard(topic: str, payloads: list[str]) -> None:
        if topic == work:
            executor.offer(payloads)
            return
        for lane in payloads:
            executor.ring(lane)

    stack.callback(gate.close)  # after the executor: its last snapshots are calls of the engine
    await _start(stack, services, replica, executor, [work, bell], heard)


def _names(num_samplers: int) -> list[str]:
    return ["sampler", *(f"sampler{number}" for number in range(2, num_samplers + 1))][:num_samplers]


async def _start_sampler(stack: contextlib.AsyncExitStack, services: Services, name: str, cast: Cast) -> FakeSampler:
    def before(operation: str, _: str) -> None:
        if operation == "step":
            cast.before_step(name)

    engine = FakeSamplingEngine(vocab_size=INFO.vocab_size, max_context=INFO.max_context, before=before)
    gate = Gate(bound_s=30, exclusive=False, ping=engine.ping)

    async def read_artifact(artifact: str) -> Files:
        return await asyncio.to_thread(services.artifacts.read, artifact)

    backend = SamplingBackend(engine, gate, read_artifact, encode_sample_output, base=BASE)
    replica = Replica(id=name, base=BASE, node="n", pid=1, started="0", role=Role.SAMPLER)
    executor = PoolExecutor(services.lanes, BASE, replica.id, backend, _decode_sample, timeout_s=30)
    inbox = inbox_topic(name)

    def heard(topic: str, payloads: list[str]) -> None:
        if topic != inbox:
            executor.wake()
            return
        for message in map(decode, payloads):
            if isinstance(message, SampleAbort):
                executor.abort(message.rid)

    stack.callback(gate.close)
    tasks = await _start(stack, services, replica, executor, [work_topic(BASE), inbox], heard)
    return FakeSampler(engine, executor, tasks)


async def _start_inbox(stack: contextlib.AsyncExitStack, services: Services) -> None:
    """The gateway's own: tokens of its streams."""

    def heard(_: str, payloads: list[str]) -> None:
        for message in map(decode, payloads):
            services.streams.hear(message)

    hearing = asyncio.create_task(_hear(services, await services.lanes.tail([inbox_topic(services.process_id)]), heard))

    async def end() -> None:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)

    stack.push_async_callback(end)


def _decode_sample(body: bytes) -> Sample:
    sample = decode_command(Sample.kind, body)
    assert isinstance(sample, Sample)
    return sample


async def _start(
    stack: contextlib.AsyncExitStack,
    services: Services,
    replica: Replica,
    executor: Executor | PoolExecutor,
    topics: list[str],
    heard: Callable[[str, list[str]], None],
) -> list[asyncio.Task[None]]:
    """Lease, events and executor of one replica, until the stack is left; answers its tasks."""
    await services.lanes.renew(replica)
    cursors = await services.lanes.tail(topics)
    tasks = [
        asyncio.create_task(executor.run()),
        asyncio.create_task(_renew(services, replica)),
        asyncio.create_task(_hear(services, cursors, heard)),
    ]

    async def end() -> None:
        executor.stop()
        if not tasks[0].cancelled():
            await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)

    stack.push_async_callback(end)
    return tasks


async def _renew(services: Services, replica: Replica) -> None:
    while True:
        await services.lanes.renew(replica)
        await asyncio.sleep(1)


async def _hear(services: Services, cursors: dict[str, int], heard: Callable[[str, list[str]], None]) -> None:
    while True:
        wake = await services.lanes.wait(cursors, 60)
        cursors = dict(wake.cursors)
        for topic, payloads in wake.events.items():
            heard(topic, list(payloads))
