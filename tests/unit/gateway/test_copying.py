"""Copies of checkpoints: once a key, once a number, with the bytes of the source."""

import pytest

from tests.fakes.face import BASE, Face
from tests.unit.gateway.test_checkpoints import RUN, call, listed, theirs
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord

KEY = {"X_Idempotency_Key": "k"}


async def into_project(face: Face, source: CheckpointRecord, project: str = "p", **more: object) -> str:
    answer = await face.ok("/copy_weights", {"source_path": source.path, "destination_project_id": project} | more, **KEY)
    return str(answer["tinker_path"])


@pytest.mark.parametrize("kind", list(CheckpointKind))
async def test_a_copy_is_a_checkpoint_of_a_run_of_its_own(face: Face, kind: CheckpointKind):
    source = await keep(face, kind=kind, user_metadata={"k": "v"}, expires_ms=face.clock[0] + 1, size_bytes=9)
    path = await into_project(face, source, ttl_seconds=3600)
    copy = await face.services.catalog.checkpoint("local", path)
    assert (copy.kind, copy.name, copy.artifact, copy.size_bytes) == (kind, "n", source.artifact, 9)
    assert copy.run_id != source.run_id
    assert copy.expires_ms == face.clock[0] + 3_600_000, "the source's own expiry is not inherited"
    run = await face.services.catalog.model("local", copy.run_id)
    assert run.copied_from == source.path
    session = await face.services.catalog.session("local", copy.session_id)
    assert (session.project_id, session.end_reason) == ("p", "copied")


async def test_the_same_key_again_finds_the_copy_even_without_the_source(face: Face):
    source = await keep(face)
    path = await into_project(face, source)
    assert await into_project(face, source) == path
    await call(face, "DELETE", f"/training_runs/{RUN}/checkpoints/weights/n")
    assert await into_project(face, source) == path
    assert len(await listed(face)) == 1
    assert len(await face.services.catalog.sessions("local")) == 1


async def test_another_key_is_another_copy(face: Face):
    source = await keep(face)
    body = {"source_path": source.path, "destination_project_id": "p"}
    paths = {(await face.ok("/copy_weights", body, X_Idempotency_Key=key))["tinker_path"] for key in ("a", "b")}
    assert len(paths) == 2


async def test_a_key_is_for_one_copy(face: Face):
    source, other = await keep(face), await keep(face, name="other")
    await into_project(face, source)
    for body in ({"source_path": other.path, "destination_project_id": "p"}, {"source_path": source.path, "destination_project_id": "q"}):
        answer = await face.post("/copy_weights", body, **KEY)
        assert (answer.status_code, "X-Idempotency-Key" in answer.json()["detail"]) == (400, True)


async def test_a_copy_into_a_session(face: Face):
    source, session_id = await keep(face), await face.session()
    body = {"source_path": source.path, "session_id": session_id, "model_seq_id": 3}
    first = await face.ok("/copy_weights", body, X_Idempotency_Key="a")
    assert first == {"tinker_path": f"tinker://{session_id}:train:3/weights/n"}
    assert await face.ok("/copy_weights", body, X_Idempotency_Key="b") == first
    taken = await face.post("/copy_weights", body | {"source_path": (await keep(face, name="m")).path})
    assert taken.status_code == 400


async def test_a_number_is_for_a_model_or_a_copy(face: Face):
    source, session_id = await keep(face), await face.session()
    await face.model(session_id)
    body = {"source_path": source.path, "session_id": session_id, "model_seq_id": 0}
    assert (await face.post("/copy_weights", body)).status_code == 400
    await face.ok("/copy_weights", body | {"model_seq_id": 1})
    answer = await face.post("/create_model", {"session_id": session_id, "model_seq_id": 1, "base_model": BASE})
    assert (answer.status_code, "copy" in answer.json()["detail"]) == (400, True)
    step = {"model_id": f"{session_id}:train:1", "seq_id": 1, "adam_params": {}}
    assert (await face.post("/optim_step", step)).status_code == 404, "a copy is not trained"


async def test_a_copy_of_anothers_checkpoint_stays_when_that_is_private_again(face: Face):
    held = await theirs(face)
    await face.services.publications.publish(held)
    path = await into_project(face, held)
    await face.services.publications.unpublish(held)
    assert (await face.services.catalog.checkpoint("local", path)).artifact == held.artifact
    assert (await face.post("/weights_info", {"tinker_path": path})).status_code == 200
    assert not (await listed(face))[0]["public"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"destination_project_id": "p", "session_id": "s", "model_seq_id": 0},
        {"session_id": "s"},
        {"model_seq_id": 0},
        {"destination_project_id": "p", "ttl_seconds": 1},
        {"destination_project_id": "p" * 2000},
    ],
)
async def test_a_refused_copy_writes_nothing(face: Face, body: dict[str, object]):
    source = await keep(face)
    before = face.num_kept()
    assert (await face.post("/copy_weights", {"source_path": source.path} | body, **KEY)).status_code in (400, 422)
    assert face.num_kept() == before


async def test_an_unknown_source_opens_no_session(face: Face):
    body = {"source_path": "tinker://nobody/weights/n", "destination_project_id": "p"}
    assert (await face.post("/copy_weights", body, **KEY)).status_code == 404
    assert await face.services.catalog.sessions("local") == []


async def test_a_copy_into_a_project_needs_a_key(face: Face):
    source = await keep(face)
    answer = await face.post("/copy_weights", {"source_path": source.path, "destination_project_id": "p"})
    assert (answer.status_code, "X-Idempotency-Key" in answer.json()["detail"]) == (400, True)
