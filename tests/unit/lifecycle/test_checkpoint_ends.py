"""What becomes of an artifact when its checkpoint is deleted, copied or expired."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.face import Face, open_face
from tests.unit.gateway.test_checkpoints import call, done
from tests.unit.gateway.test_weights import keep
from tests.unit.lifecycle.test_artifacts import sweep_of
from tinsmith.lifecycle.checkpoints import ArtifactKind, artifact_id
from tinsmith.lifecycle.retention import KEPT_MS, CatalogSweep
from tinsmith.lifecycle.sessions import end_session
from tinsmith.protocol.sessions import CheckpointRecord


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Face]:
    async with open_face(checkpoints={"dir": tmp_path}) as opened:
        yield opened


async def stored(face: Face, **changes: object) -> CheckpointRecord:
    """A checkpoint of a live run, with its files."""
    run_id = await face.model()
    artifact = artifact_id("local", run_id, ArtifactKind.TRAINING, seq=1, token=1)
    face.services.artifacts.write(artifact, {"file": b"content"})
    return await keep(face, session_id=run_id.partition(":")[0], run_id=run_id, artifact=artifact, **changes)


async def left(face: Face) -> set[str]:
    """The artifacts after two passes of the sweep."""
    sweep = sweep_of(face, face.services.artifacts)
    await sweep.run()
    await sweep.run()
    return set(face.services.artifacts.artifacts())


async def test_a_deleted_checkpoint_gives_its_bytes_back(face: Face):
    held = await stored(face)
    assert await left(face) == {held.artifact}
    await done(face, "DELETE", f"/training_runs/{held.run_id}/checkpoints/weights/n")
    assert await left(face) == set()


async def test_a_copy_keeps_the_bytes_that_it_shares(face: Face):
    held = await stored(face)
    body = {"source_path": held.path, "destination_project_id": "p"}
    copy = (await face.ok("/copy_weights", body, X_Idempotency_Key="k"))["tinker_path"]
    await done(face, "DELETE", f"/training_runs/{held.run_id}/checkpoints/weights/n")
    assert await left(face) == {held.artifact}
    assert (await call(face, "DELETE", f"/training_runs/{copy.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}")).is_success
    assert await left(face) == set()


async def test_a_ttl_that_was_removed_keeps_the_bytes(face: Face):
    held = await stored(face, expires_ms=face.clock[0] + 1)
    await done(face, "PUT", f"/training_runs/{held.run_id}/checkpoints/weights/n/ttl", {"ttl_seconds": None})
    face.advance(KEPT_MS)
    assert await left(face) == {held.artifact}


async def test_expired_checkpoints_of_an_ended_run_are_forgotten_beside_one_that_stays(face: Face):
    held = await stored(face)
    expired = await keep(face, session_id=held.session_id, run_id=held.run_id, name="old", expires_ms=face.clock[0] + KEPT_MS)
    await face.services.publications.publish(expired)
    catalog = face.services.catalog
    await end_session(catalog, face.lanes, "local", held.session_id, reason="success", now_ms=face.clock[0])
    face.advance(KEPT_MS)
    await CatalogSweep(face.store, face.services.artifacts, holder="a", lease_ms=20_000).run()
    assert await catalog.checkpoints("local") == [held]
    assert await face.services.publications.all() == {}
