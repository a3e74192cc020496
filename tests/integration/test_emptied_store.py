"""Workers over a Redis that comes back empty: they drop what they held and serve what comes next."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.redis_server import RedisServer
from tinsmith.config import validate
from tinsmith.deployments import presence
from tinsmith.deployments.base_models import weightless
from tinsmith.deployments.janitor import Janitor
from tinsmith.deployments.sampler import Sampler
from tinsmith.deployments.trainer import Trainer
from tinsmith.deployments.wiring import Blueprint, Connection, connect
from tinsmith.protocol.futures import FutureRecord
from tinsmith.protocol.futures import State as FutureState
from tinsmith.protocol.ids import WorkKind, request_id
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.sessions import ModelRecord
from tinsmith.protocol.training import CreateModel, LoraConfig
from tinsmith.protocol.wire import digest_of, encode_command
from tinsmith.state.catalog import Catalog, model_write
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import PoolSubmission, Submission

MODEL = "org/model"
LEASE_S = 0.5
TENANT, SESSION = "local", "session-1"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def blueprint(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blueprint:
    monkeypatch.setattr(presence.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setitem(EventReader.__init__.__kwdefaults__, "block_s", 0.2)
    config = validate(
        {
            "models": [{"name": MODEL, "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}],
            "checkpoints": {"dir": str(tmp_path)},
            "store": {"kind": "redis", "url": server.url},
            "execution": {"lease_s": LEASE_S, "session_timeout_s": 0.6},
        }
    )
    return Blueprint(config, {MODEL: weightless(MODEL)}, None)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 10
    while not await condition():
        assert loop.time() < deadline
        await asyncio.sleep(0.02)


async def submit_model(connection: Connection, model_id: str) -> str:
    info = await connection.store.open()
    command = CreateModel(lora=LoraConfig(rank=4, seed=1))
    body = encode_command(command)
    rid = request_id(WorkKind.TRAINING, epoch=info.epoch, secret=info.secret, tenant=TENANT, lane=model_id, seq=0)
    record = ModelRecord(
        tenant=TENANT,
        model_id=model_id,
        session_id=SESSION,
        base_model=MODEL,
        lora=command.lora,
        created_ms=await connection.store.now_ms(),
    )
    digest = digest_of(command.kind, body)
    await connection.lanes.submit(
        Submission(TENANT, SESSION, model_id, MODEL, 0, command.kind, rid, digest, body, tokens=1, writes=(model_write(record),))
    )
    return rid


async def submit_sample(connection: Connection, key: str) -> str:
    info = await connection.store.open()
    sample = Sample(prompt=ModelInput((TextChunk(b"\1\0\0\0"),)), params=SamplingParams(seed=0, max_tokens=2), num_samples=1, adapter=None)
    body = encode_command(sample)
    rid = request_id(WorkKind.SAMPLING, epoch=info.epoch, secret=info.secret, tenant=TENANT, lane="pool", seq=key)
    await connection.lanes.pool_submit(PoolSubmission(TENANT, SESSION, MODEL, key, rid, digest_of(sample.kind, body), body, tokens=3))
    return rid


async def settled(connection: Connection, rid: str) -> FutureRecord:
    records: list[FutureRecord] = []

    async def is_terminal() -> bool:
        record = await connection.lanes.look(TENANT, rid)
        if record is not None and record.state.is_terminal:
            records.append(record)
        return bool(records)

    await until(is_terminal)
    return records[0]


async def test_workers_and_janitor_go_on_in_a_store_that_was_emptied(blueprint: Blueprint) -> None:
    trainer, sampler, janitor = Trainer(blueprint, MODEL), Sampler(blueprint, MODEL), Janitor(blueprint)
    for replica in (trainer, sampler, janitor):
        await replica.reconfigure({})
    connection = connect(blueprint)
    assert (await settled(connection, await submit_model(connection, "old"))).state is FutureState.COMPLETED
    executor = trainer._worker._executor  # type: ignore[union-attr]
    assert executor.lanes == ("old",)  # type: ignore[attr-defined]

    await connection.store.flush_all()
    await connection.store.open()

    async def has_dropped() -> bool:
        return executor.lanes == ()  # type: ignore[attr-defined,no-any-return]

    await until(has_dropped)
    await asyncio.sleep(3 * LEASE_S)  # leases must be renewed in the new store: one renewal by chance is not enough
    assert len(await connection.lanes.replicas(MODEL)) == 2
    assert (await settled(connection, await submit_model(connection, "new"))).state is FutureState.COMPLETED
    assert (await settled(connection, await submit_sample(connection, "s/1"))).state is FutureState.COMPLETED

    catalog = Catalog(connection.store)
    await connection.store.put("system/tenants", TENANT, b"")
    await catalog.beat(TENANT, "ghost", 0)

    async def has_swept() -> bool:
        return await catalog.beats(TENANT) == {}

    await until(has_swept)
    for replica in (trainer, sampler, janitor):
        await replica.check_health()
        await replica.stop()
    await connection.store.close()
