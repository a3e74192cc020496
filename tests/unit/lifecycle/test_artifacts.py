"""The sweep of artifacts: each kind of leftover goes, and each that somebody may still want stays."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.face import BASE, WORKER, Face, open_face
from tests.unit.gateway.test_weights import keep
from tinsmith.lifecycle.artifacts import MARGIN_S, ArtifactSweep, min_age_s
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.lifecycle.sessions import LEADER, SESSION_END_KEPT_MS, end_session
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.sessions import InflightTarget, SamplerRecord
from tinsmith.state.catalog import Catalog, Pin, sampler_write
from tinsmith.state.inflight import InflightTargets, target_writes

SNAPSHOT, TRAINING, SAMPLER = ArtifactKind.SNAPSHOT, ArtifactKind.TRAINING, ArtifactKind.SAMPLER
NO_AGE_S = -1.0
LEASE_MS = 20_000


@dataclass
class World:
    """One session with one model whose creation is pending, and a sweep in whose eyes every artifact is old."""

    face: Face
    root: Path
    checkpoints: Checkpoints
    sweep: ArtifactSweep
    model_id: str

    @property
    def session_id(self) -> str:
        return self.model_id.partition(":")[0]

    def write(self, kind: ArtifactKind, *, seq: int = 1, token: int = 1) -> str:
        artifact = artifact_id("local", self.model_id, kind, seq=seq, token=token)
        self.checkpoints.write(artifact, {"file": b"content"})
        return artifact

    async def commit(self, seq: int) -> str:
        """Run the model's entries up to `seq`, and raise the floor to it; answers the snapshot."""
        for entry in range(seq + 1):
            await self.face.run(self.model_id, entry)
        acquired = await self.face.lanes.acquire(self.model_id, WORKER.id)
        assert acquired is not None
        snapshot = self.write(SNAPSHOT, seq=seq, token=acquired.token)
        await self.face.lanes.commit_snapshot(self.model_id, WORKER.id, acquired.token, seq, snapshot)
        return snapshot

    async def sample_from(self, artifact: str) -> None:
        """An ephemeral sampler of the session."""
        record = SamplerRecord(
            tenant="local",
            session_id=self.session_id,
            sampler_id=f"{self.session_id}:sample:0",
            base_model=BASE,
            artifact=artifact,
            created_ms=0,
        )
        await self.face.services.catalog.add_sampler(record)

    async def save_inflight(self, seq: int) -> str:
        """An inflight save, as its settle leaves it; answers its artifact."""
        artifact, tenant = self.write(SAMPLER, seq=seq), "local"
        target = InflightTarget(tenant=tenant, model_id=self.model_id, seq=seq, artifact=artifact, created_ms=self.face.clock[0])
        record = SamplerRecord(
            tenant=tenant,
            session_id=self.session_id,
            sampler_id=f"{self.session_id}:sample:{seq}",
            base_model=BASE,
            artifact=artifact,
            inflight=target,
            created_ms=0,
        )
        held = await InflightTargets(self.face.store).of_model(tenant, self.model_id)
        self.face.store.apply([sampler_write(record), *target_writes(target, held)])
        return artifact

    async def load(self, path: str, **address: object) -> None:
        await self.face.ok("/load_weights", {"path": path, "optimizer": True} | address)

    async def end(self) -> None:
        await end_session(self.face.services.catalog, self.face.lanes, "local", self.session_id, reason="success", now_ms=1)

    async def left(self) -> set[str]:
        """What two passes leave."""
        await self.sweep.run()
        await self.sweep.run()
        return set(self.checkpoints.artifacts())

    async def pins(self) -> list[Pin]:
        return await self.face.services.catalog.pins("local")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with open_face() as face:
        checkpoints = Checkpoints(DirectoryStorage(tmp_path))
        yield World(face, tmp_path, checkpoints, sweep_of(face, checkpoints), await face.model())


def sweep_of(face: Face, checkpoints: Checkpoints, *, holder: str = "a", min_age_s: float = NO_AGE_S) -> ArtifactSweep:
    return ArtifactSweep(face.store, face.lanes, checkpoints, holder=holder, lease_ms=LEASE_MS, min_age_s=min_age_s)


async def test_what_a_fenced_owner_left_goes(world: World) -> None:
    saved = world.write(TRAINING, token=2)
    await keep(world.face, artifact=saved)
    for kind in ArtifactKind:
        world.write(kind, token=1)
    assert await world.left() == {saved}


async def test_the_snapshot_of_an_open_lane_stays_and_one_that_was_not_committed_goes(world: World) -> None:
    snapshot = await world.commit(0)
    world.write(SNAPSHOT, seq=5)
    assert await world.left() == {snapshot}


async def test_the_snapshot_of_an_unloaded_model_goes(world: World) -> None:
    await world.commit(0)
    await world.face.ok("/unload_model", {"model_id": world.model_id})
    await world.end()
    assert await world.left() == set()


@pytest.mark.proves("R67")
async def test_the_last_snapshot_of_a_session_stays_for_a_day_after_its_end(world: World) -> None:
    snapshot = await world.commit(0)
    now_ms = world.face.clock[0]
    await end_session(world.face.services.catalog, world.face.lanes, "local", world.session_id, reason="success", now_ms=now_ms)
    world.face.advance(SESSION_END_KEPT_MS - 1)
    assert await world.left() == {snapshot}
    world.face.advance(1)
    assert await world.left() == set()


async def test_a_checkpoint_goes_when_it_expires_unless_somebody_samples_from_it(world: World) -> None:
    lost, sampled = world.write(TRAINING, seq=1), world.write(SAMPLER, seq=2)
    for name, artifact in (("a", lost), ("b", sampled)):
        await keep(world.face, name=name, artifact=artifact, expires_ms=world.face.clock[0] + 5)
    await world.sample_from(sampled)
    assert await world.left() == {lost, sampled}
    world.face.advance(5)
    assert await world.left() == {sampled}


async def test_of_inflight_saves_the_newest_stays_while_its_session_lives(world: World) -> None:
    await world.save_inflight(1)
    second = await world.save_inflight(3)
    world.face.advance(1)
    assert await world.left() == {second}
    await world.face.ok("/unload_model", {"model_id": world.model_id})
    assert await world.left() == {second}
    await world.end()
    assert await world.left() == set()


async def test_an_inflight_save_that_was_replaced_stays_for_as_long_as_a_sample_may_wait(world: World) -> None:
    sweep = sweep_of(world.face, world.checkpoints, min_age_s=100)
    first, second = await world.save_inflight(1), await world.save_inflight(3)
    for artifact in (first, second):
        os.utime(world.root / artifact, (0, 0))
    world.face.advance(100_000)
    for _ in range(2):
        await sweep.run()
    assert set(world.checkpoints.artifacts()) == {first, second}
    world.face.advance(1)
    for _ in range(2):
        await sweep.run()
    assert set(world.checkpoints.artifacts()) == {second}


async def test_a_checkpoint_outlives_its_session_and_not_its_overwrite(world: World) -> None:
    first, second = world.write(TRAINING, seq=1), world.write(TRAINING, seq=2)
    await keep(world.face, artifact=first)
    await keep(world.face, artifact=second)
    await world.end()
    assert await world.left() == {second}


async def test_an_ephemeral_save_lives_as_long_as_its_session(world: World) -> None:
    saved = world.write(SAMPLER)
    await world.sample_from(saved)
    assert await world.left() == {saved}
    await world.end()
    assert await world.left() == set()


async def test_what_a_load_pinned_outlives_its_overwrite_until_the_floor_passes_the_load(world: World) -> None:
    first, second = world.write(TRAINING, seq=7), world.write(TRAINING, seq=8)
    path = (await keep(world.face, artifact=first)).path
    await world.load(path, model_id=world.model_id, seq_id=1)
    await keep(world.face, artifact=second)
    assert await world.pins() == [Pin("local", world.model_id, 1, first)]
    assert await world.left() == {first, second}
    before = await world.commit(0)
    assert await world.left() == {first, second, before}
    after = await world.commit(1)
    assert await world.left() == {second, after}
    assert await world.pins() == []


async def test_a_load_into_a_new_model_pins_until_the_model_ends(world: World) -> None:
    saved = world.write(TRAINING)
    path = (await keep(world.face, artifact=saved)).path
    await world.load(path, session_id=world.session_id, model_seq_id=1)
    await keep(world.face, artifact=world.write(TRAINING, seq=2))
    assert saved in await world.left()
    await world.end()
    assert saved not in await world.left()
    assert await world.pins() == []


async def test_what_is_refused_pins_nothing(world: World) -> None:
    await world.load("tinker://nobody/weights/none", model_id=world.model_id, seq_id=1)
    assert await world.pins() == []


async def test_what_finds_a_name_between_two_passes_stays(world: World) -> None:
    saved = world.write(TRAINING)
    assert await world.sweep.run() == 0
    await keep(world.face, artifact=saved)
    assert await world.left() == {saved}


async def test_what_is_young_stays(world: World) -> None:
    young, old = world.write(TRAINING, seq=1), world.write(TRAINING, seq=2)
    os.utime(world.root / old, (0, 0))
    world.sweep = sweep_of(world.face, world.checkpoints, min_age_s=min_age_s(timeout_s=1800, snapshot_engine_s=60))
    assert await world.left() == {young}


def test_the_age_covers_a_replay_and_a_call() -> None:
    assert min_age_s(timeout_s=7200, snapshot_engine_s=60) == MARGIN_S + 7260


async def test_artifacts_of_models_that_the_catalog_does_not_know_are_anothers(world: World) -> None:
    world.write(TRAINING)
    await world.sweep.run()
    await world.face.store.flush_all()
    assert len(await world.left()) == 1


async def test_only_the_leader_sweeps(world: World) -> None:
    leftover = world.write(TRAINING)
    assert await world.face.store.lease(LEADER, "b", LEASE_MS)
    assert await world.left() == {leftover}
    world.face.advance(LEASE_MS + 1)
    assert await world.left() == set()


async def test_after_an_outage_two_passes_count_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_: object) -> list[str]:
        raise StateContention("the store is away")

    world.write(TRAINING)
    await world.sweep.run()
    with monkeypatch.context() as outage:
        outage.setattr(Catalog, "tenants", away)
        with pytest.raises(StateContention):
            await world.sweep.run()
    assert await world.sweep.run() == 0
    assert await world.sweep.run() == 1


async def test_one_that_cannot_be_deleted_keeps_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, other = world.write(TRAINING, seq=1), world.write(TRAINING, seq=2)
    delete = Checkpoints.delete

    def failing(self: Checkpoints, artifact: str) -> bool:
        if artifact == stuck:
            raise PermissionError("read-only")
        return delete(self, artifact)

    monkeypatch.setattr(Checkpoints, "delete", failing)
    assert other not in await world.left()
    assert stuck in caplog.text
    monkeypatch.undo()
    assert await world.left() == set()
