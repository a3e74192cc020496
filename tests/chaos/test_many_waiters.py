"""Thousands who wait: none is forgotten, whatever happens to the connections over which a gateway hears of ends."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import redis

from tests.chaos.matrix import Matrix, Row
from tests.chaos.scene import PASS_S, PROMPT_S, Caller, Model, batch, start
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess
from tinsmith.bench.polls import Poll, post
from tinsmith.protocol import native

NUM_WAITERS = 2000
NUM_MEMORY_WAITERS = 5000
NUM_FUTURES = 50  # of the 5,000 waiters, a hundred a future
NUM_PENDING = 10_000
AT_ONCE = 50  # requests that this process has under way
WAKE_S = 1.0
COMMAND_S = 0.02  # what one command of the fake engine costs, its ways to the store included, on a machine that does much beside
ANSWER_S = 0.016  # two calls of the actor that holds the memory store: 3 ms on quiet cores, 8 on two that did much beside
LONGEST_POLL_S = 40.0
# A first seq id that is missing holds a lane back until the test sends it.
EXECUTION = {"hole_grace_s": 600.0, "queue_timeout_s": 600.0, "long_poll_s": LONGEST_POLL_S, "inline_wait_s": 0.0, "timeout_s": 60.0}
LEASE = {"lease_s": 10.0}  # renewals of a process that answers 5,000 callers at once come late

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def behind() -> Iterator[RedisServer]:
    with RedisServer() as behind:
        yield behind


@pytest.fixture(scope="module")
def server(behind: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("checkpoints"), redis_url=behind.url, execution={**EXECUTION, **LEASE}) as server:
        yield server


@asynccontextmanager
async def connections(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url + native.PREFIX, timeout=120, limits=limits) as http:
        yield http


async def submit_behind_a_hole(http: httpx.AsyncClient, model: Model, count: int) -> list[str]:
    """Forward passes under the seq ids from 2 on."""
    numbers = iter(range(2, count + 2))
    found: dict[int, str] = {}

    async def submit() -> None:
        for seq in numbers:
            answer = await http.post("/forward", json={"model_id": model.id, "seq_id": seq, **batch(1, 2)})
            assert answer.status_code == httpx.codes.OK, answer.text
            found[seq] = answer.json()["request_id"]

    await asyncio.gather(*(submit() for _ in range(AT_ONCE)))
    model.next_seq = 1
    return [found[seq] for seq in sorted(found)]


async def open_polls(url: str, request_ids: list[str]) -> list[Poll]:
    path = f"{native.PREFIX}/retrieve_future"
    polls: list[Poll] = []
    for first in range(0, len(request_ids), AT_ONCE):
        group = [post(url, path, {"request_id": request_id}) for request_id in request_ids[first : first + AT_ONCE]]
        polls += await asyncio.gather(*group)
    return polls


async def answered(poll: Poll) -> tuple[float, str]:
    """When the answer began to arrive, and the state that it tells."""
    line = await poll.reader.readline()
    at = time.monotonic()
    assert line.split()[1] == b"200", line
    _, _, body = (await poll.reader.read()).partition(b"\r\n\r\n")
    poll.writer.close()
    return at, json.loads(body)["status"]


@dataclass
class Vandal:
    """Cuts connections that wait for events, of gateways and workers alike, at random times; notes when."""

    url: str
    chance: random.Random = field(default_factory=lambda: random.Random(20_260))
    cut_at_ms: list[float] = field(default_factory=list)
    num_cut: int = 0

    async def run(self) -> None:
        client = redis.Redis.from_url(self.url)
        try:
            while True:
                await asyncio.sleep(self.chance.uniform(0.0, 0.5))
                for held in client.client_list(_type="normal"):
                    if held["cmd"] == "xread":
                        self.num_cut += int(client.client_kill_filter(_id=held["id"]))
                self.cut_at_ms.append(time.time() * 1000)
        finally:
            client.close()


def settled_ms(url: str) -> dict[str, float]:
    """When each future settled, by the store's clock, which is this machine's."""
    client = redis.Redis.from_url(url)
    found = {rid.decode(): at for rid, at in client.zrange("settled", 0, -1, withscores=True)}
    client.close()
    return found


def test_readers_connections_are_killed_under_two_thousand_waiters(server: ServerProcess, behind: RedisServer, matrix: Matrix) -> None:
    vandal = Vandal(behind.url)

    async def wait() -> tuple[list[str], list[float]]:
        with Caller(server.url) as caller:
            model = caller.model()
            async with connections(server.url) as http:
                request_ids = await submit_behind_a_hole(http, model, NUM_WAITERS)
                polls = await open_polls(server.url, request_ids)
                await asyncio.sleep(1)
                cutting = asyncio.create_task(vandal.run())
                answer = await http.post("/forward", json={"model_id": model.id, "seq_id": 1, **batch(1, 2)})
                assert answer.status_code == httpx.codes.OK
                ends = await asyncio.gather(*map(answered, polls))
                cutting.cancel()
            model.next_seq = NUM_WAITERS + 2
            assert {state for _, state in ends} == {"completed"}
            assert model.forward().end(PROMPT_S).saw == "completed"
            caller.end_session()
        return request_ids, [time.time() * 1000 - (time.monotonic() - at) * 1000 for at, _ in ends]

    request_ids, woken_ms = asyncio.run(wait())
    settled = settled_ms(behind.url)
    waits_s = []
    for request_id, woken in zip(request_ids, woken_ms, strict=True):
        cut = max((at for at in vandal.cut_at_ms if at <= woken), default=0.0)
        waits_s.append((woken - max(settled[request_id], cut)) / 1000)
    assert vandal.num_cut > 20
    then = "the same model: completed"
    saw, bound = f"{NUM_WAITERS} x completed; {vandal.num_cut} connections cut", "1 s from the settle or the latest cut"
    matrix.note(Row("waiters", "readers' connections killed", f"{NUM_WAITERS} waiters, Redis", saw, max(waits_s), WAKE_S, bound, then))


async def states(url: str, request_ids: list[str]) -> set[str]:
    """Of futures that should have ended."""
    async with connections(url) as http:
        groups = [request_ids[first : first + native.MAX_RETRIEVED] for first in range(0, len(request_ids), native.MAX_RETRIEVED)]
        found: set[str] = set()
        for group in groups:
            answer = await http.post("/retrieve_futures", json={"request_ids": group})
            assert answer.status_code == httpx.codes.OK, answer.text
            found |= {task["status"] for task in answer.json()["tasks"]}
        return found


def test_ten_thousand_futures_are_pending(server: ServerProcess, behind: RedisServer, matrix: Matrix) -> None:
    """Another model is served as ever beside them; the end of their session ends them all."""

    async def run() -> tuple[float, str]:
        with Caller(server.url) as caller:
            model, other = caller.model(), caller.model()
            async with connections(server.url) as http:
                request_ids = await submit_behind_a_hole(http, model, NUM_PENDING)
                beside = other.forward().end(PROMPT_S)
                assert beside.saw == "completed"
                health = await http.get(f"{server.url}/healthz")
                assert health.status_code == httpx.codes.OK
                began = time.monotonic()
                await asyncio.to_thread(caller.end_session)
                found = await states(server.url, request_ids)
                assert found == {"failed"}
                seconds = time.monotonic() - began
                answer = await http.post("/retrieve_future", json={"request_id": request_ids[-1]})
                assert answer.json()["error"]["reason"] == "session_ended"
        with Caller(server.url) as another:
            then = f"another model meanwhile: completed after {beside.seconds:.1f} s; "
            then += f"a new session: {another.model().forward().end(PROMPT_S).saw}"
            another.end_session()
        return seconds, then

    seconds, then = asyncio.run(run())
    bound_s = PASS_S + NUM_PENDING / native.MAX_RETRIEVED * 0.1 + PROMPT_S
    bound = "janitor's pass + 157 look-ups + answer"
    matrix.note(Row("waiters", "their session ends", f"{NUM_PENDING} pending", "session_ended", seconds, bound_s, bound, then))


def test_five_thousand_wait_on_the_memory_store(matrix: Matrix, tmp_path_factory: pytest.TempPathFactory) -> None:
    async def wait(url: str) -> tuple[float, str]:
        with Caller(url) as caller:
            model = caller.model()
            async with connections(url) as http:
                request_ids = await submit_behind_a_hole(http, model, NUM_FUTURES)
                polls = await open_polls(url, request_ids * (NUM_MEMORY_WAITERS // NUM_FUTURES))
                began = time.monotonic()
                answer = await http.post("/forward", json={"model_id": model.id, "seq_id": 1, **batch(1, 2)})
                assert answer.status_code == httpx.codes.OK
                ends = await asyncio.gather(*map(answered, polls))
            assert {state for _, state in ends} == {"completed"}
            model.next_seq = NUM_FUTURES + 2
            then = f"the same model: {model.forward().end(PROMPT_S).saw}"
            return max(at for at, _ in ends) - began, then

    with start(tmp_path_factory.mktemp("checkpoints"), execution={**EXECUTION, **LEASE}) as server:
        seconds, then = asyncio.run(wait(server.url))
    bound_s = NUM_FUTURES * COMMAND_S + NUM_MEMORY_WAITERS * ANSWER_S + PROMPT_S
    saw, bound = f"{NUM_MEMORY_WAITERS} x completed", "50 commands + 5,000 answers + answer"
    matrix.note(Row("waiters", "all wake at once", f"{NUM_MEMORY_WAITERS} waiters, memory store", saw, seconds, bound_s, bound, then))
