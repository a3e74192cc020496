"""Messages to one process, what a replica tells of itself, and what travels beside a command."""

from dataclasses import replace

import pytest

from tests.contract.conftest import MakeState, RedisState, State
from tests.contract.scenes import (
    BASE,
    ENDED,
    LANE,
    NEVER_MS,
    TENANT,
    command,
    open_lane,
    own,
    replica,
    run_up_to,
    sample,
    take,
)
from tinsmith.protocol.errors import RequestRejected
from tinsmith.state import inbox
from tinsmith.state.inbox import SampleAbort
from tinsmith.state.lanes import GATEWAYS, SETTLED, LaneLimits, Role, bell_topic, inbox_topic, process_of

INBOX = inbox_topic("g1")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


# Inboxes


async def test_what_is_posted_reaches_the_inbox_in_order(state: State) -> None:
    cursors = await state.lanes.tail([INBOX, inbox_topic("g2")])
    await state.lanes.post(INBOX, ["one", "two"])
    await state.lanes.post(INBOX, [])
    await state.lanes.post(INBOX, ["three"])
    wake = await state.lanes.wait(cursors, 0)
    assert wake.events == {INBOX: ["one", "two", "three"]}
    assert not wake.resync


@pytest.mark.parametrize("topic", [SETTLED, bell_topic("r1"), "work:llama"])
async def test_only_inboxes_are_posted_to(state: State, topic: str) -> None:
    with pytest.raises(ValueError, match="is no inbox"):
        await state.lanes.post(topic, ["look again"])
    assert (await state.lanes.tail([topic]))[topic] == 0


def test_an_inbox_names_its_process() -> None:
    assert process_of(inbox_topic("a:b")) == "a:b"


@pytest.mark.proves("R53")
async def test_the_inbox_of_a_dead_process_goes(make_state: MakeState) -> None:
    state = await make_state(lease_ms=100, inbox_kept_ms=200)
    await state.lanes.renew(replica("g1", GATEWAYS, Role.GATEWAY))
    await state.lanes.post(INBOX, ["token"])
    await state.pass_ms(100)
    await state.lanes.post(INBOX, ["token"])
    await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)
    assert await state.lanes.tail([INBOX]) == {INBOX: 2}
    assert any("g1" in key for key in await state.keys())
    await state.pass_ms(250)
    await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)
    assert await state.lanes.tail([INBOX]) == {INBOX: 0}
    assert not any("g1" in key for key in await state.keys())


async def test_the_numbers_of_a_living_process_inbox_go_on(make_state: MakeState) -> None:
    state = await make_state(inbox_kept_ms=100)
    await state.lanes.renew(replica("g1", GATEWAYS, Role.GATEWAY))
    await state.lanes.post(INBOX, ["old"])
    cursors = await state.lanes.tail([INBOX])
    await state.pass_ms(150)
    await state.lanes.sweep(stuck_ms=NEVER_MS, orphan_ms=NEVER_MS)
    assert not any(key.startswith("topic:inbox") for key in await state.keys())
    await state.lanes.post(INBOX, ["new"])
    wake = await state.lanes.wait(cursors, 0)
    assert (wake.events, wake.resync) == ({INBOX: ["new"]}, frozenset())


@pytest.mark.proves("R67")
async def test_the_end_of_a_session_tells_the_samplers_that_run_its_samples(state: State) -> None:
    running, waiting, other = (replace(sample(f"s:{index}"), session="over") for index in range(3))
    other = replace(other, session="another")
    for submission in (running, other, waiting):
        await state.lanes.pool_submit(submission)
    await state.lanes.renew(replica("s1", role=Role.SAMPLER))
    await state.lanes.pool_take(BASE, "s1", 2, 100)
    topic = inbox_topic("s1")
    cursors = await state.lanes.tail([topic])
    for _ in range(2):
        await state.lanes.close_session(TENANT, "over", ENDED)
    messages = [inbox.decode(message) for message in (await state.lanes.wait(cursors, 0)).events[topic]]
    assert messages == [SampleAbort(rid=running.rid)]


# Replicas


@pytest.mark.proves("R53")
async def test_a_replica_is_known_as_it_was_at_its_last_renewal(state: State) -> None:
    fresh = replace(replica("s1", role=Role.SAMPLER), num_slots=32)
    await state.lanes.renew(fresh)
    assert await state.lanes.replicas(BASE) == [fresh]
    changed = replace(fresh, is_healthy=False, is_draining=True, num_used=7)
    await state.lanes.renew(changed)
    assert await state.lanes.replicas(BASE) == [changed]


async def test_gateways_are_replicas_of_a_base_model_of_their_own(state: State) -> None:
    gateways = [replica(name, GATEWAYS, Role.GATEWAY) for name in ("g1", "g2")]
    for gateway in gateways:
        assert await state.lanes.renew(gateway) == []
    assert await state.lanes.replicas(GATEWAYS) == gateways
    assert await state.lanes.queues(GATEWAYS) == []
    await state.lanes.bury("g1")
    assert await state.lanes.replicas(GATEWAYS) == gateways[1:]
    await state.lanes.sweep(stuck_ms=0, orphan_ms=0)
    assert await state.lanes.replicas(BASE) == []


async def test_a_record_of_an_older_or_newer_writer_reads(redis_url: str) -> None:
    state = RedisState(redis_url, LaneLimits())
    await state.start()
    old = '{"id": "r1", "base": "llama", "node": "node-1", "pid": 4711, "started": "1700000000.5"}'
    await state.store.run("renew", "r1", BASE, "trainer", old, 10_000, 3, "")
    await state.store.run("renew", "r2", BASE, "trainer", old[:-1].replace("r1", "r2") + ', "colour": "red"}', 10_000, 3, "")
    assert await state.lanes.replicas(BASE) == [replica("r1"), replica("r2")]
    await state.close()


# Traces and replies


async def test_the_trace_of_a_command_reaches_its_taker_and_its_replay(state: State) -> None:
    await open_lane(state.lanes, replace(command(1), trace=TRACE), command(2))
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 0)
    entries = (await take(state.lanes, "r1", owner.token, 1)).entries
    assert [entry.trace for entry in entries] == [TRACE, ""]
    await state.lanes.release(LANE, "r1", owner.token)
    owner = await own(state.lanes, "r1")
    await run_up_to(state.lanes, "r1", owner.token, 2)
    await state.lanes.bury("r1")
    assert [entry.trace for entry in (await own(state.lanes, "r2")).replay] == ["", TRACE, ""]


async def test_trace_and_reply_of_a_sample_reach_its_taker(state: State) -> None:
    await state.lanes.pool_submit(replace(sample("s:1"), trace=TRACE, reply_to=INBOX))
    await state.lanes.pool_submit(sample("s:2"))
    await state.lanes.renew(replica("s1"))
    entries = await state.lanes.pool_take(BASE, "s1", 10, 100)
    assert [(entry.trace, entry.reply_to) for entry in entries] == [(TRACE, INBOX), ("", "")]


@pytest.mark.proves("R31", "I3")
async def test_a_repeat_under_another_trace_is_a_repeat(state: State) -> None:
    await open_lane(state.lanes, replace(command(1), trace=TRACE))
    assert (await state.lanes.submit(replace(command(1), trace="another"))).is_fresh is False
    await state.lanes.pool_submit(replace(sample("s:1"), reply_to=INBOX))
    assert (await state.lanes.pool_submit(replace(sample("s:1"), trace=TRACE, reply_to="inbox:g2"))).is_fresh is False
    with pytest.raises(RequestRejected):
        await state.lanes.pool_submit(replace(sample("s:1"), digest="another", reply_to=INBOX))
