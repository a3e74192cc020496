"""Waiting on a real Redis: nobody sleeps through an event, and idle processes ask for next to nothing."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from time import monotonic

import pytest

from tests.contract.scenes import BASE, command, completed, open_lane, own, replica, rid_of, sample, take
from tests.redis_server import RedisServer, State, open_state
from tinsmith.protocol.errors import StateContention
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, LaneLimits, Settlement, bell_topic, work_topic

LIMITS = LaneLimits(lease_ms=60_000)
NUM_WAITERS = 500
IDLE_S = 10.0
RENEW_S = 3.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def state(server: RedisServer) -> AsyncIterator[State]:
    state = await open_state(server.url, LIMITS)
    yield state
    await state.close()


async def kill_connections_at_random(admin: State, chance: random.Random, cut_at: list[float]) -> None:
    """Cut connections of everybody else, mostly the reader's, again and again until cancelled; notes when."""
    while True:
        await asyncio.sleep(chance.uniform(0.0, 0.08))
        await admin.store.link.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        cut_at.append(monotonic())


async def settle_all(state: State, settled_at: dict[str, float]) -> None:
    """Run the samples a few at a time, as a sampler does whose own connections break, too."""
    lanes = state.lanes
    while len(settled_at) < NUM_WAITERS:
        try:
            entries = await lanes.pool_take(BASE, "r1", 10, 100_000)
        except StateContention:
            continue
        while True:
            try:
                await lanes.pool_settle("r1", [(entry, completed()) for entry in entries])
                break
            except StateContention:
                continue
        settled_at |= {entry.rid: monotonic() for entry in entries}
        await asyncio.sleep(0.02)


@pytest.mark.proves("I5")
async def test_with_connections_killed_at_random_every_waiter_wakes_within_a_second(server: RedisServer, state: State) -> None:
    sampler, admin = await open_state(server.url, LIMITS), await open_state(server.url, LIMITS)
    rids = [(await state.lanes.pool_submit(sample(f"s{i}"))).rid for i in range(NUM_WAITERS)]
    await sampler.lanes.renew(replica("r1"))
    reader = EventReader(state.lanes, [SETTLED], store=state.store)
    await reader.start()
    settled_at: dict[str, float] = {}
    woken_at: dict[str, float] = {}
    cut_at: list[float] = []

    async def sleep_on(rid: str) -> None:
        with reader.register(SETTLED, rid) as waiter:
            assert await waiter.wait(60)
            woken_at[rid] = monotonic()

    sleepers = asyncio.gather(*map(sleep_on, rids))
    await asyncio.sleep(0)
    vandal = asyncio.create_task(kill_connections_at_random(admin, random.Random(20_260), cut_at))
    await settle_all(sampler, settled_at)
    vandal.cancel()
    await asyncio.wait_for(sleepers, 5)
    for (
        rid
    ) in rids:  # within a second of the settle, or of the last cut before the wake: a lost wake-up would come with the next re-armed read
        cut = max((at for at in cut_at if at <= woken_at[rid]), default=0.0)
        assert woken_at[rid] - max(settled_at[rid], cut) < 1.0
    await reader.stop()
    for other in (sampler, admin):
        await other.close()


@pytest.mark.proves("I12")
async def test_idle_processes_only_renew_and_rearm_their_readers(server: RedisServer, state: State) -> None:
    """One gateway and two workers, with a model that has been served and an empty pool."""
    workers = [await open_state(server.url, LIMITS) for _ in range(2)]
    readers = [EventReader(state.lanes, [SETTLED], store=state.store)]
    for index, worker in enumerate(workers):
        readers.append(EventReader(worker.lanes, [work_topic(BASE), bell_topic(f"r{index}")], store=worker.store))
    await open_lane(state.lanes, command(1))
    token = (await own(workers[0].lanes, "r0")).token
    for seq in (0, 1):
        await take(workers[0].lanes, "r0", token, seq)
        await workers[0].lanes.settle("model-1", "r0", token, [Settlement(seq, completed())])
    for reader in readers:
        await reader.start()

    async def renew(worker: State, name: str) -> None:
        while True:
            assert await worker.lanes.renew(replica(name)) == []
            await asyncio.sleep(RENEW_S)

    renewals = [asyncio.create_task(renew(worker, f"r{index}")) for index, worker in enumerate(workers)]
    sleepers = [asyncio.create_task(reader.subscribe().wait(IDLE_S)) for reader in readers]
    with readers[0].register(SETTLED, rid_of(2)) as waiter:
        await asyncio.sleep(0.5)  # the first renewals are through
        before = await calls(state)
        assert not await waiter.wait(IDLE_S)
        spent = {name: count - before.get(name, 0) for name, count in (await calls(state)).items()}

    num_rearmed = len(readers) * (IDLE_S // 5 + 1)
    num_renewed = len(workers) * (IDLE_S // RENEW_S + 1)
    assert 0 < spent.pop("xread") <= num_rearmed
    assert 0 < spent.pop("evalsha") <= num_renewed
    # A reader that was not woken looks whether the store is still the same one, and a renewal looks for peers that are gone.
    assert spent.pop("hmget") <= num_rearmed
    of_renewals = {"time", "get", "set", "hset", "sadd", "zadd", "zrange", "exists", "smembers"}
    assert {name for name, count in spent.items() if count} <= of_renewals | {"info"}
    assert not any(task.done() for task in renewals)
    assert not any(await asyncio.gather(*sleepers))
    for task in renewals:
        task.cancel()
    for reader in readers:
        await reader.stop()
    for worker in workers:
        await worker.close()


async def calls(state: State) -> dict[str, int]:
    """Calls by command since the server's start."""
    stats = await state.store.link.command("INFO", "commandstats")
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}
