"""Callers that vanish: half way through a request, while they wait, while they are told tokens, and for good."""

import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.chaos.matrix import Matrix, Row
from tests.chaos.scene import LEASE_S, PASS_S, PROMPT_S, RESTART_S, Caller, Ended, Keys, Task, faulty, start, until
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess
from tinsmith.engines.fake_faults import Fault
from tinsmith.gateway.streams import GRACE_S
from tinsmith.protocol import native

NUM_VANISHED = 100
NUM_STREAMS = 4
HELD_S = 1.5  # how long the call takes whose callers vanish
SILENCE_S = 20.0  # of a session before it ends: longer than any of these tests takes


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as redis:
        yield redis


@pytest.fixture(scope="module")
def server(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    execution = {"session_timeout_s": SILENCE_S, "timeout_s": 30.0}
    with start(tmp_path_factory.mktemp("checkpoints"), redis_url=redis.url, execution=execution) as server:
        yield server


@pytest.fixture
def caller(server: ServerProcess) -> Iterator[Caller]:
    with Caller(server.url) as caller:
        yield caller


def half_a_request(url: str, path: str, body: bytes) -> None:
    """Announce a body, send half of it, and be gone."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[: len(body) // 2])


def a_request_without_a_reader(url: str, path: str, body: bytes) -> None:
    """Send it whole, and be gone before its answer."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        time.sleep(0.01)


def test_callers_vanish_half_way_through_their_requests(server: ServerProcess, caller: Caller, redis: RedisServer, matrix: Matrix) -> None:
    model = caller.model()
    body = json.dumps({"model_id": model.id, "seq_id": 1, "texts": ["a" * 10_000]}).encode()
    began = time.monotonic()
    for _ in range(NUM_VANISHED):
        half_a_request(server.url, f"{native.PREFIX}/forward", body)
    ended = model.forward().end(PROMPT_S)
    assert ended.saw == "completed", "seq 1 is still free"
    seconds = time.monotonic() - began
    check_gone(caller, redis)
    matrix.note(
        Row(
            "callers",
            "vanish mid-request",
            f"{NUM_VANISHED} x forward",
            "nobody is left to see",
            seconds,
            2 * PROMPT_S,
            "answer",
            "the seq id: free",
        )
    )


def test_callers_vanish_from_their_long_polls(server: ServerProcess, caller: Caller, redis: RedisServer, matrix: Matrix) -> None:
    model = caller.model()
    task = model.submit(native.Forward, **faulty(Fault.SLEEP, round(1000 * HELD_S)))
    body = json.dumps({"request_id": task.request_id}).encode()
    for _ in range(NUM_VANISHED):
        a_request_without_a_reader(server.url, f"{native.PREFIX}/retrieve_future", body)
    ended = task.end(HELD_S + PROMPT_S)
    assert ended.saw == "completed"
    until(lambda: sum(held["num_used"] for held in caller.processes("gateway")) <= 1, LEASE_S + PROMPT_S, "polls without a caller")
    then = f"the same model: {model.forward().end(PROMPT_S).saw}; no poll is held"
    check_gone(caller, redis)
    matrix.note(
        Row(
            "callers",
            "vanish from a long poll",
            f"{NUM_VANISHED} polls",
            ended.saw,
            ended.seconds,
            HELD_S + PROMPT_S,
            "call + answer",
            then,
        )
    )


def test_callers_vanish_from_their_streams(server: ServerProcess, caller: Caller, redis: RedisServer, matrix: Matrix) -> None:
    sampler = caller.sampler()
    ended: list[Ended] = []
    for _ in range(NUM_STREAMS):
        body = sampler.body(1, 2, max_tokens=8000, num_samples=256)  # a dozen seconds of work, if nobody ends it
        with caller.http.stream("POST", "/sample_stream", json=body) as response:
            lines = map(json.loads, response.iter_lines())
            request_id = next(lines)["request_id"]
            assert next(lines)["type"] == "delta"
        caller.request_ids.append(request_id)
        ended.append(Task(caller, request_id, time.monotonic()).end(GRACE_S + PROMPT_S))
    assert {end.saw for end in ended} == {"cancelled"}
    until(lambda: [held["num_used"] for held in caller.processes("sampler")] == [0], LEASE_S + PROMPT_S, "rows without a caller")
    then = f"another sample: {sampler.sample(1, 2).end(PROMPT_S).saw}; no row is held"
    check_gone(caller, redis)
    seconds = max(end.seconds for end in ended)
    matrix.note(
        Row(
            "callers",
            "vanish mid-stream",
            f"{NUM_STREAMS} streams",
            "cancelled",
            seconds,
            GRACE_S + PROMPT_S,
            "grace of a stream (2 s) + answer",
            then,
        )
    )


def test_a_caller_that_never_comes_back_leaves_nothing(server: ServerProcess, redis: RedisServer, matrix: Matrix) -> None:
    """It is killed with work in the queue, and no request of its own ends anything."""
    ghost = Caller(server.url)
    model = ghost.model()
    waiting = [model.submit(native.Forward, **faulty(Fault.SLEEP, 25_000)) for _ in range(2)]
    began = time.monotonic()
    ghost.http.close()
    bound_s = SILENCE_S + PASS_S + PROMPT_S
    with Caller(server.url) as caller:
        ended = [Task(caller, task.request_id, began).end(bound_s) for task in waiting]
        assert {end.saw for end in ended} == {"session_ended"}
        bound = "silence + janitor's pass + answer"
        until(lambda: [held["num_used"] for held in caller.processes("trainer")] == [0], 30 + RESTART_S, "slots of a silent session")
        check_keys(ghost, redis)
        with Caller(server.url) as another:
            then = f"another session's model: {another.model().forward().end(PROMPT_S).saw}; its slot and its keys: gone"
    seconds = max(end.seconds for end in ended)
    matrix.note(Row("callers", "killed for good", "2 commands queued", "session_ended", seconds, bound_s, bound, then))


def check_gone(caller: Caller, redis: RedisServer) -> None:
    caller.end_session()
    check_keys(caller, redis)


def check_keys(caller: Caller, redis: RedisServer) -> None:
    keys = Keys(redis.url)
    until(lambda: keys.leaked(caller) == [], PASS_S + LEASE_S + RESTART_S, "keys of an ended session")
    keys.close()
