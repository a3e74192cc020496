"""What is counted is exactly what was done: on each store, after resends, after a trainer's death and the replay that follows."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.fakes.training import BASE, LORA, SESSION, TENANT, TrainerReplica, World, optim, train
from tests.redis_server import RedisServer
from tinsmith.deployments.sampling_backend import SamplingBackend
from tinsmith.engines.fake_sampler import FakeSamplingEngine
from tinsmith.protocol.futures import State
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.training import CreateModel, Kind, SaveWeights, TrainingCommand
from tinsmith.protocol.wire import decode_command, digest_of, encode_command, encode_sample_output
from tinsmith.queue.gate import Gate
from tinsmith.queue.pool import PoolExecutor
from tinsmith.state.audit import AuditLog
from tinsmith.state.catalog import Catalog
from tinsmith.state.days import day_of, hour_of
from tinsmith.state.lanes import LaneLimits, PoolSubmission, Replica, Role
from tinsmith.state.redis_lanes import RedisLanes
from tinsmith.state.redis_store import RedisStore
from tinsmith.state.usage import UsageBook, UsageKind

COMMANDS: list[TrainingCommand] = [
    CreateModel(lora=LORA),
    train(1, 2, 3),
    train(4, 5, backward=False),
    optim(),
    SaveWeights(name="kept"),
    train(6, 7, 8, 9),
]
USED = {UsageKind.TRAINING: 3 + 2 + 4, UsageKind.CHECKPOINT: 1}


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    built = World(tmp_path)
    async with AsyncExitStack() as stack:
        if request.param == "redis":
            store = RedisStore(request.getfixturevalue("redis_url"))
            stack.push_async_callback(store.close)
            await store.flush_all()
            built.store, built.lanes = store, RedisLanes(store, LaneLimits())  # type: ignore[assignment]
            built.catalog = Catalog(store)
        stack.push_async_callback(built.close)
        yield built


async def used(world: World) -> dict[UsageKind, int]:
    now_hour = hour_of(await world.store.now_ms())
    sums: Counter[UsageKind] = Counter()
    for row in await UsageBook(world.store, TENANT).used(now_hour - 1, now_hour + 1):
        assert (row.session_id, row.base_model) == (SESSION, BASE)
        sums[row.kind] += row.amount
    return dict(sums)


async def completed(world: World, rids: list[str]) -> None:
    for record in await world.all_settled(rids):
        assert record.failure is None, record.failure


async def start(world: World, name: str) -> TrainerReplica:
    return await world.start(world.build(name))


async def test_training_is_counted_once_however_often_it_is_sent(world: World) -> None:
    rids = await world.submit_all(COMMANDS)
    assert await used(world) == {}
    assert await world.submit_all(COMMANDS) == rids
    await start(world, "r1")
    await completed(world, rids)
    assert await world.submit_all(COMMANDS) == rids
    assert await used(world) == USED
    entries = await AuditLog(world.store, TENANT).day(day_of(await world.store.now_ms()))
    assert [entry.subject for entry in entries] == [f"tinker://{SESSION}:train:0/weights/kept"]


async def test_a_replay_after_a_death_counts_nothing(world: World) -> None:
    first = await start(world, "r1")
    await completed(world, await world.submit_all(COMMANDS))
    first.kill()
    await world.bury(first)
    second = await start(world, "r2")
    await completed(world, [await world.submit(len(COMMANDS), train(1, 2))])
    assert second.engine.history(f"{SESSION}:train:0")
    assert await used(world) == USED | {UsageKind.TRAINING: USED[UsageKind.TRAINING] + 2}


async def test_a_command_that_fails_counts_nothing(world: World) -> None:
    await start(world, "r1")
    rids = await world.submit_all([*COMMANDS, SaveWeights(name="kept")])
    records = await world.all_settled(rids)
    assert records[-1].state is State.FAILED
    assert await used(world) == USED


def sample(*prompt: int, num_samples: int, max_tokens: int) -> Sample:
    tokens = ModelInput((TextChunk(b"".join(token.to_bytes(4, "little") for token in prompt)),))
    return Sample(prompt=tokens, params=SamplingParams(seed=1, max_tokens=max_tokens, stop=()), num_samples=num_samples, adapter=None)


async def queue_sample(world: World, key: str, command: Sample) -> str:
    body = encode_command(command)
    submission = PoolSubmission(
        tenant=TENANT, session=SESSION, base=BASE, key=key, rid=f"s-{key}", digest=digest_of(Kind.SAMPLE, body), body=body, tokens=9
    )
    return (await world.lanes.pool_submit(submission)).rid


async def test_a_sample_is_counted_once_however_often_it_is_sent(world: World) -> None:
    engine = FakeSamplingEngine()
    gate = Gate(bound_s=30, exclusive=False, ping=engine.ping)
    backend = SamplingBackend(engine, gate, no_artifact, encode_sample_output, base=BASE)
    executor = PoolExecutor(world.lanes, BASE, "s1", backend, decoded, timeout_s=30)
    await world.lanes.renew(Replica(id="s1", base=BASE, node="n", pid=1, started="0", role=Role.SAMPLER))
    running = asyncio.create_task(executor.run())
    try:
        for key, command in (("a", sample(1, 2, 3, num_samples=4, max_tokens=5)), ("b", sample(7, 8, num_samples=1, max_tokens=2))):
            rid = await queue_sample(world, key, command)
            assert await queue_sample(world, key, command) == rid
            executor.wake()
            await completed(world, [rid])
            assert await queue_sample(world, key, command) == rid
    finally:
        executor.stop()
        await running
        gate.close()
    sums = await used(world)
    cached = sums.get(UsageKind.CACHED_PREFILL, 0)
    assert sums[UsageKind.SAMPLING] == 4 * 5 + 2
    assert sums[UsageKind.PREFILL] + cached == 3 + 2


async def no_artifact(_: str) -> dict[str, bytes]:
    raise AssertionError("the samples name no adapter")


def decoded(body: bytes) -> Sample:
    command = decode_command(Sample.kind, body)
    assert isinstance(command, Sample)
    return command
