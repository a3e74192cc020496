"""Replicas of every role at work on one memory store, without Ray: what Serve would call is called here."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.fakes.local_actor import LocalHandle
from tinsmith.config import validate
from tinsmith.deployments import janitor as janitor_module
from tinsmith.deployments import presence
from tinsmith.deployments.base_models import weightless
from tinsmith.deployments.gateway import DirectGateway, Gateway, GatewayClosed
from tinsmith.deployments.janitor import Janitor, JanitorEnded
from tinsmith.deployments.memory_state import MemoryState
from tinsmith.deployments.ports import port_of, reserve, url_of
from tinsmith.deployments.sampler import Sampler
from tinsmith.deployments.trainer import Trainer
from tinsmith.deployments.wiring import Blueprint, connect, lane_limits
from tinsmith.deployments.worker import WorkerEnded, engine_builders
from tinsmith.lifecycle.artifacts import ArtifactSweep
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id
from tinsmith.lifecycle.sessions import SessionSweep
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.sessions import ModelRecord
from tinsmith.protocol.training import LoraConfig
from tinsmith.queue.executor import Executor
from tinsmith.queue.pool import PoolExecutor
from tinsmith.state.catalog import model_write
from tinsmith.state.lanes import GATEWAYS
from tinsmith.state.redis_lanes import RedisLanes

MODEL = "org/model"
FAKE = {"engine": "fake"}
OPTIM = {"type": "optim_step", "adam_params": {"learning_rate": 0.1}}


@pytest.fixture
def blueprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blueprint:
    monkeypatch.setattr(presence.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    config = validate(
        {
            "models": [{"name": MODEL, "trainer": FAKE, "sampler": FAKE}],
            "checkpoints": {"dir": str(tmp_path)},
            "execution": {"lease_s": 0.3, "session_timeout_s": 0.3, "long_poll_s": 5},
        }
    )
    limits = lane_limits(config.execution, config.limits)
    return Blueprint(config, {MODEL: weightless(MODEL)}, LocalHandle(MemoryState(limits)))


@pytest.fixture
async def gateway(blueprint: Blueprint) -> AsyncIterator[str]:
    """The URL of a gateway replica."""
    with reserve("127.0.0.1", 0) as reservation:
        replica = DirectGateway(blueprint, port_of(reservation))
        await replica.reconfigure({})
        await replica.check_health()
        yield url_of("127.0.0.1", port_of(reservation))
        await replica.stop()


class Caller:
    """A few calls of the wire, as a client makes them."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def post(self, route: str, body: dict[str, object]) -> dict[str, object]:
        answer = await self._client.post(f"/api/v1/{route}", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        return dict(answer.json())

    async def result(self, submitted: dict[str, object]) -> dict[str, object]:
        return await self.post("retrieve_future", {"request_id": submitted["request_id"]})

    async def session(self) -> str:
        session = await self.post("create_session", {"tags": [], "sdk_version": "0.38.0", "type": "create_session"})
        return str(session["session_id"])


@pytest.fixture
async def caller(gateway: str) -> AsyncIterator[Caller]:
    async with httpx.AsyncClient(base_url=gateway, timeout=10) as client:
        yield Caller(client)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 10
    while not await condition():
        assert loop.time() < deadline
        await asyncio.sleep(0.01)


async def test_a_trainer_and_a_sampler_serve_what_a_gateway_accepts(blueprint: Blueprint, caller: Caller) -> None:
    trainer, sampler = Trainer(blueprint, MODEL), Sampler(blueprint, MODEL)
    await trainer.reconfigure({})
    await sampler.reconfigure({})
    session = await caller.session()
    created = await caller.post(
        "create_model",
        {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4, "seed": 1}, "type": "create_model"},
    )
    model = (await caller.result(created))["model_id"]
    stepped = await caller.post("optim_step", {"model_id": model, "seq_id": 1, **OPTIM})
    assert "metrics" in await caller.result(stepped)
    sampling = await caller.post(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL, "type": "create_sampling_session"},
    )
    sampled = await caller.post(
        "asample",
        {
            "sampling_session_id": sampling["sampling_session_id"],
            "seq_id": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 3, "seed": 1, "temperature": 1.0},
            "num_samples": 1,
            "type": "sample",
        },
    )
    sequences = (await caller.result(sampled))["sequences"]
    assert isinstance(sequences, list)
    assert len(sequences[0]["tokens"]) == 3
    await trainer.check_health()
    await sampler.check_health()
    lanes = connect(blueprint).lanes
    assert len(await lanes.replicas(MODEL)) == 2
    await trainer.stop()
    await sampler.stop()
    assert await lanes.replicas(MODEL) == []
    info = await lanes.lane(str(model))
    assert info is not None
    assert (info.owner, info.durable) == (None, 1)


@pytest.mark.parametrize("kind", [Trainer, Sampler])
async def test_health_mirrors_the_parts_of_a_worker(
    kind: type[Trainer | Sampler], blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = kind(blueprint, MODEL)
    with pytest.raises(WorkerEnded, match="has not started"):
        await replica.check_health()
    await replica.stop()
    await replica.reconfigure({})
    at_work = replica._worker
    assert at_work is not None
    with monkeypatch.context() as patch:
        patch.setattr(at_work, "_gate", SimpleNamespace(is_healthy=False))
        with pytest.raises(WorkerEnded, match="engine does not answer"):
            await replica.check_health()
    with monkeypatch.context() as patch:
        patch.setattr(at_work.presence, "_heartbeat", SimpleNamespace(is_healthy=False))
        with pytest.raises(WorkerEnded, match="renews the lease"):
            await replica.check_health()
    await replica.check_health()
    await at_work._events.stop()
    with pytest.raises(WorkerEnded, match="reads events"):
        await replica.check_health()
    await at_work._events.start()
    at_work._listening[0].cancel()
    await asyncio.wait(at_work._listening[:1])
    with pytest.raises(WorkerEnded, match="ended by a defect"):
        await replica.check_health()
    await replica.stop()


@pytest.mark.proves("R60")
async def test_starting_a_replica_again_changes_nothing(blueprint: Blueprint) -> None:
    """Serve may call `reconfigure` more than once."""
    with reserve("127.0.0.1", 0) as reservation:
        trainer, sampler, gateway = Trainer(blueprint, MODEL), Sampler(blueprint, MODEL), DirectGateway(blueprint, port_of(reservation))
        proxied, janitor = Gateway(blueprint), Janitor(blueprint)
        replicas = (trainer, sampler, gateway, proxied, janitor)
        for replica in replicas:
            await replica.reconfigure({})
        lanes = connect(blueprint).lanes
        before = [replica.id for base in (MODEL, GATEWAYS) for replica in await lanes.replicas(base)]
        parts = (trainer._worker, sampler._worker, gateway._http, janitor._sweeping)
        for replica in replicas:
            await replica.reconfigure({})
            await replica.check_health()
        assert [replica.id for base in (MODEL, GATEWAYS) for replica in await lanes.replicas(base)] == before
        assert (trainer._worker, sampler._worker, gateway._http, janitor._sweeping) == parts
        for replica in replicas:
            await replica.stop()


@pytest.mark.proves("R8")
@pytest.mark.parametrize("kind", [Trainer, Sampler])
async def test_a_replica_whose_engine_is_dead_is_unhealthy_and_tells_so_in_its_lease(
    kind: type[Trainer | Sampler], blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = kind(blueprint, MODEL)
    await replica.reconfigure({})
    at_work = replica._worker
    assert at_work is not None
    assert at_work.presence.describe().is_healthy
    monkeypatch.setattr(at_work._gate, "_answers_ping", False)
    assert not at_work.presence.describe().is_healthy
    with pytest.raises(WorkerEnded, match="engine does not answer"):
        await replica.check_health()
    await replica.stop()


@pytest.mark.parametrize(("kind", "executor"), [(Trainer, Executor), (Sampler, PoolExecutor)])
async def test_a_defect_of_the_executor_is_told_and_the_lease_given_up(
    kind: type[Trainer | Sampler], executor: type, blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(executor, "run", run)
    replica = kind(blueprint, MODEL)
    await replica.reconfigure({})
    lanes = connect(blueprint).lanes
    assert len(await lanes.replicas(MODEL)) == 1
    with pytest.raises(WorkerEnded) as told:
        await replica.check_health()
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    await replica.stop()
    assert await lanes.replicas(MODEL) == []


async def test_the_heartbeat_tells_the_loop_of_lanes_without_an_owner(blueprint: Blueprint) -> None:
    loop = asyncio.get_running_loop()
    heard: list[list[str]] = []
    presence._call_in(loop, heard.append, ["lane"])
    await asyncio.sleep(0)
    closed = asyncio.new_event_loop()
    closed.close()
    presence._call_in(closed, heard.append, ["late"])
    assert heard == [["lane"]]


def test_engines_are_found_by_their_configured_names() -> None:
    modules = {engine: engine_builders(engine).__name__ for engine in ("fake", "peft", "hf")}  # type: ignore[attr-defined]
    assert modules["fake"] == "tinsmith.deployments.fake_engines"
    assert modules["peft"] == modules["hf"] == "tinsmith.deployments.torch_engines"


async def test_a_gateway_that_no_longer_listens_is_unhealthy(blueprint: Blueprint) -> None:
    with reserve("127.0.0.1", 0) as reservation:
        replica = DirectGateway(blueprint, port_of(reservation))
        with pytest.raises(GatewayClosed, match="listens"):
            await replica.check_health()
        await replica.stop()
        await replica.reconfigure({})
        await replica._services.events.stop()
        with pytest.raises(GatewayClosed, match="hears"):
            await replica.check_health()
        await replica.stop()
        with pytest.raises(GatewayClosed, match="listens"):
            await replica.check_health()


async def test_two_gateways_share_the_port(blueprint: Blueprint) -> None:
    with reserve("127.0.0.1", 0) as reservation:
        port = port_of(reservation)
        replicas = [DirectGateway(blueprint, port) for _ in range(2)]
        for replica in replicas:
            await replica.reconfigure({})
        await replicas[0].stop()
        async with httpx.AsyncClient(base_url=url_of("127.0.0.1", port)) as client:
            assert (await client.get("/api/v1/healthz")).status_code == httpx.codes.OK
        await replicas[1].stop()


async def test_a_gateway_that_stops_answers_its_long_polls(blueprint: Blueprint, caplog: pytest.LogCaptureFixture) -> None:
    with reserve("127.0.0.1", 0) as reservation:
        replica = DirectGateway(blueprint, port_of(reservation))
        await replica.reconfigure({})
        async with httpx.AsyncClient(base_url=url_of("127.0.0.1", port_of(reservation)), timeout=10) as client:
            session = await Caller(client).session()
            created = await Caller(client).post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL})
            ask = {"request_id": created["request_id"]}
            poll = asyncio.create_task(client.post("/api/v1/retrieve_future", json=ask))
            polls = replica._services.polls

            async def is_waiting() -> bool:
                return bool(polls._waiters)

            await until(is_waiting)
            await replica.stop()
            answer = await poll
        assert answer.status_code == httpx.codes.REQUEST_TIMEOUT
        assert answer.json()["type"] == "try_again"
        assert answer.headers["connection"] == "close"
        assert not polls._waiters
        assert "Exception" not in caplog.text


async def test_behind_serves_proxy_the_same_app_is_offered(blueprint: Blueprint) -> None:
    app = Gateway(blueprint).__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        assert (await client.get("/api/v1/healthz")).status_code == httpx.codes.OK


async def test_a_gateway_whose_app_cannot_start_raises_why_and_frees_its_port(
    blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> None:
        raise StateContention("away")

    with reserve("127.0.0.1", 0) as reservation:
        port = port_of(reservation)
        replica = DirectGateway(blueprint, port)
        monkeypatch.setattr(replica._services.events, "start", away)
        with pytest.raises(StateContention):
            await replica.reconfigure({})
    with reserve("127.0.0.1", port):
        assert replica._http is not None
        assert replica._http.has_ended


async def test_the_janitor_ends_silent_sessions(blueprint: Blueprint, caller: Caller) -> None:
    janitor = Janitor(blueprint)
    with pytest.raises(JanitorEnded):
        await janitor.check_health()
    await janitor.stop()
    session = await caller.session()
    await janitor.reconfigure({})
    store = connect(blueprint).store

    async def has_ended() -> bool:
        return not await store.list("local/beats")

    await until(has_ended)
    await janitor.check_health()
    await janitor.stop()
    with pytest.raises(JanitorEnded):
        await janitor.check_health()
    record = await store.get("local/sessions", session)
    assert record is not None
    assert b"expired" in record.value


async def test_a_store_that_is_away_does_not_end_the_janitor(blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0
    second = asyncio.Event()

    async def away(_: SessionSweep) -> None:
        nonlocal passes
        passes += 1
        if passes == 2:
            second.set()
        raise StateContention("away")

    monkeypatch.setattr(SessionSweep, "run", away)
    janitor = Janitor(blueprint)
    await janitor.reconfigure({})
    await asyncio.wait_for(second.wait(), 10)
    await janitor.check_health()
    await janitor.stop()


async def test_the_janitor_sweeps_artifacts(blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor_module, "ARTIFACT_PASS_S", 0.02)
    model = ModelRecord(
        tenant="local", session_id="s", model_id="s:train:0", base_model=MODEL, lora=LoraConfig(rank=8, seed=1), created_ms=0
    )
    store, write = connect(blueprint).store, model_write(model)
    assert write.value is not None
    await store.put(write.table, write.id, write.value)
    await store.put("system/tenants", "local", b"")
    checkpoints = Checkpoints.open(blueprint.config.checkpoints)
    young, old = (artifact_id("local", "s:train:0", ArtifactKind.SNAPSHOT, seq=seq, token=1) for seq in (1, 2))
    for artifact in (young, old):
        checkpoints.write(artifact, {"file": b"x"})
    os.utime(blueprint.config.checkpoints.dir / old, (0, 0))
    janitor = Janitor(blueprint)
    await janitor.reconfigure({})

    async def is_swept() -> bool:
        return set(checkpoints.artifacts()) == {young}

    await until(is_swept)
    await janitor.check_health()
    await janitor.stop()


async def test_a_disk_or_store_that_fails_does_not_end_the_janitor(blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[Exception] = [OSError("the disk is away"), StateContention("away")]
    last = asyncio.Event()

    async def failing(_: ArtifactSweep) -> int:
        if faults:
            raise faults.pop()
        last.set()
        return 0

    monkeypatch.setattr(janitor_module, "ARTIFACT_PASS_S", 0.02)
    monkeypatch.setattr(ArtifactSweep, "run", failing)
    janitor = Janitor(blueprint)
    await janitor.reconfigure({})
    await asyncio.wait_for(last.wait(), 10)
    await janitor.check_health()
    await janitor.stop()


def test_redis_is_reached_by_its_url(blueprint: Blueprint) -> None:
    config = validate({"models": [{"name": MODEL}], "store": {"kind": "redis", "url": "redis://127.0.0.1:1/0"}})
    connection = connect(Blueprint(config, blueprint.models, None))
    assert isinstance(connection.lanes, RedisLanes)
    assert connection.lanes.limits.lease_ms == 10_000
