"""A Redis that dies, comes back, or is not fit to be used."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files
from pathlib import Path
from time import monotonic

import pytest
from redis.exceptions import ResponseError

from tests.contract.scenes import (
    BASE,
    LANE,
    TENANT,
    command,
    completed,
    done,
    open_lane,
    own,
    replica,
    rid_of,
    run_up_to,
    sample,
    seqs,
    take,
)
from tests.redis_server import RedisServer, State, open_state
from tinsmith.config import ConfigError
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.futures import State as FutureState
from tinsmith.protocol.wire_bounds import MIB
from tinsmith.state import redis_process
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, TOPIC_LENGTH, LaneLimits, Settlement, bell_topic
from tinsmith.state.redis_process import RedisProcess, RedisUnavailable, find_server
from tinsmith.state.redis_store import RedisStore
from tinsmith.state.store import SCHEMA_VERSION

AWAY_S = 3.0
SOON_S = 1.0
LIMITS = LaneLimits(lease_ms=60_000)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def state(server: RedisServer) -> AsyncIterator[State]:
    state = await open_state(server.url, LIMITS)
    yield state
    await state.close()


async def test_a_killed_server_loses_nothing_and_readers_go_on(server: RedisServer, state: State) -> None:
    lanes = state.lanes
    reader = EventReader(lanes, [SETTLED, bell_topic("r1")], store=state.store, on_new_epoch=lambda info: pytest.fail("no new epoch"))
    await reader.start()
    await open_lane(lanes, command(1), command(2))
    token = (await own(lanes, "r1")).token
    await run_up_to(lanes, "r1", token, 1)
    taken = await take(lanes, "r1", token, 2)
    await lanes.pool_submit(sample("s1"))

    with reader.register(SETTLED, rid_of(2)) as waiter, reader.subscribe(bell_topic("r1")) as bell:
        bell.take()
        server.kill()
        killed = monotonic()
        while monotonic() < killed + AWAY_S:
            begun = monotonic()
            with pytest.raises(StateContention, match="away"):
                await lanes.submit(command(3))
            assert monotonic() - begun < SOON_S, "operations fail fast"
            await asyncio.sleep(0.25)
        assert not await waiter.wait(0.01)

        server.restart()
        assert await lanes.settle(LANE, "r1", token, done(2)) == frozenset()
        assert await waiter.wait(SOON_S)
        assert (await lanes.submit(command(3))).is_fresh
        assert await bell.wait(SOON_S)
        assert LANE in bell.take()

    assert seqs(taken) == [2]
    for seq in (0, 1, 2):
        record = await lanes.look(TENANT, rid_of(seq))
        assert record is not None
        assert record.state is FutureState.COMPLETED
        assert await lanes.result(TENANT, rid_of(seq)) == b"result of %d" % seq
    assert await lanes.bodies([(rid_of(1), "digest-1-forward_backward")]) == [b"forward_backward 1 of model-1"]
    assert [entry.rid for entry in await lanes.pool_take(BASE, "r1", 8, 1000)] == [sample("s1").rid]
    await reader.stop()


async def test_nobody_steals_a_lane_after_a_pause_of_the_store(server: RedisServer) -> None:
    """Leases lapse while the store is away, whoever comes back first."""
    limits = LaneLimits(lease_ms=500)
    first, second = await open_state(server.url, limits), await open_state(server.url, limits)
    await open_lane(first.lanes, command(1))
    token = (await own(first.lanes, "r1")).token
    await second.lanes.renew(replica("r2"))
    server.kill()
    for state in (first, second):
        with pytest.raises(StateContention):
            await state.lanes.renew(replica("r1"))
    await asyncio.sleep(0.6)
    with pytest.raises(StateContention):
        await second.lanes.renew(replica("r2"))
    server.restart()
    assert LANE in await second.lanes.renew(replica("r2"))
    assert await second.lanes.acquire(LANE, "r2") is None
    assert (await own(first.lanes, "r1")).token == token
    await first.lanes.bury("r1")
    await asyncio.sleep(0.6)
    await second.lanes.renew(replica("r2"))
    acquired = await second.lanes.acquire(LANE, "r2")
    assert acquired is not None
    assert acquired.token == token + 1
    for state in (first, second):
        await state.close()


async def test_a_reader_behind_a_trimmed_topic_is_told(server: RedisServer, state: State) -> None:
    cursors = await state.lanes.tail([SETTLED])
    for seq in range(3):
        await state.lanes.cancel(TENANT, (await state.lanes.submit(command(seq))).rid)
    await state.store.link.command("XTRIM", f"topic:{SETTLED}", "MAXLEN", 1)
    wake = await state.lanes.wait(cursors, 1.0)
    assert wake.resync == {SETTLED}
    assert wake.cursors == await state.lanes.tail([SETTLED])
    assert (files("tinsmith.state") / "lua" / "shared.lua").read_text().count(f"local TOPIC_LENGTH = {TOPIC_LENGTH}\n") == 1


async def test_a_server_that_hangs_is_given_up(server: RedisServer, state: State) -> None:
    server.pause()
    with pytest.raises(StateContention, match="blocking read"):
        await state.lanes.wait({SETTLED: 0}, 0.1)
    assert state.store.link.steady_s < SOON_S, "so that no lane is taken from others who were cut off too"
    begun = monotonic()
    with pytest.raises(StateContention, match="away"):
        await state.lanes.lane(LANE)
    assert monotonic() - begun < 6.0
    server.resume()
    assert await state.lanes.lane(LANE) is None


async def test_large_results_of_one_call_are_sent_one_by_one(state: State) -> None:
    await open_lane(state.lanes, command(1), command(2))
    token = (await own(state.lanes, "r1")).token
    await run_up_to(state.lanes, "r1", token, 0)
    await take(state.lanes, "r1", token, 1)
    large = [Settlement(seq, completed(bytes([seq]) * 3 * MIB)) for seq in (1, 2)]
    assert await state.lanes.settle(LANE, "r1", token, large) == frozenset()
    for settlement in large:
        assert await state.lanes.result(TENANT, rid_of(settlement.seq)) == settlement.outcome.result


async def test_wrong_credentials_are_told(server: RedisServer) -> None:
    with pytest.raises(StateContention, match="credentials"):
        await open_state(server.url.replace("redis://", "redis://nobody:secret@"), LIMITS)


async def test_a_script_that_is_wrong_is_a_defect_and_no_outage(state: State) -> None:
    with pytest.raises(ResponseError, match="not an integer"):
        await state.store.run("lease", "sweeper", "me", "a while")


async def test_the_identity_survives_a_restart(server: RedisServer, state: State) -> None:
    server.restart()
    again = await open_state(server.url, LIMITS)
    assert again.info == state.info
    await again.close()


async def test_an_emptied_store_is_seen_as_a_new_epoch(server: RedisServer, state: State) -> None:
    """Emptied by somebody else, while this process is connected and idle."""
    heard: list[str] = []
    reader = EventReader(state.lanes, [SETTLED], store=state.store, on_new_epoch=lambda info: heard.append(info.epoch), block_s=0.2)
    await reader.start()
    await open_lane(state.lanes)
    vandal = RedisStore(server.url)
    with reader.register(SETTLED, rid_of(0)) as waiter:
        await vandal.flush_all()
        assert await waiter.wait(SOON_S)
    assert len(heard) == 1
    assert heard[0] == (await vandal.open()).epoch
    assert heard[0] != state.info.epoch
    assert await state.lanes.look(TENANT, rid_of(0)) is None
    await open_lane(state.lanes)  # the same handle works on in the new epoch
    await reader.stop()
    await vandal.close()


async def test_a_process_that_remembers_an_emptied_store_writes_nothing(server: RedisServer, state: State) -> None:
    await open_lane(state.lanes)
    other = RedisStore(server.url)
    await other.flush_all()
    with pytest.raises(StateContention, match="emptied"):
        await state.lanes.submit(command(0))
    await other.open()
    with pytest.raises(StateContention, match="emptied"):
        await state.lanes.renew(replica("r1"))
    assert await state.lanes.lane(LANE) is None
    await other.close()


async def test_events_of_a_new_epoch_are_no_continuation_of_the_old(server: RedisServer, state: State) -> None:
    await state.lanes.cancel(TENANT, (await state.lanes.submit(command(0))).rid)
    cursors = await state.lanes.tail([SETTLED])
    other = await open_state(server.url, LIMITS)
    await other.store.flush_all()
    for seq in range(3):
        submitted = await other.lanes.submit(command(seq))
        await other.lanes.cancel(TENANT, submitted.rid)
    wake = await state.lanes.wait(cursors, 1.0)
    assert wake.resync == {SETTLED}
    assert wake.cursors == await other.lanes.tail([SETTLED])
    await other.close()


async def test_a_reader_is_told_of_a_new_epoch_though_others_opened_the_store_before_it(server: RedisServer, state: State) -> None:
    """The handle is shared: a gateway opens it anew for its requests, and then more happens than its reader had read before."""
    await state.lanes.cancel(TENANT, (await state.lanes.submit(command(0))).rid)
    cursors = await state.lanes.tail([SETTLED])
    await state.store.flush_all()
    await state.store.open()
    quiet = await state.lanes.wait(cursors, 0.05)
    assert quiet.resync == {SETTLED}
    cursors = {SETTLED: 1}
    state.lanes._read_epoch = "0123abcd"  # as if it had not read since
    for seq in range(3):
        await state.lanes.cancel(TENANT, (await state.lanes.submit(command(seq))).rid)
    wake = await state.lanes.wait(cursors, 1.0)
    assert (wake.events, wake.resync) == ({}, {SETTLED})
    assert wake.cursors == {SETTLED: 3}


async def test_a_put_whose_reply_was_lost_is_not_a_conflict(state: State) -> None:
    assert await state.store.put("t/things", "a", b"one", expect=0) == 1
    assert await state.store.put("t/things", "a", b"one", expect=0) == 1
    with pytest.raises(StateContention):
        await state.store.put("t/things", "a", b"two", expect=0)


async def test_a_pool_take_whose_reply_was_lost_is_asked_again(server: RedisServer, state: State) -> None:
    lanes = state.lanes
    await lanes.renew(replica("r1"))
    for key in ("a", "b", "c"):
        await lanes.pool_submit(sample(key))
    call_id = lanes._pool_calls[BASE, "r1"].id
    first = await lanes.pool_take(BASE, "r1", 2, 1000)
    lanes._pool_calls[BASE, "r1"].id = call_id  # as if the answer had not arrived
    assert await lanes.pool_take(BASE, "r1", 2, 1000) == first
    assert [entry.rid for entry in await lanes.pool_take(BASE, "r1", 2, 1000)] == [sample("c").rid]


async def test_a_result_that_got_lost_before_its_settle_is_sent_again_or_told(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = state.lanes
    await open_lane(lanes)
    token = (await own(lanes, "r1")).token
    await take(lanes, "r1", token, 0)
    monkeypatch.setattr("tinsmith.state.redis_lanes.staged_result", lambda key, outcome: [])
    with pytest.raises(StateContention, match="settle again"):
        await lanes.settle(LANE, "r1", token, done(0))
    monkeypatch.undo()
    assert await lanes.settle(LANE, "r1", token, done(0)) == frozenset()


async def test_a_body_that_got_lost_before_its_submit_is_told(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    run = state.store.run
    monkeypatch.setattr(state.store, "run", lambda script, *args, before=(), after=(): run(script, *args, after=after))
    with pytest.raises(StateContention, match="submit it again"):
        await state.lanes.submit(command(0))
    assert await state.lanes.lane(LANE) is None


async def test_an_evicting_server_is_refused_with_the_remedy() -> None:
    with RedisServer(maxmemory_policy="allkeys-lru") as server:
        with pytest.raises(ConfigError, match="set `maxmemory-policy noeviction`"):
            await open_state(server.url, LIMITS)


async def test_a_server_without_an_append_only_file_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer(append_only=False) as server, caplog.at_level(logging.WARNING):
        state = await open_state(server.url, LIMITS)
        await state.store.open()
        await state.close()
    assert caplog.text.count("set `appendonly yes`") == 1


async def test_a_newer_schema_is_refused_with_the_remedy(server: RedisServer) -> None:
    store = RedisStore(server.url)
    await store.link.command("SET", "identity", f"0123abcd:00ff:{SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigError, match="upgrade tinsmith"):
        await store.open()
    await store.close()


async def test_a_full_server_is_a_passing_state(server: RedisServer, state: State) -> None:
    await open_lane(state.lanes)
    await state.store.link.command("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(StateContention, match="full"):
        await state.store.put("t/things", "a", b"x")
    await state.store.link.command("CONFIG", "SET", "maxmemory", 0)
    assert await state.store.put("t/things", "a", b"x") == 1


async def test_a_server_that_is_away_at_start_is_told() -> None:
    with RedisServer() as server:
        url = server.url
    with pytest.raises(StateContention, match="away"):
        await open_state(url, LIMITS)


def test_a_server_that_cannot_start_says_where_to_look(server: RedisServer, tmp_path: Path) -> None:
    port = int(server.url.rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(RedisUnavailable, match=r"see .*redis\.log"):
        RedisProcess(tmp_path, port=port).start()


def test_a_port_that_another_took_first_is_left_to_it(server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = int(server.url.rsplit(":", 1)[1].split("/")[0])
    free = redis_process._free_port()
    ports = iter([taken, free])
    monkeypatch.setattr(redis_process, "_free_port", lambda: next(ports))
    process = RedisProcess(tmp_path)
    process.start()
    process.start()
    assert process.url == f"redis://127.0.0.1:{free}/0"
    process.stop()
    process.stop()
    assert process.pid is None


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_process, "_START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(redis_process, "_is_ready", lambda port, pid: False)
    with pytest.raises(RedisUnavailable, match="does not start"):
        RedisProcess(tmp_path).start()


def test_a_server_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = RedisProcess(tmp_path)
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(redis_process, "_STOP_TIMEOUT_S", 0.05)
    process.stop()
    assert process.pid is None


def test_a_machine_without_a_server_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert find_server().name == "valkey-server"
    monkeypatch.setattr(redis_process, "_WHEEL", "no-such-distribution")
    with pytest.raises(RedisUnavailable, match="install Redis"):
        find_server()
