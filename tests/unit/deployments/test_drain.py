"""What an order to drain makes of a worker and of a gateway, without Ray: everything is handed back, then the actor ends itself."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.fakes.local_actor import LocalHandle
from tinsmith.config import validate
from tinsmith.deployments import gateway as gateway_module
from tinsmith.deployments import presence
from tinsmith.deployments.base_models import weightless
from tinsmith.deployments.gateway import DirectGateway, Gateway, GatewayClosed
from tinsmith.deployments.memory_state import MemoryState
from tinsmith.deployments.ports import port_of, reserve, url_of
from tinsmith.deployments.sampler import Sampler
from tinsmith.deployments.trainer import Trainer
from tinsmith.deployments.wiring import Blueprint, connect, lane_limits
from tinsmith.deployments.worker import WorkerEnded
from tinsmith.state.inbox import DrainOrder, encode
from tinsmith.state.lanes import GATEWAYS, Lanes, Role, inbox_topic

MODEL = "org/model"
HEALTH = "/api/v1/healthz"


class Left(Exception):
    """The actor has ended itself."""


@pytest.fixture
def blueprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blueprint:
    def leave() -> None:
        raise Left

    monkeypatch.setattr(presence.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(presence, "exit_actor", leave)
    config = validate(
        {
            "models": [{"name": MODEL, "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}],
            "checkpoints": {"dir": str(tmp_path)},
            "execution": {"lease_s": 0.6, "long_poll_s": 5},
        }
    )
    return Blueprint(config, {MODEL: weightless(MODEL)}, LocalHandle(MemoryState(lane_limits(config.execution, config.limits))))


@pytest.fixture
def lanes(blueprint: Blueprint) -> Lanes:
    return connect(blueprint).lanes


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110 - what it waits for is in another process
            await asyncio.sleep(0.01)


async def order(lanes: Lanes, base: str) -> None:
    """Tell the one process of that base to drain."""
    (process,) = await lanes.replicas(base)
    await lanes.post(inbox_topic(process.id), [encode(DrainOrder())])


async def until_left(replica: Trainer | Sampler | DirectGateway) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await replica.check_health()
            except Left:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("kind", "role"), [(Trainer, Role.TRAINER), (Sampler, Role.SAMPLER)])
async def test_a_drained_worker_hands_back_its_lease_and_ends_its_actor(
    kind: type[Trainer | Sampler], role: Role, blueprint: Blueprint, lanes: Lanes
) -> None:
    replica = kind(blueprint, MODEL)
    await replica.reconfigure({})
    (known,) = await lanes.replicas(MODEL)
    assert (known.role, known.is_draining, known.is_healthy) == (role, False, True)
    assert known.num_slots > 0
    await order(lanes, MODEL)
    await until_left(replica)
    assert await lanes.replicas(MODEL) == []
    await replica.stop()


async def test_a_drained_trainer_snapshots_and_releases_its_lanes(blueprint: Blueprint, lanes: Lanes) -> None:
    trainer, gateway = Trainer(blueprint, MODEL), None
    await trainer.reconfigure({})
    with reserve("127.0.0.1", 0) as reservation:
        gateway = DirectGateway(blueprint, port_of(reservation))
        await gateway.reconfigure({})
        async with httpx.AsyncClient(base_url=url_of("127.0.0.1", port_of(reservation)) + "/api/v1/", timeout=10) as client:
            session = (await client.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})).json()["session_id"]
            made = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4, "seed": 1}}
            rid = (await client.post("create_model", json=made)).json()["request_id"]
            model = (await client.post("retrieve_future", json={"request_id": rid})).json()["model_id"]
            step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
            rid = (await client.post("optim_step", json=step)).json()["request_id"]
            assert "metrics" in (await client.post("retrieve_future", json={"request_id": rid})).json()
        await order(lanes, MODEL)
        await until_left(trainer)
        await gateway.stop()
    info = await lanes.lane(model)
    assert info is not None
    assert (info.owner, info.durable) == (None, 1)
    await trainer.stop()


async def test_a_replica_that_drains_is_not_called_unhealthy_meanwhile(
    blueprint: Blueprint, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(blueprint, MODEL)
    await trainer.reconfigure({})
    worker = trainer._worker
    assert worker is not None
    finish = asyncio.Event()
    monkeypatch.setattr(worker, "_hand_back", finish.wait)
    monkeypatch.setattr(presence, "CHECK_S", 0.01)
    worker.presence.drain(worker._hand_back)
    await trainer.check_health()
    assert worker.presence.describe().is_draining
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_gate", SimpleNamespace(is_healthy=False))
        with pytest.raises(WorkerEnded, match="engine does not answer"):  # a drain that never ends is no excuse
            await trainer.check_health()
    finish.set()
    await until_left(trainer)
    monkeypatch.undo()
    await trainer.stop()


async def test_a_message_that_cannot_be_read_is_dropped(blueprint: Blueprint, lanes: Lanes, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(blueprint, MODEL)
    await trainer.reconfigure({})
    (known,) = await lanes.replicas(MODEL)
    await lanes.post(inbox_topic(known.id), ['{"type": "of the future"}', "no json", '{"type": "abort", "rid": "x"}', encode(DrainOrder())])
    await until_left(trainer)
    await trainer.stop()
    assert capfd.readouterr().err.count("was dropped") == 2


@pytest.fixture
async def siblings(blueprint: Blueprint) -> AsyncIterator[tuple[str, list[DirectGateway]]]:
    """Two gateways of one port, and its URL."""
    with reserve("127.0.0.1", 0) as reservation:
        replicas = [DirectGateway(blueprint, port_of(reservation)) for _ in range(2)]
        for replica in replicas:
            await replica.reconfigure({})
        yield url_of("127.0.0.1", port_of(reservation)), replicas
        for replica in replicas:
            await replica.stop()


@pytest.mark.proves("R53")
async def test_a_gateway_has_a_lease_that_tells_of_its_long_polls(siblings: tuple[str, list[DirectGateway]], lanes: Lanes) -> None:
    known = await lanes.replicas(GATEWAYS)
    assert sorted(replica.id for replica in known) == sorted(gateway._services.process_id for gateway in siblings[1])
    assert {(replica.role, replica.num_slots) for replica in known} == {(Role.GATEWAY, 0)}
    gateway = siblings[1][0]
    with gateway._services.events.register("settled", "x") as waiter, gateway._services.polls.hold(waiter):
        assert gateway._presence.describe().num_used == 1
    await gateway.stop()
    assert [replica.id for replica in await lanes.replicas(GATEWAYS)] == [siblings[1][1]._services.process_id]


async def test_a_drained_gateway_refuses_nobody(siblings: tuple[str, list[DirectGateway]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that open a connection for each request, and some that keep theirs, while one of two gateways leaves."""
    monkeypatch.setattr(gateway_module, "LINGER_S", 0.5)
    url, (leaving, _) = siblings
    stopping = asyncio.Event()
    codes: list[int] = []

    async def call(*, keeps: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=5 if keeps else 0)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=10) as client:
            while not stopping.is_set():
                codes.append((await client.get(HEALTH)).status_code)
                await asyncio.sleep(0)

    async def many_calls() -> None:
        wanted = len(codes) + 100

        async def have_come() -> bool:
            return len(codes) >= wanted

        await until(have_come)

    callers = [asyncio.create_task(call(keeps=index % 3 == 0)) for index in range(12)]
    await many_calls()
    leaving._presence.drain(leaving._hand_back)
    await until_left(leaving)
    await many_calls()
    stopping.set()
    await asyncio.gather(*callers)
    assert set(codes) == {httpx.codes.OK}


async def test_connections_that_wait_to_be_accepted_are_served_by_a_gateway_that_leaves(
    siblings: tuple[str, list[DirectGateway]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "LINGER_S", 5)
    url, (leaving, staying) = siblings
    await staying.stop()
    port = int(url.rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        # The loop does not run between these and the drain, so nobody has accepted them.
        waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        leaving._presence.drain(leaving._hand_back)
        for connection in waiting:
            connection.sendall(f"GET {HEALTH} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        answers = await asyncio.gather(*(asyncio.to_thread(read_all, connection) for connection in waiting))
    assert all(answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer for answer in answers), answers
    await until_left(leaving)


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(10)
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


async def test_behind_serves_proxy_a_drained_gateway_fails_its_checks_and_then_ends_its_long_polls(
    blueprint: Blueprint, lanes: Lanes
) -> None:
    """Serve routes nothing more to a replica that failed three checks in a row, and stops it."""
    gateway = Gateway(blueprint)
    await gateway.reconfigure({})
    await gateway.check_health()
    await order(lanes, GATEWAYS)
    ended: list[bool] = []
    async with asyncio.timeout(10):
        while len(ended) < 3:
            try:
                await gateway.check_health()
            except GatewayClosed:
                ended.append(gateway._services.polls.are_ending)
            await asyncio.sleep(0.01)
    assert ended == [False, False, True]
    await gateway.stop()
    assert await lanes.replicas(GATEWAYS) == []


async def test_a_gateway_without_lease_or_inbox_is_unhealthy(blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(blueprint)
    with pytest.raises(GatewayClosed, match="hears"):
        await gateway.check_health()
    await gateway.reconfigure({})
    with monkeypatch.context() as patch:
        patch.setattr(gateway._presence, "_heartbeat", SimpleNamespace(is_healthy=False))
        with pytest.raises(GatewayClosed, match="renews the lease"):
            await gateway.check_health()
    await gateway.check_health()
    await gateway.stop()
