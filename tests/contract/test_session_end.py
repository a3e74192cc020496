"""The end of a session whose client is gone: what is left of it in the store."""

from dataclasses import replace

import pytest

from tests.contract.conftest import MakeState, State
from tests.contract.scenes import BASE, command, completed, done, replica, sample
from tinsmith.lifecycle.sessions import SessionSweep, session_ended
from tinsmith.protocol.errors import SessionEnded
from tinsmith.protocol.sessions import ModelRecord, SessionRecord
from tinsmith.protocol.training import LoraConfig
from tinsmith.state.catalog import Catalog, model_write
from tinsmith.state.lanes import Role, Submission
from tinsmith.state.quotas import MODEL_LEASE_MS, model_quota

TENANT, SESSION, MODEL = "local", "5e55", "5e55:train:0"
TIMEOUT_MS = 150


def of_session(seq: int) -> Submission:
    return replace(command(seq, lane=MODEL), session=SESSION)


async def begin(state: State) -> Catalog:
    """A session with a model that has a snapshot, work in every state, and samples in every state."""
    catalog, lanes = Catalog(state.store), state.lanes
    now_ms = await state.store.now_ms()
    await catalog.add_session(SessionRecord(tenant=TENANT, session_id=SESSION, created_ms=now_ms))
    model = ModelRecord(
        tenant=TENANT, session_id=SESSION, model_id=MODEL, base_model=BASE, lora=LoraConfig(rank=8, seed=1), created_ms=now_ms
    )
    await state.store.reserve(model_quota(TENANT), MODEL, limit=1, ttl_ms=MODEL_LEASE_MS)
    await lanes.submit(replace(of_session(0), writes=(model_write(model),)))
    for seq in range(1, 6):
        await lanes.submit(of_session(seq))
    await lanes.renew(replica("r1"))
    owner = await lanes.acquire(MODEL, "r1")
    assert owner is not None
    for seq in (0, 1):
        await lanes.take(MODEL, "r1", owner.token, seq, 1, 100)
        await lanes.settle(MODEL, "r1", owner.token, done(seq))
    await lanes.commit_snapshot(MODEL, "r1", owner.token, 0, "snapshot-0")
    await lanes.take(MODEL, "r1", owner.token, 2, 1, 100)
    for key in ("s:1", "s:2", "s:3"):
        await lanes.pool_submit(replace(sample(key), session=SESSION))
    await lanes.renew(replica("s1", role=Role.SAMPLER))
    entries = await lanes.pool_take(BASE, "s1", 2, 100)
    await lanes.pool_settle("s1", [(entries[0], completed())])
    return catalog


@pytest.mark.proves("R67", "I11")
async def test_when_a_client_is_gone_only_records_and_its_last_snapshot_are_left(make_state: MakeState) -> None:
    state = await make_state()
    catalog = await begin(state)
    sweep = SessionSweep(state.store, state.lanes, holder="a", timeout_ms=TIMEOUT_MS, stuck_ms=10**12, orphan_ms=10**12, lease_ms=20_000)
    assert await sweep.run() is not None
    await state.pass_ms(TIMEOUT_MS + 50)
    report = await sweep.run()
    assert report is not None
    assert report.expired == (SESSION,)
    rids = [*(of_session(seq).rid for seq in range(6)), *(sample(key).rid for key in ("s:1", "s:2", "s:3"))]
    records = [await state.lanes.look(TENANT, rid) for rid in rids]
    assert all(record is not None and record.state.is_terminal for record in records)
    expected = {f"fut:{rid}" for rid in rids} | {f"record:{rid}" for rid in rids}
    marks = {
        f"lane:{MODEL}",
        f"ended:{TENANT}:{SESSION}",
        f"requests:{TENANT}|{SESSION}",
    }  # the last lists those records, and goes with them
    left = {key for key in await state.keys() if any(name in key for name in (SESSION, *rids))}
    assert left <= expected | marks
    assert await state.lanes.queues(BASE) == []
    assert (await catalog.beats(TENANT), await catalog.live_models(TENANT)) == ({}, [])
    assert [record.artifact for record in await catalog.checkpoints(TENANT)] == ["snapshot-0"]
    assert await state.store.reserve(model_quota(TENANT), "next", limit=1, ttl_ms=1000)
    with pytest.raises(SessionEnded):
        await state.lanes.pool_submit(replace(sample("s:4"), session=SESSION))


@pytest.mark.proves("R67")
async def test_nothing_of_a_session_is_left_when_its_records_are_old(make_state: MakeState) -> None:
    state = await make_state(record_kept_ms=300, lease_ms=5)
    before = {key for key in await state.keys() if not key.startswith("table:")}
    await begin_and_end(state)
    await state.pass_ms(400)
    await state.lanes.sweep(stuck_ms=10**12, orphan_ms=10**12)
    names = [SESSION, *(of_session(seq).rid for seq in range(6)), *(sample(key).rid for key in ("s:1", "s:2", "s:3"))]
    left = {key for key in await state.keys() if not key.startswith("table:")} - before
    assert [key for key in left if any(name in key for name in names)] == []


async def begin_and_end(state: State) -> None:
    lanes = state.lanes
    await lanes.renew(replica("r1"))
    for seq in range(3):
        await lanes.submit(of_session(seq))
    for key in ("s:1", "s:2"):
        await lanes.pool_submit(replace(sample(key), session=SESSION))
    ended = SessionRecord(tenant=TENANT, session_id=SESSION, created_ms=0, end_reason="success")
    failure = session_ended(ended)
    await lanes.close_session(TENANT, SESSION, failure)
    await lanes.close(TENANT, MODEL, failure)
