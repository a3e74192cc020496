"""The bound of what a tenant's checkpoints may take."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.face import Face, open_face
from tests.unit.gateway.test_checkpoints import OURS, call
from tests.unit.gateway.test_weights import keep


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Face]:
    async with open_face(limits={"max_storage_bytes": 100}, checkpoints={"dir": tmp_path}) as opened:
        yield opened


SAVES = ("/save_weights", "/save_weights_for_sampler", "/save_weights_external")


@pytest.mark.parametrize("route", SAVES)
async def test_a_full_tenant_saves_nothing_more(face: Face, route: str):
    model_id = await face.model()
    await keep(face, name="a", artifact="a", size_bytes=60)
    await keep(face, name="b", artifact="b", size_bytes=40)
    before = face.num_kept()
    answer = await face.post(route, {"model_id": model_id, "seq_id": 1, "path": "n"})
    assert answer.status_code == 429
    assert answer.json()["reason"] == "resource_quota_exceeded"
    assert "100 bytes are stored, the bound is 100" in answer.json()["detail"]
    assert face.num_kept() == before
    await call(face, "DELETE", f"{OURS}/weights/a")
    await face.ok(route, {"model_id": model_id, "seq_id": 1, "path": "n"})


async def test_what_shares_its_bytes_is_counted_once_and_what_has_expired_not(face: Face):
    model_id = await face.model()
    await keep(face, name="a", artifact="a", size_bytes=60)
    await keep(face, name="b", artifact="a", size_bytes=60)
    await keep(face, name="c", artifact="c", size_bytes=60, expires_ms=face.clock[0])
    await keep(face, tenant="other", name="d", artifact="d", size_bytes=600)
    await face.ok("/save_weights", {"model_id": model_id, "seq_id": 1, "path": "n"})


async def test_a_save_that_was_accepted_stays_accepted(face: Face):
    model_id = await face.model()
    body = {"model_id": model_id, "seq_id": 1, "path": "n"}
    promise = await face.ok("/save_weights", body)
    await keep(face, size_bytes=100)
    assert await face.ok("/save_weights", body) == promise


async def test_ephemeral_saves_and_steps_go_on(face: Face):
    model_id = await face.model()
    await keep(face, size_bytes=100)
    await face.ok("/save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0})
    await face.ok("/optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})


async def test_a_full_tenant_copies_nothing(face: Face):
    held = await keep(face, size_bytes=100)
    body = {"source_path": held.path, "session_id": await face.session(), "model_seq_id": 0}
    assert (await face.post("/copy_weights", body)).status_code == 429


async def test_a_size_that_no_record_has_is_the_manifests(face: Face):
    artifact = "local/s/snapshots/0-1"
    face.services.artifacts.write(artifact, {"file": bytes(100)})
    await keep(face, artifact=artifact, size_bytes=None)
    model_id = await face.model()
    assert (await face.post("/save_weights", {"model_id": model_id, "seq_id": 1, "path": "n"})).status_code == 429
