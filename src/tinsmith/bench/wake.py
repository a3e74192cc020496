"""wake: from the settle of a command to the answer of its caller's long poll, while many others wait.

Both rivals run over one Redis with an append-only file. A round opens the long polls, waits until the server has all of them, then settles
some of them one after another, each once the one before was answered. What counts is the time from the call of the settle to the first
byte of the answer.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import redis.asyncio

from tinsmith.bench.figures import Comparison, Latencies, Round, load_average
from tinsmith.bench.polls import Poll, post
from tinsmith.bench.wake_rivals import BASE, FLOOR_STREAM
from tinsmith.protocol import ids
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.ids import LOCAL_TENANT, WorkKind
from tinsmith.protocol.sampling import SampleOutput
from tinsmith.protocol.sessions import SessionRecord
from tinsmith.protocol.wire import encode_sample_output
from tinsmith.state.catalog import Catalog
from tinsmith.state.lanes import LaneLimits, PoolEntry, PoolSubmission, Replica, Role
from tinsmith.state.redis_lanes import RedisLanes
from tinsmith.state.redis_process import RedisProcess
from tinsmith.state.redis_store import RedisStore

NUM_SETTLED = 200  # of a round; the other polls only wait
OPEN_AT_ONCE = 100  # connections; more would overrun the kernel's queue of them
_SETTLE_S = 0.005  # between two looks at how many wait
_RESULT = encode_sample_output(SampleOutput(sequences=[]))
_REPLICA = Replica(id="bench", base=BASE, node="bench", pid=0, started="0", role=Role.SAMPLER)

Settle = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Rival:
    """`submit` makes the ids that callers wait for; `settle` ends the wait of one."""

    http: httpx.AsyncClient
    url: str
    path: str
    field: str
    submit: Callable[[int], Awaitable[list[str]]]
    settle: Settle


def run(num_waiters: tuple[int, ...], num_rounds: int) -> list[Comparison]:
    """One comparison a number of waiters."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as directory:
        store = RedisProcess(Path(directory))
        store.start()
        try:
            with _serving("ours", store.url) as ours, _serving("floor", store.url) as floor:
                return [asyncio.run(_compare(store.url, ours, floor, num, num_rounds)) for num in num_waiters]
        finally:
            store.stop()


async def _compare(redis_url: str, ours_url: str, floor_url: str, num_waiters: int, num_rounds: int) -> Comparison:
    store = RedisStore(redis_url)
    before = load_average()
    async with redis.asyncio.Redis.from_url(redis_url) as client, httpx.AsyncClient(timeout=60) as http:
        ours, floor = await _ours(store, http, ours_url), _floor(client, http, floor_url)
        rounds = [Round(await _measure(ours, num_waiters), await _measure(floor, num_waiters)) for _ in range(num_rounds)]
    await store.close()
    return Comparison(f"wake, {num_waiters} waiting", tuple(rounds), before, load_average())


async def _measure(rival: Rival, num_waiters: int) -> Latencies:
    """One round of one rival."""
    seconds: list[float] = []
    while len(seconds) < NUM_SETTLED:
        waited = await rival.submit(num_waiters)
        polls = await _open(rival, waited)
        chosen, rest = waited[: NUM_SETTLED - len(seconds)], waited[NUM_SETTLED - len(seconds) :]
        for name in chosen:
            began = time.monotonic()
            await rival.settle(name)
            seconds.append(await polls[name].answer() - began)
        for name in rest:
            await rival.settle(name)
        await asyncio.gather(*(polls[name].answer() for name in rest))
        if any(poll.status != httpx.codes.OK for poll in polls.values()):
            raise RuntimeError(f"{rival.url}{rival.path} did not answer 200; the figures mean nothing")
    return Latencies.of(seconds)


async def _open(rival: Rival, waited: list[str]) -> dict[str, Poll]:
    """Long polls that the server has, all of them."""
    polls: dict[str, Poll] = {}
    for start in range(0, len(waited), OPEN_AT_ONCE):
        group = waited[start : start + OPEN_AT_ONCE]
        polls |= zip(group, await asyncio.gather(*(post(rival.url, rival.path, {rival.field: name}) for name in group)), strict=True)
    while (await rival.http.get(f"{rival.url}/waiting")).json()["num"] < len(waited):  # noqa: ASYNC110 - another process counts
        await asyncio.sleep(_SETTLE_S)
    return polls


async def _ours(store: RedisStore, http: httpx.AsyncClient, url: str) -> Rival:
    lanes = RedisLanes(store, LaneLimits(lease_ms=24 * 3600 * 1000))
    info = await store.open()
    session = SessionRecord(tenant=LOCAL_TENANT, session_id=uuid.uuid4().hex, created_ms=await store.now_ms())
    await lanes.renew(_REPLICA)
    await Catalog(store).add_session(session)
    held: dict[str, PoolEntry] = {}

    async def submit(num: int) -> list[str]:
        for _ in range(num):
            key = uuid.uuid4().hex
            rid = ids.request_id(WorkKind.SAMPLING, epoch=info.epoch, secret=info.secret, tenant=LOCAL_TENANT, lane="bench", seq=key)
            await lanes.pool_submit(PoolSubmission(LOCAL_TENANT, session.session_id, BASE, key, rid, "0" * 64, b"{}", 1))
        while len(held) < num:
            held.update({entry.rid: entry for entry in await lanes.pool_take(BASE, _REPLICA.id, num, num)})
        return list(held)

    async def settle(rid: str) -> None:
        await lanes.pool_settle(_REPLICA.id, [(held.pop(rid), Outcome(result=_RESULT))])

    return Rival(http, url, "/api/v1/retrieve_future", "request_id", submit, settle)


def _floor(client: "redis.asyncio.Redis", http: httpx.AsyncClient, url: str) -> Rival:
    async def submit(num: int) -> list[str]:
        return [uuid.uuid4().hex for _ in range(num)]

    async def settle(name: str) -> None:
        await client.xadd(FLOOR_STREAM, {"id": name}, maxlen=65_536, approximate=True)

    return Rival(http, url, "/wait", "id", submit, settle)


@contextmanager
def _serving(rival: str, redis_url: str) -> Iterator[str]:
    """The URL of a rival in a process of its own."""
    command = [sys.executable, "-m", "tinsmith.bench.wake_rivals", rival, redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own module
        try:
            assert process.stdout is not None  # noqa: S101 - a pipe was asked for
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
