"""What the end of a session leaves of its models, and for how long."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.face import BASE, WORKER, Face, open_face
from tests.fakes.training import LORA, optim, train
from tests.unit.gateway.test_weights import keep
from tests.unit.lifecycle.test_sessions import TIMEOUT_MS, sweep_of
from tinsmith.engines.base import Contents, Job
from tinsmith.engines.fake import FakeTrainingEngine
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.lifecycle.retention import KEPT_MS, CatalogSweep
from tinsmith.lifecycle.sessions import LEADER, end_session
from tinsmith.protocol.errors import NotFound
from tinsmith.protocol.sessions import InflightTarget, SamplerRecord
from tinsmith.protocol.training import LrSchedule, SgdParams
from tinsmith.state.catalog import Catalog, model_write, sampler_write
from tinsmith.state.inflight import InflightTargets, target_writes
from tinsmith.state.sampler_clients import SamplerClients

SGD, COSINE = SgdParams(learning_rate=0.5), LrSchedule(kind="cosine", total_steps=100)


async def with_snapshot(face: Face, session_id: str, *, artifact: str = "snapshot-0", **changes: object) -> str:
    """A model whose creation is in a snapshot."""
    model_id = await face.model(session_id, **changes)
    await face.run(model_id, 0)
    await commit(face, model_id, 0, artifact)
    return model_id


async def commit(face: Face, model_id: str, seq: int, artifact: str) -> None:
    acquired = await face.lanes.acquire(model_id, WORKER.id)
    assert acquired is not None
    await face.lanes.commit_snapshot(model_id, WORKER.id, acquired.token, seq, artifact)


async def end(face: Face, session_id: str) -> None:
    await end_session(face.services.catalog, face.lanes, "local", session_id, reason="success", now_ms=face.clock[0])


@pytest.mark.proves("R67")
async def test_the_newest_snapshot_of_a_session_becomes_a_checkpoint_for_a_day():
    async with open_face() as face:
        session_id = await face.session()
        model_id = await with_snapshot(face, session_id)
        write = model_write(
            (await face.services.catalog.model("local", model_id)).model_copy(update={"optimizer": SGD, "schedule": COSINE})
        )
        await face.store.put(write.table, write.id, write.value)
        await end(face, session_id)
        (record,) = await face.services.catalog.checkpoints("local")
        assert record.path == f"tinker://{model_id}/weights/session-end"
        assert (record.artifact, record.lora.rank, record.base_model) == ("snapshot-0", 8, BASE)
        assert (record.optimizer, record.schedule) == (SGD, COSINE)
        assert record.expires_ms == face.clock[0] + 24 * 3600 * 1000
        face.advance(1000)
        await end(face, session_id)
        await sweep_of(face).run()
        assert await face.services.catalog.checkpoints("local") == [record]


@pytest.mark.proves("R67")
async def test_an_expired_session_leaves_a_checkpoint_too():
    async with open_face() as face:
        sweep, session_id = sweep_of(face), await face.session()
        model_id = await with_snapshot(face, session_id)
        await sweep.run()
        face.advance(TIMEOUT_MS + 1)
        await sweep.run()
        assert [record.run_id for record in await face.services.catalog.checkpoints("local")] == [model_id]


@pytest.mark.proves("R67")
async def test_a_model_without_a_snapshot_or_that_was_unloaded_leaves_none():
    async with open_face() as face:
        session_id = await face.session()
        await face.model(session_id)
        unloaded = await with_snapshot(face, session_id, model_seq_id=1)
        await face.ok("/unload_model", {"model_id": unloaded})
        await end(face, session_id)
        assert await face.services.catalog.checkpoints("local") == []


@pytest.mark.proves("R67")
async def test_a_checkpoint_that_the_caller_named_so_stays():
    async with open_face() as face:
        session_id = await face.session()
        model_id = await with_snapshot(face, session_id)
        own = await keep(face, run_id=model_id, name="session-end", artifact="own")
        await end(face, session_id)
        assert await face.services.catalog.checkpoints("local") == [own]


async def test_a_checkpoint_of_that_name_that_has_expired_is_replaced():
    async with open_face() as face:
        session_id = await face.session()
        model_id = await with_snapshot(face, session_id)
        await keep(face, run_id=model_id, name="session-end", artifact="own", expires_ms=face.clock[0])
        await end(face, session_id)
        assert [record.artifact for record in await face.services.catalog.checkpoints("local")] == ["snapshot-0"]


@pytest.mark.proves("R67")
async def test_a_snapshot_that_is_committed_meanwhile_is_the_one_that_stays(monkeypatch: pytest.MonkeyPatch):
    async with open_face() as face:
        session_id = await face.session()
        model_id = await with_snapshot(face, session_id)
        await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
        await face.run(model_id, 1)
        look = face.lanes.lane

        async def look_and_commit(lane: str) -> object:
            info = await look(lane)
            await commit(face, model_id, 1, "snapshot-1")
            return info

        with monkeypatch.context() as patch:
            patch.setattr(face.lanes, "lane", look_and_commit)
            patch.setattr(face.lanes, "close", closing_once(face, patch, look))
            await end(face, session_id)
        (record,) = await face.services.catalog.checkpoints("local")
        assert record.artifact == "snapshot-1"


def closing_once(face: Face, patch: pytest.MonkeyPatch, look: object) -> object:
    """`close`, after which nothing is committed meanwhile any more."""
    close = face.lanes.close

    async def closing(*args: object, **options: object) -> bool:
        patch.setattr(face.lanes, "lane", look)
        return await close(*args, **options)

    return closing


@pytest.mark.proves("R67")
def test_a_snapshot_loads_as_the_checkpoint_of_the_same_moment_does():
    engine = FakeTrainingEngine()
    for name in ("trained", "from snapshot", "from checkpoint"):
        engine.create_adapter(name, LORA)
    engine.run([Job("trained", 1, train(1, 2)), Job("trained", 2, optim()), Job("trained", 3, train(3, 4))])  # one is unspent
    engine.load("from snapshot", engine.capture("trained", Contents.SNAPSHOT), optimizer=True)
    engine.load("from checkpoint", engine.capture("trained", Contents.CHECKPOINT), optimizer=True)
    assert engine.weights("from snapshot") == engine.weights("trained")
    for name in ("from snapshot", "from checkpoint"):
        engine.run([Job(name, 1, train(5)), Job(name, 2, optim())])
    assert engine.weights("from snapshot") == engine.weights("from checkpoint") != engine.weights("trained")


# What a day after its end becomes of it


class Shelf:
    """A session with a model and a sampler, and a sweep of the catalog."""

    def __init__(self, face: Face, checkpoints: Checkpoints, session_id: str, model_id: str) -> None:
        self.face = face
        self.catalog: Catalog = face.services.catalog
        self.checkpoints = checkpoints
        self.sweep = CatalogSweep(face.store, checkpoints, holder="a", lease_ms=20_000)
        self.session_id = session_id
        self.model_id = model_id

    async def names(self) -> tuple[int, int, int, int]:
        """How many sessions, models, samplers and checkpoints the catalog holds."""
        catalog = self.catalog
        held = (await catalog.sessions("local"), await catalog.models("local"), await catalog.samplers("local"))
        return (*map(len, held), len(await catalog.checkpoints("local")))  # type: ignore[return-value]


@pytest.fixture
async def shelf(tmp_path: Path) -> AsyncIterator[Shelf]:
    async with open_face() as face:
        session_id = await face.session()
        model_id = await with_snapshot(face, session_id)
        record = SamplerRecord(
            tenant="local", session_id=session_id, sampler_id=f"{session_id}:sample:0", base_model=BASE, artifact=None, created_ms=0
        )
        await face.services.catalog.add_sampler(record)
        yield Shelf(face, Checkpoints(DirectoryStorage(tmp_path)), session_id, model_id)


@pytest.mark.proves("R51")
async def test_what_the_catalog_says_of_a_session_goes_a_day_after_its_end(shelf: Shelf) -> None:
    shelf.face.advance(10 * KEPT_MS)
    assert await shelf.sweep.run() == 0  # it lives
    await end(shelf.face, shelf.session_id)
    shelf.face.advance(KEPT_MS - 1)
    assert await shelf.sweep.run() == 0
    assert await shelf.names() == (1, 1, 1, 1)
    shelf.face.advance(1)
    assert await shelf.sweep.run() == 1
    assert await shelf.names() == (0, 0, 0, 0)
    with pytest.raises(NotFound):
        await shelf.catalog.model("local", shelf.model_id)


async def test_what_the_clients_of_its_samplers_shared_goes_with_it(shelf: Shelf) -> None:
    own = InflightTarget(tenant="local", model_id=shelf.model_id, seq=1, artifact="local/m/sampler_weights/1-1", created_ms=0)
    sampler_id = f"{shelf.session_id}:sample:1"
    record = SamplerRecord(
        tenant="local",
        session_id=shelf.session_id,
        sampler_id=sampler_id,
        base_model=BASE,
        artifact=own.artifact,
        inflight=own,
        created_ms=0,
    )
    shelf.face.store.apply([sampler_write(record), *target_writes(own, [])])
    targets, clients = InflightTargets(shelf.face.store), SamplerClients(shelf.face.store)
    assert await clients.join("local", sampler_id) == 1
    await end(shelf.face, shelf.session_id)
    shelf.face.advance(KEPT_MS)
    await shelf.sweep.run()
    assert await targets.of_model("local", shelf.model_id) == []
    assert await clients.join("local", sampler_id) == 1


async def test_a_run_that_a_checkpoint_names_stays(shelf: Shelf) -> None:
    own = await keep(shelf.face, run_id=shelf.model_id, expires_ms=shelf.face.clock[0] + 3 * KEPT_MS)
    await end(shelf.face, shelf.session_id)
    shelf.face.advance(2 * KEPT_MS)
    assert await shelf.sweep.run() == 0
    assert await shelf.names() == (1, 1, 0, 1)  # the one that its end had left has expired
    assert (await shelf.catalog.model("local", shelf.model_id)).model_id == shelf.model_id
    shelf.face.advance(KEPT_MS)
    assert own.expires_ms is not None
    assert own.expires_ms <= shelf.face.clock[0]
    assert await shelf.sweep.run() == 1
    assert await shelf.names() == (0, 0, 0, 0)


async def test_a_run_whose_artifacts_lie_on_disk_stays_known(shelf: Shelf) -> None:
    """The sweep of artifacts touches those of known models alone."""
    left = artifact_id("local", shelf.model_id, ArtifactKind.SNAPSHOT, seq=0, token=1)
    shelf.checkpoints.write(left, {"file": b"content"})
    await end(shelf.face, shelf.session_id)
    shelf.face.advance(KEPT_MS)
    assert await shelf.sweep.run() == 0
    assert (await shelf.names())[1] == 1
    shelf.checkpoints.delete(left)
    assert await shelf.sweep.run() == 1


async def test_a_model_whose_end_was_cut_short_stays(shelf: Shelf) -> None:
    await shelf.catalog.end_session("local", shelf.session_id, reason="success", now_ms=shelf.face.clock[0])
    shelf.face.advance(KEPT_MS)
    assert await shelf.sweep.run() == 0
    assert [model.model_id for model in await shelf.catalog.live_models("local")] == [shelf.model_id]


@pytest.mark.proves("R60")
async def test_only_the_leader_forgets(shelf: Shelf) -> None:
    await end(shelf.face, shelf.session_id)
    shelf.face.advance(KEPT_MS)
    assert await shelf.face.store.lease(LEADER, "b", 20_000)
    assert await shelf.sweep.run() == 0
    shelf.face.advance(20_001)
    assert await shelf.sweep.run() == 1
