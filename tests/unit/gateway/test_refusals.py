"""Models that cannot be created as asked: a future that failed, no model, and a number that is spent."""

import pytest

from tests.fakes.face import BASE, Face, open_face
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord
from tinsmith.protocol.training import LoraConfig
from tinsmith.state import refusals
from tinsmith.state.catalog import checkpoint_write
from tinsmith.state.refusals import Refusals

UNSOUND = [
    ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config.type: 'dimuon'"),
    ({"lora_config": {"rank": 0}}, "lora_config.rank"),
    ({"lora_config": {"rank": 513}}, "lora_config.rank"),
    ({"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}}, "train_unembed"),
    ({"user_metadata": {"k": "x" * 20_000}}, "user_metadata"),
]
DIMUON = UNSOUND[0][0]


def body(session_id: str, **changes: object) -> dict[str, object]:
    return {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}} | changes


@pytest.mark.parametrize(("changes", "names"), UNSOUND)
async def test_a_refused_creation_is_a_failed_future_and_no_model(face: Face, changes, names):
    session_id = await face.session()
    promise = await face.ok("/create_model", body(session_id, **changes))
    assert promise["model_id"] == f"{session_id}:train:0"
    answer = await face.retrieve(promise["request_id"])
    assert answer.status_code == 200
    assert (answer.json()["category"], names in answer.json()["error"]) == ("user", True)
    assert await face.services.catalog.models("local") == []
    assert await face.lanes.lane(f"{session_id}:train:0") is None
    assert (await face.post("/get_info", {"model_id": promise["model_id"]})).status_code == 404


async def test_the_same_request_again_is_the_same_promise(face: Face):
    session_id = await face.session()
    first = await face.ok("/create_model", body(session_id, **DIMUON))
    kept = face.num_kept()
    assert await face.ok("/create_model", body(session_id, **DIMUON)) == first
    assert face.num_kept() == kept


async def test_a_number_that_was_refused_is_spent(face: Face):
    session_id = await face.session()
    await face.ok("/create_model", body(session_id, **DIMUON))
    for changes in ({}, {"lora_config": {"rank": 0}}):
        answer = await face.post("/create_model", body(session_id, **changes))
        assert (answer.status_code, answer.json()["reason"]) == (400, "request_rejected")
    assert await face.services.catalog.models("local") == []
    await face.ok("/create_model", body(session_id, model_seq_id=1))


async def test_a_number_that_made_a_model_cannot_be_refused(face: Face):
    session_id = await face.session()
    await face.ok("/create_model", body(session_id))
    kept = face.num_kept()
    answer = await face.post("/create_model", body(session_id, **DIMUON))
    assert (answer.status_code, answer.json()["reason"]) == (400, "request_rejected")
    assert face.num_kept() == kept


async def test_a_load_into_a_new_model_is_refused_alike(face: Face):
    session_id = await face.session()
    lora = LoraConfig(rank=8, seed=1)
    record = CheckpointRecord(
        tenant="local",
        session_id=session_id,
        run_id="run",
        kind=CheckpointKind.TRAINING,
        name="a",
        artifact="local/run/weights/a",
        base_model=BASE,
        lora=lora,
        created_ms=0,
        size_bytes=1,
    )
    write = checkpoint_write(record)
    await face.store.put(write.table, write.id, write.value or b"")
    load = {"session_id": session_id, "model_seq_id": 4, "path": record.path, "optimizer": False}
    promise = await face.ok("/load_weights", load | DIMUON)
    answer = (await face.retrieve(promise["request_id"])).json()
    assert (answer["category"], "optimizer_config.type" in answer["error"]) == ("user", True)
    assert await face.services.catalog.models("local") == []
    await face.ok("/load_weights", load | {"model_seq_id": 5})


async def test_a_tenant_leaves_so_many_refusals_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(refusals, "MAX_KEPT", 2)
    async with open_face() as face:
        session_id = await face.session()
        for number in range(2):
            await face.ok("/create_model", body(session_id, model_seq_id=number, **DIMUON))
        kept = face.num_kept()
        answer = await face.post("/create_model", body(session_id, model_seq_id=2, **DIMUON))
        assert (answer.status_code, "optimizer_config.type" in answer.json()["detail"]) == (422, True)
        assert face.num_kept() == kept


async def test_the_refusals_of_a_session_go_with_it(face: Face):
    mine, other = await face.session(), await face.session()
    lost, kept = [(await face.ok("/create_model", body(each, **DIMUON)))["request_id"] for each in (mine, other)]
    await Refusals(face.store).forget("local", {mine})
    assert (await face.retrieve(lost)).status_code == 404
    assert (await face.retrieve(kept)).status_code == 200
