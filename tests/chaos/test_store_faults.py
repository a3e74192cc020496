"""The store away for a second and for ten, and back empty: work is late and not lost, or lost and told so."""

import shutil
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.matrix import Matrix, Row
from tests.chaos.scene import LEASE_S, PASS_S, PROMPT_S, RESTART_S, SLOW_MS, Caller, Keys, Task, batch, faulty, start, until
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess
from tinsmith.engines.fake_faults import Fault
from tinsmith.protocol import native

NUM_QUEUED = 20
MAX_RETRY_S = 5.0  # the longest pause of any process between two tries to reach a store that is away
STEP = {"optimizer": {"type": "adamw", "learning_rate": 0.1}}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as redis:
        yield redis


@pytest.fixture(scope="module")
def server(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("checkpoints"), redis_url=redis.url) as server:
        yield server


def refused_for_now(server: ServerProcess, path: str, body: dict[str, object]) -> float:
    """How long a request takes to be refused while the store is away."""
    began = time.monotonic()
    answer = httpx.post(f"{server.url}{native.PREFIX}{path}", json=body, timeout=60)
    assert (answer.status_code, answer.json()["reason"]) == (503, "state_contention")
    assert "retry-after" in answer.headers
    return time.monotonic() - began


@pytest.mark.parametrize("away_s", [1.0, 10.0])
def test_the_store_is_away_for_a_while(server: ServerProcess, redis: RedisServer, matrix: Matrix, away_s: float) -> None:
    with Caller(server.url) as caller:
        twin = caller.model(lora={"rank": 4, "seed": 7})
        for _ in range(NUM_QUEUED):
            assert twin.submit(native.TrainStep, **batch(1, 2, 3), **STEP).end(PROMPT_S).saw == "completed"
        undisturbed = twin.forward().end(PROMPT_S).result["metrics"]
        model = caller.model(lora={"rank": 4, "seed": 7})
        model.submit(native.Forward, **faulty(Fault.SLEEP))
        tasks = [model.submit(native.TrainStep, **batch(1, 2, 3), **STEP) for _ in range(NUM_QUEUED)]
        sample = caller.sampler().sample(1, 2, max_tokens=200)

        redis.kill()
        down_at = time.monotonic()
        refused_s = refused_for_now(server, "/create_session", {})
        assert refused_s <= PROMPT_S + LEASE_S
        time.sleep(max(0.0, down_at + away_s - time.monotonic()))
        redis.restart()

        # A process tries again after a pause; then it spares the lanes of others for one lease, since they were cut off, too.
        bound_s = away_s + refused_s + MAX_RETRY_S + LEASE_S + SLOW_MS / 1000 + 2 * PROMPT_S
        ended = [task.end(bound_s) for task in (*tasks, sample)]
        assert {end.saw for end in ended} == {"completed"}
        assert model.forward().end(PROMPT_S).result["metrics"] == undisturbed
        then = f"another model: {caller.model().forward().end(PROMPT_S).saw}; the loss is that of an undisturbed run"
        caller.end_session()
        check_keys(caller, redis)
    saw = f"{NUM_QUEUED + 1} x completed; meanwhile state_contention after {refused_s:.1f} s"
    seconds = max(end.seconds for end in ended)
    bound = "outage + retry + lease + calls + answer"
    matrix.note(Row("store", f"away for {away_s:.0f} s", "Redis killed and started", saw, seconds, bound_s, bound, then))


def test_the_store_comes_back_empty(server: ServerProcess, redis: RedisServer, matrix: Matrix) -> None:
    """Every id of before is answered as unknown, and a new session finds a server that works."""
    with Caller(server.url) as caller:
        model = caller.model()
        tasks = [model.submit(native.Forward, **faulty(Fault.SLEEP)) for _ in range(3)]
        redis.kill()
        shutil.rmtree(redis.directory / "appendonlydir")
        began = time.monotonic()
        redis.restart()
        bound_s = MAX_RETRY_S + LEASE_S + PROMPT_S
        ended = [Task(caller, task.request_id, began).end(bound_s) for task in tasks]
        assert {end.saw for end in ended} == {"resource_not_found"}
        answer = caller.http.post("/forward", json={"model_id": model.id, "seq_id": model.next_seq, **batch(1, 2)})
        assert answer.json()["reason"] == "resource_not_found"
    with Caller(server.url) as caller:
        again = time.monotonic()
        model = caller.model(bound_s=bound_s + RESTART_S)
        assert model.forward().end(PROMPT_S).saw == "completed"
        then = f"a new session: a model after {time.monotonic() - again:.1f} s; a sample: {caller.sampler().sample(1, 2).end(PROMPT_S).saw}"
        until(lambda: [held["num_used"] for held in caller.processes("trainer")] == [1], LEASE_S + PROMPT_S, "slots of the former store")
        caller.end_session()
        check_keys(caller, redis)
    seconds, bound = max(end.seconds for end in ended), "retry + lease + answer"
    matrix.note(Row("store", "back empty", "Redis and its data lost", "resource_not_found", seconds, bound_s, bound, then))


def check_keys(caller: Caller, redis: RedisServer) -> None:
    keys = Keys(redis.url)
    until(lambda: keys.leaked(caller) == [], PASS_S + LEASE_S + RESTART_S, "keys of an ended session")
    keys.close()
