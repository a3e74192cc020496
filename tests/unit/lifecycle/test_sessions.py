"""The end of sessions, by their client or by the janitor, and what its passes keep up."""

from dataclasses import replace

import pytest

from tests.contract.scenes import sample
from tests.fakes.face import Face, open_face
from tinsmith.lifecycle.sessions import SessionSweep, end_session
from tinsmith.protocol.errors import NotFound, ReasonCode, SessionEnded, StateContention
from tinsmith.protocol.sessions import ModelRecord
from tinsmith.state.catalog import Catalog
from tinsmith.state.quotas import MODEL_LEASE_MS, model_quota
from tinsmith.state.store import Record, Store

TIMEOUT_MS = 300_000


def sweep_of(face: Face, store: Store | None = None, holder: str = "a") -> SessionSweep:
    return SessionSweep(
        store or face.store, face.lanes, holder=holder, timeout_ms=TIMEOUT_MS, stuck_ms=10**12, orphan_ms=10**12, lease_ms=20_000
    )


async def expired(sweep: SessionSweep) -> tuple[str, ...]:
    report = await sweep.run()
    assert report is not None
    return report.expired


@pytest.mark.proves("R67")
async def test_a_silent_session_ends_and_its_work_fails():
    async with open_face() as face:
        sweep = sweep_of(face)
        silent, alive = await face.session(), await face.session()
        model_id = await face.model(silent)
        step = await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
        assert await expired(sweep) == ()
        face.advance(TIMEOUT_MS - 1000)
        await face.ok("/session_heartbeat", {"session_id": alive})
        assert await expired(sweep) == ()
        face.advance(1001)
        assert await expired(sweep) == (silent,)
        assert await expired(sweep) == ()
        assert (await face.post("/session_heartbeat", {"session_id": silent})).status_code == 410
        assert "expired" in (await face.retrieve(step["request_id"])).json()["error"]
        info = await face.lanes.lane(model_id)
        assert info is None or not info.is_open
        assert (await face.services.catalog.model("local", model_id)).ended_ms == face.clock[0]


@pytest.mark.proves("R58", "R67")
async def test_time_without_the_store_is_no_silence():
    async with open_face() as face:
        store = Flaky(face.store)
        sweep = sweep_of(face, store)
        session_id = await face.session()
        assert await expired(sweep) == ()
        store.is_away = True
        face.advance(2 * TIMEOUT_MS)
        with pytest.raises(StateContention):
            await sweep.run()
        store.is_away = False
        assert await expired(sweep) == ()
        face.advance(TIMEOUT_MS + 1)
        assert await expired(sweep) == (session_id,)


async def test_a_sweep_goes_on_in_a_store_that_came_back_empty():
    async with open_face() as face:
        store = Flaky(face.store)
        sweep = sweep_of(face, store)
        store.is_away = True
        with pytest.raises(StateContention):
            await sweep.run()
        store.is_away = False
        store.must_be_opened = True
        assert await expired(sweep) == ()
        assert not store.must_be_opened


@pytest.mark.proves("R60")
async def test_one_process_sweeps_at_a_time():
    async with open_face() as face:
        first, second = sweep_of(face, holder="a"), sweep_of(face, holder="b")
        session_id = await face.session()
        assert await first.run() is not None
        assert await second.run() is None
        face.advance(2 * TIMEOUT_MS)
        assert await expired(second) == ()  # it has heard nothing yet, so it cannot tell silence
        assert await first.run() is None
        face.advance(TIMEOUT_MS + 1)
        assert await expired(second) == (session_id,)


async def test_an_end_that_was_cut_short_is_finished():
    async with open_face() as face:
        session_id = await face.session()
        model_id = await face.model(session_id)
        await face.services.catalog.end_session("local", session_id, reason="success", now_ms=face.clock[0])
        assert (await face.lanes.lane(model_id)).is_open
        await expired(sweep_of(face))
        info = await face.lanes.lane(model_id)
        assert info is None or not info.is_open


@pytest.mark.proves("R67")
async def test_the_end_of_a_session_fails_its_samples():
    async with open_face() as face:
        session_id = await face.session()
        catalog, lanes = face.services.catalog, face.lanes
        waiting = replace(sample("s:1"), session=session_id)
        await lanes.pool_submit(waiting)
        await end_session(catalog, lanes, "local", session_id, reason="success", now_ms=1)
        record = await lanes.look("local", waiting.rid)
        assert record is not None
        assert record.failure is not None
        assert (record.failure.reason, "(success)" in record.failure.message) == (ReasonCode.SESSION_ENDED, True)
        with pytest.raises(SessionEnded):
            await lanes.pool_submit(replace(sample("s:2"), session=session_id))
        with pytest.raises(NotFound):
            await end_session(catalog, lanes, "local", "ghost", reason="success", now_ms=1)
        await lanes.pool_submit(replace(sample("s:3"), session="ghost"))  # nothing was written of it


async def test_a_beat_after_the_end_is_swept():
    async with open_face() as face:
        await face.services.catalog.beat("local", "ghost", face.clock[0])
        await face.session()
        sweep = sweep_of(face)
        await expired(sweep)
        face.advance(TIMEOUT_MS + 1)
        assert "ghost" in await expired(sweep)
        assert await face.services.catalog.beats("local") == {}


async def test_ending_twice_keeps_the_first_reason():
    async with open_face() as face:
        session_id = await face.session()
        catalog = face.services.catalog
        first = await end_session(catalog, face.lanes, "local", session_id, reason="success", now_ms=1)
        again = await end_session(catalog, face.lanes, "local", session_id, reason="errored", now_ms=2)
        assert first == again


# The quota


async def units(face: Face, limit: int) -> bool:
    """Whether another model of the tenant would find room under the limit."""
    quota = model_quota("local")
    found = await face.store.reserve(quota, "another", limit=limit, ttl_ms=1000)
    await face.store.unreserve(quota, "another")
    return found


@pytest.mark.proves("R59")
async def test_a_model_holds_its_unit_of_the_quota_as_long_as_it_lives():
    async with open_face() as face:
        sweep, session_id = sweep_of(face), await face.session()
        first, second = await face.model(session_id), await face.model(session_id, model_seq_id=1)
        for model_id in (first, second):
            await face.store.reserve(model_quota("local"), model_id, limit=2, ttl_ms=MODEL_LEASE_MS)
        for _ in range(4):
            face.advance(MODEL_LEASE_MS // 2)
            await face.ok("/session_heartbeat", {"session_id": session_id})
            await expired(sweep)
        assert not await units(face, 2)
        await face.ok("/unload_model", {"model_id": first})
        assert await units(face, 2)
        await expired(sweep)
        assert await units(face, 2)
        assert not await units(face, 1)
        await end_session(face.services.catalog, face.lanes, "local", session_id, reason="success", now_ms=face.clock[0])
        assert await units(face, 1)


@pytest.mark.proves("R59")
async def test_a_model_whose_unit_has_lapsed_takes_it_again_whatever_the_limit():
    async with open_face() as face:
        sweep, session_id = sweep_of(face), await face.session()
        model_id = await face.model(session_id)
        await face.store.unreserve(model_quota("local"), model_id)
        await face.store.reserve(model_quota("local"), "holder", limit=1, ttl_ms=MODEL_LEASE_MS)
        await expired(sweep)
        assert not await units(face, 2)


async def test_a_model_that_has_just_ended_gets_no_unit_anew(monkeypatch: pytest.MonkeyPatch):
    """A pass that listed it before its end comes to it after."""
    async with open_face() as face:
        model_id = await face.model()
        listed = await face.services.catalog.live_models("local")
        await face.ok("/unload_model", {"model_id": model_id})

        async def stale(*_: object) -> list[ModelRecord]:
            return listed

        monkeypatch.setattr(Catalog, "live_models", stale)
        await expired(sweep_of(face))
        assert await units(face, 1)


async def test_a_model_of_a_session_that_nobody_knows_is_let_be():
    async with open_face() as face:
        session_id = await face.session()
        model_id = await face.model(session_id)
        await face.store.delete("local/sessions", session_id)
        await face.store.delete("local/beats", session_id)
        await expired(sweep_of(face))
        info = await face.lanes.lane(model_id)
        assert info is not None
        assert info.is_open
        assert not await units(face, 1)


# What a pass costs


class Watched:
    """A store that notes which tables are listed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.listed: set[str] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def list(self, table: str) -> dict[str, Record]:
        self.listed.add(table)
        return await self._store.list(table)


async def test_a_pass_reads_what_lives_alone():
    async with open_face() as face:
        store = Watched(face.store)
        session_id = await face.session()
        model_id = await face.model(session_id)
        await end_session(face.services.catalog, face.lanes, "local", session_id, reason="success", now_ms=face.clock[0])
        await face.model()
        await expired(sweep_of(face, store))
        assert store.listed == {"system/tenants", "local/beats", "local/models"}
        assert [model.ended_ms is None for model in await face.services.catalog.live_models("local")] == [True]
        assert {model.model_id for model in await face.services.catalog.models("local")} >= {model_id}


@pytest.mark.proves("R51")
async def test_work_that_no_trainer_serves_fails_after_the_time_that_the_sweep_was_given():
    async with open_face() as face:
        sweep = SessionSweep(face.store, face.lanes, holder="a", timeout_ms=10**12, stuck_ms=10**12, orphan_ms=600_000, lease_ms=20_000)
        model_id = await face.model()
        await expired(sweep)
        face.advance(600_000)
        report = await sweep.run()
        assert report is not None
        assert report.swept.num_orphaned == 1
        info = await face.lanes.lane(model_id)
        assert info is not None
        assert (info.is_open, info.num_pending) == (True, 0)


class Flaky:
    """A store that can be away, or want to be opened anew as one does that was emptied."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_away = False
        self.must_be_opened = False

    def __getattr__(self, name: str) -> object:
        self.must_be_opened = self.must_be_opened and name != "open"
        if self.is_away or self.must_be_opened:
            raise StateContention("the store is away")
        return getattr(self._store, name)
