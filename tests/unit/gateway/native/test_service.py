"""Capabilities, status, capacity, drain and the probes."""

import pytest

from tests.fakes.face import BASE, INFO, Face, open_face
from tests.unit.gateway.native.bodies import body_of, furnished, tiny
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.native import PROTOCOL_VERSION
from tinsmith.protocol.native_answers import Capabilities, Capacity, ServerStatus
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.state.inbox import DrainOrder, decode
from tinsmith.state.lanes import GATEWAYS, PoolSubmission, Replica, Role, inbox_topic

TRAINER = Replica(id="t", base=BASE, node="n1", pid=7, started="0", num_used=2, num_slots=4)
SAMPLER = Replica(id="s", base=BASE, node="n2", pid=8, started="0", role=Role.SAMPLER, num_used=3, num_slots=32)
GATEWAY = Replica(id="g", base=GATEWAYS, node="n1", pid=9, started="0", role=Role.GATEWAY, num_used=1)


async def living(face: Face, *replicas: Replica) -> None:
    for replica in replicas:
        await face.lanes.renew(replica)


@pytest.mark.proves("R36")
async def test_the_capabilities_name_version_features_and_limits(tiny_model: BaseModelInfo):
    async with open_face(base=tiny(tiny_model), limits={"tokens_per_s": 5}) as face:
        told = Capabilities.model_validate(await face.native_get("/capabilities"))
    assert (told.protocol_version, told.server_version) == (PROTOCOL_VERSION, face.app.version)
    assert {"cancel", "conversations", "evaluate", "lr_schedules", "retrieve_futures", "train_step"} <= set(told.features)
    assert (told.limits["tokens_per_s"], told.limits["long_poll_s"], told.limits["max_command_bytes"]) == (5, 1, 16 * 1024 * 1024)
    assert set(told.losses) == set(LOSSES)
    assert told.losses["cross_entropy"].inputs == {"target_tokens": "int64", "weights?": "float32"}
    (base,) = told.base_models
    assert (base.name, base.training_engine, base.sampling_engine, base.has_chat) == (BASE, "peft", "hf", True)
    assert (base.engine_fields, "train_step" in base.operations, "infonce" in base.losses) == (("micro_batch_tokens",), True, True)
    assert str(tiny_model.path) not in told.model_dump_json()


async def test_a_base_model_without_a_tokenizer_has_no_chat(face: Face):
    (base,) = (await face.native_get("/capabilities"))["base_models"]
    assert base["has_chat"] is False


async def test_the_status_lists_processes_and_the_caller_s_own_queues(face: Face):
    await living(face, TRAINER, SAMPLER, GATEWAY)
    names = await furnished(face)
    foreign = PoolSubmission("other", "x", BASE, "k", "rid", "digest", b"{}", 1)
    await face.lanes.pool_submit(foreign)
    await face.native_ok("/sample", body_of("/sample", names))
    face.advance(2500)
    told = ServerStatus.model_validate(await face.native_get("/status"))
    assert [(process.process_id, process.role, process.base_model) for process in told.processes] == [
        ("g", "gateway", None),
        ("s", "sampler", BASE),
        ("t", "trainer", BASE),
    ]
    trainer = told.processes[2]
    assert (trainer.node, trainer.pid, trainer.num_used, trainer.num_slots, trainer.is_healthy) == ("n1", 7, 2, 4, True)
    assert {(queue.lane, queue.role, queue.num_pending, queue.age_s) for queue in told.queues} == {
        (names["MODEL"], "trainer", 1, 2.5),
        (f"pool:{BASE}:local", "sampler", 1, 2.5),
    }
    assert (told.store, told.server_version) == ("memory", face.app.version)


async def test_the_capacity_sums_all_tenants_and_names_no_lane(face: Face):
    await living(face, TRAINER, SAMPLER, Replica(id="s2", base=BASE, node="n", pid=1, started="0", role=Role.SAMPLER, is_healthy=False))
    names = await furnished(face)
    for tenant in ("other", "third"):
        await face.lanes.pool_submit(PoolSubmission(tenant, "x", BASE, "k", f"rid-{tenant}", "digest", b"{}", 1))
    face.advance(1500)
    answer = await face.native_get("/capacity")
    told = Capacity.model_validate(answer).base_models[BASE]
    assert (told["trainer"].num_processes, told["trainer"].num_used, told["trainer"].num_slots) == (1, 2, 4)
    assert (told["sampler"].num_processes, told["sampler"].num_healthy, told["sampler"].num_pending) == (2, 1, 2)
    assert (told["trainer"].num_pending, told["trainer"].age_s, told["sampler"].age_s) == (1, 1.5, 1.5)
    assert not any(word in str(answer) for word in ("other", "third", names["MODEL"]))


@pytest.mark.parametrize("replica", [TRAINER, SAMPLER, GATEWAY])
async def test_drain_orders_one_process(face: Face, replica: Replica):
    await living(face, TRAINER, SAMPLER, GATEWAY)
    topic = inbox_topic(replica.id)
    cursors = await face.lanes.tail([topic])
    told = await face.native_ok("/drain", {"process_id": replica.id})
    assert (told["process_id"], told["role"]) == (replica.id, replica.role.value)
    wake = await face.lanes.wait(cursors, 1)
    assert [decode(text) for text in wake.events[topic]] == [DrainOrder()]


async def test_drain_of_no_living_process_is_404(face: Face):
    await living(face, TRAINER)
    answer = await face.native("/drain", {"process_id": "nobody"})
    assert (answer.status_code, answer.json()["error"][:11]) == (404, "process_id:")


# Probes.


async def test_the_cheap_probe_asks_nothing(face: Face, monkeypatch):
    monkeypatch.setattr(face.store, "now_ms", None)
    answer = await face.http.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.proves("R8")
@pytest.mark.parametrize(
    ("replicas", "faults"),
    [
        ([TRAINER, SAMPLER], []),
        ([TRAINER], [f"{BASE}: no healthy sampler"]),
        ([], [f"{BASE}: no healthy trainer", f"{BASE}: no healthy sampler"]),
        ([Replica(id="t", base=BASE, node="n", pid=1, started="0", is_healthy=False), SAMPLER], [f"{BASE}: no healthy trainer"]),
    ],
)
async def test_the_deep_probe_mirrors_the_health_of_the_workers(face: Face, replicas, faults):
    await living(face, *replicas)
    answer = await face.http.get("/healthz/deep")
    assert (answer.status_code, answer.json()) == (503 if faults else 200, {"status": "failing" if faults else "ok", "faults": faults})


async def test_the_deep_probe_names_a_store_that_is_away(face: Face, monkeypatch):
    async def away() -> int:
        raise StateContention("the store is away")

    monkeypatch.setattr(face.store, "now_ms", away)
    answer = await face.http.get("/healthz/deep")
    assert (answer.status_code, answer.json()["faults"]) == (503, ["store: the store is away"])


async def test_a_base_model_of_no_directory_has_no_text():
    async with open_face(base=INFO.model_copy(update={"path": ""})) as face:
        assert await face.services.renderers.find(face.services.base_models[BASE]) is None
