"""Checkpoints over REST: lists, time to live, publication, deletion; what others may do with them."""

from typing import Any

import httpx
import pytest

from tests.fakes.face import BASE, PREFIX, Face
from tests.unit.gateway.test_weights import keep
from tinsmith.gateway.tinker.listing import knows_external
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, ModelRecord
from tinsmith.protocol.training import LoraConfig
from tinsmith.state.audit import AuditEvent, AuditLog
from tinsmith.state.catalog import ended_model_writes

RUN = "s:train:0"
OURS = f"/training_runs/{RUN}/checkpoints"
THEIRS = "theirs:train:0"
OLD_SDK = {"User-Agent": "AsyncTinker/Python 0.25.0"}


async def run_of(face: Face, tenant: str, run_id: str, **changes: object) -> ModelRecord:
    """A run that has ended, in the catalog."""
    fields: dict[str, object] = {
        "tenant": tenant,
        "session_id": run_id.partition(":")[0],
        "model_id": run_id,
        "base_model": BASE,
        "lora": LoraConfig(rank=8, seed=5),
        "created_ms": 0,
        "ended_ms": 0,
    }
    record = ModelRecord.model_validate(fields | changes)
    face.store.apply(ended_model_writes(record)[:1])
    return record


async def theirs(face: Face, **changes: object) -> CheckpointRecord:
    """Another tenant's checkpoint, of a run of its own."""
    await run_of(face, "other", THEIRS, user_metadata={"secret": "plan"})
    return await keep(face, tenant="other", session_id="theirs", run_id=THEIRS, **changes)


async def get(face: Face, path: str, **headers: str) -> httpx.Response:
    return await face.http.get(PREFIX + path, headers=headers)


async def listed(face: Face, path: str = "/checkpoints", **headers: str) -> list[dict[str, Any]]:
    response = await get(face, path, **headers)
    assert response.status_code == 200, response.text
    checkpoints: list[dict[str, Any]] = response.json()["checkpoints"]
    return checkpoints


async def call(face: Face, method: str, path: str, body: object = None) -> httpx.Response:
    return await face.http.request(method, PREFIX + path, json=body)


async def done(face: Face, method: str, path: str, body: object = None) -> None:
    response = await call(face, method, path, body)
    assert response.status_code == 200, response.text


# Lists


async def test_a_checkpoint_as_the_wire_has_it(face: Face):
    await run_of(face, "local", RUN)
    await keep(face, created_ms=1_500, size_bytes=77, user_metadata={"k": "v"}, expires_ms=2_000_000)
    assert await listed(face, OURS) == [
        {
            "checkpoint_id": "weights/n",
            "checkpoint_type": "training",
            "time": "1970-01-01T00:00:01.500Z",
            "tinker_path": "tinker://s:train:0/weights/n",
            "size_bytes": 77,
            "public": False,
            "user_metadata": {"k": "v"},
            "expires_at": "1970-01-01T00:33:20.000Z",
        }
    ]


async def test_lists_are_newest_first_and_come_in_pages(face: Face):
    for number in range(5):
        await keep(face, name=f"n{number}", created_ms=number)
    body = (await get(face, "/checkpoints?limit=2&offset=1")).json()
    assert [entry["checkpoint_id"] for entry in body["checkpoints"]] == ["weights/n3", "weights/n2"]
    assert body["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}
    assert await listed(face, "/checkpoints?offset=5") == []
    for query in ("limit=-1", "limit=x", "offset=-1", "limit=1001", "offset=99999999999"):
        assert (await get(face, f"/checkpoints?{query}")).status_code == 422


async def test_a_list_of_a_run_has_no_other_runs_checkpoints(face: Face):
    await run_of(face, "local", RUN)
    await keep(face)
    await keep(face, run_id="s:train:1", name="m")
    assert [entry["checkpoint_id"] for entry in await listed(face, OURS)] == ["weights/n"]


async def test_one_name_in_each_kind_is_three_checkpoints(face: Face):
    for kind in CheckpointKind:
        await keep(face, kind=kind, artifact=kind.value)
    await done(face, "DELETE", f"/training_runs/{RUN}/checkpoints/weights/n")
    assert {entry["checkpoint_type"] for entry in await listed(face)} == {"sampler", "external"}


async def test_expired_checkpoints_are_not_there(face: Face):
    await keep(face, expires_ms=face.clock[0])
    assert await listed(face) == []
    for method, path, body in (
        ("DELETE", "weights/n", None),
        ("POST", "weights/n/publish", None),
        ("PUT", "weights/n/ttl", {"ttl_seconds": None}),
        ("GET", "weights/n/archive", None),
    ):
        assert (await call(face, method, f"{OURS}/{path}", body)).status_code == 404


async def test_sdks_that_reject_external_checkpoints_are_not_sent_any(face: Face):
    await run_of(face, "local", RUN)
    await keep(face)
    await keep(face, kind=CheckpointKind.EXTERNAL)
    for path in ("/checkpoints", OURS):
        assert len(await listed(face, path)) == 2
        assert [entry["checkpoint_type"] for entry in await listed(face, path, **OLD_SDK)] == ["training"]
    assert (await get(face, "/checkpoints", **OLD_SDK)).json()["cursor"]["total_count"] == 1


@pytest.mark.parametrize(
    ("agent", "is_shown"),
    [
        ("AsyncTinker/Python 0.7.0", False),
        ("AsyncTinker/Python 0.25.0", False),
        ("AsyncTinker/Python 0.29.0", True),
        ("AsyncTinker/Python 0.38.0", True),
        ("AsyncTinker/Python 1.0.0", True),
        ("curl/8", True),
        ("", True),
    ],
)
def test_which_callers_know_external_checkpoints(agent: str, is_shown: bool):
    assert knows_external({"user-agent": agent}) is is_shown


# Time to live


async def test_a_ttl_is_set_from_now_on_and_removed_by_null(face: Face):
    await keep(face)
    path = f"{OURS}/weights/n/ttl"
    await done(face, "PUT", path, {"ttl_seconds": 3600})
    assert (await listed(face))[0]["expires_at"] == "1970-01-01T01:16:40.000Z"
    await done(face, "PUT", path, {"ttl_seconds": None})
    assert (await listed(face))[0]["expires_at"] is None
    face.advance(10**9)
    assert len(await listed(face)) == 1


@pytest.mark.parametrize("body", [{}, {"ttl_seconds": 3599}, {"ttl_seconds": 315_360_001}, {"ttl_seconds": "x"}, []])
async def test_a_ttl_that_is_none_changes_nothing(face: Face, body: object):
    held = await keep(face, expires_ms=2_000_000)
    answer = await call(face, "PUT", f"{OURS}/weights/n/ttl", body)
    assert answer.status_code == 422
    assert "ttl_seconds" in answer.json()["detail"] or body == []
    assert await face.services.catalog.checkpoint("local", held.path) == held


# Publication


async def test_publishing_twice_and_unpublishing_twice(face: Face):
    await run_of(face, "local", RUN)
    await keep(face)
    for method, is_public in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
        await done(face, method, f"{OURS}/weights/n/publish")
        assert [entry["public"] for entry in await listed(face)] == [is_public]
        assert [entry["public"] for entry in await listed(face, OURS)] == [is_public]


async def readings(face: Face, held: CheckpointRecord) -> list[int]:
    """Statuses of what a reader of a checkpoint does."""
    session_id = await face.session()
    load = {"session_id": session_id, "model_seq_id": 0, "path": held.path, "optimizer": False}
    sample = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": held.path}
    copy = {"session_id": session_id, "model_seq_id": 1, "source_path": held.path}
    answers = [
        await face.post("/weights_info", {"tinker_path": held.path}),
        await face.post("/load_weights", load),
        await face.post("/create_sampling_session", sample),
        await face.post("/copy_weights", copy),
        await get(face, f"/training_runs/{held.run_id}/checkpoints"),
        await get(face, f"/training_runs/{held.run_id}?access_scope=accessible"),
    ]
    return [answer.status_code for answer in answers]


async def test_a_published_checkpoint_is_read_by_others_until_it_is_private_again(face: Face):
    held = await theirs(face)
    assert set(await readings(face, held)) == {404}
    await face.services.publications.publish(held)
    assert set(await readings(face, held)) == {200}
    await face.services.publications.unpublish(held)
    assert set(await readings(face, held)) == {404}


async def test_only_the_owner_changes_a_published_checkpoint(face: Face):
    held = await theirs(face)
    await face.services.publications.publish(held)
    path = f"/training_runs/{THEIRS}/checkpoints/weights/n"
    for method, what, body in (
        ("DELETE", "", None),
        ("DELETE", "/publish", None),
        ("POST", "/publish", None),
        ("PUT", "/ttl", {"ttl_seconds": None}),
    ):
        assert (await call(face, method, path + what, body)).status_code == 404
    assert (await face.post("/weights_info", {"tinker_path": held.path})).status_code == 200


async def test_what_is_saved_anew_under_a_published_name_is_private(face: Face):
    await face.services.publications.publish(await theirs(face))
    anew = await theirs(face, artifact="another")
    assert set(await readings(face, anew)) == {404}


async def test_a_published_checkpoint_that_expires_is_unknown_to_others(face: Face):
    held = await theirs(face, expires_ms=face.clock[0] + 1)
    await face.services.publications.publish(held)
    assert set(await readings(face, held)) == {200}
    face.advance(1)
    assert set(await readings(face, held)) == {404}


async def test_of_a_foreign_run_only_what_is_published_is_listed(face: Face):
    await face.services.publications.publish(await theirs(face))
    await theirs(face, name="private")
    assert [entry["tinker_path"] for entry in await listed(face, f"/training_runs/{THEIRS}/checkpoints")] == [
        f"tinker://{THEIRS}/weights/n"
    ]
    assert await listed(face) == []


# Deletion


async def test_a_deleted_checkpoint_is_unknown(face: Face):
    await run_of(face, "local", RUN)
    held = await keep(face)
    await done(face, "POST", f"{OURS}/weights/n/publish")
    await done(face, "DELETE", f"{OURS}/weights/n")
    assert (await call(face, "DELETE", f"{OURS}/weights/n")).status_code == 404
    assert (await face.post("/weights_info", {"tinker_path": held.path})).status_code == 404
    assert await listed(face, OURS) == []
    assert await face.services.publications.all() == {}


async def test_a_checkpoint_may_be_called_as_a_route_is(face: Face):
    await keep(face, name="publish")
    await done(face, "POST", f"{OURS}/weights/publish/publish")
    assert (await listed(face))[0]["public"]
    await done(face, "DELETE", f"{OURS}/weights/publish")
    assert await listed(face) == []


@pytest.mark.parametrize("path", ["snapshots/n", "weights/none", "x/y"])
async def test_an_id_that_is_none(face: Face, path: str):
    assert (await call(face, "DELETE", f"{OURS}/{path}")).status_code in (404, 422)


async def test_what_is_done_to_a_checkpoint_is_in_the_audit_log(face: Face):
    held = await keep(face)
    await done(face, "POST", f"{OURS}/weights/n/publish")
    face.advance(1)
    await done(face, "PUT", f"{OURS}/weights/n/ttl", {"ttl_seconds": 7200})
    face.advance(1)
    await done(face, "DELETE", f"{OURS}/weights/n/publish")
    face.advance(1)
    await done(face, "DELETE", f"{OURS}/weights/n")
    entries = await AuditLog(face.store, "local").day(0)
    assert [entry.event for entry in entries] == [
        AuditEvent.CHECKPOINT_PUBLISH,
        AuditEvent.CHECKPOINT_TTL,
        AuditEvent.CHECKPOINT_UNPUBLISH,
        AuditEvent.CHECKPOINT_DELETE,
    ]
    assert {entry.subject for entry in entries} == {held.path}
    assert entries[1].details == {"ttl_seconds": "7200"}
