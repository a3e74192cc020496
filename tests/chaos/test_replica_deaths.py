"""Replicas killed while callers wait: whoever waited gets the result that an undisturbed server gives, later."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.matrix import Matrix, Row
from tests.chaos.scene import PROMPT_S, RESTART_S, RETRY_S, SLOW_MS, Caller, Model, batch, faulty, start, until
from tests.server_process import ServerProcess
from tinsmith.engines.fake_faults import Fault
from tinsmith.protocol import native

NUM_WAITERS = 100
NUM_QUEUED = 50
NUM_TOKENS = 3000  # of the stream that loses its sampler: drawn in about a second
TIMEOUT_S = 60.0  # E of this server: a stream is bounded by it, and is to outlive a restart
STEP = {"optimizer": {"type": "adamw", "learning_rate": 0.1}}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("checkpoints"), execution={"timeout_s": TIMEOUT_S}) as server:
        yield server


@pytest.fixture
def caller(server: ServerProcess) -> Iterator[Caller]:
    with Caller(server.url) as caller:
        yield caller
        caller.end_session()


def check_freed(caller: Caller) -> None:
    """The caller's session holds no slot any more, and every role is back."""
    caller.end_session()
    for role in ("trainer", "sampler"):
        until(lambda role=role: [held["num_used"] for held in caller.processes(role)] == [0], RESTART_S, f"slots of the {role}")  # type: ignore[misc]


def loss_of(model: Model, bound_s: float) -> dict[str, float]:
    ended = model.forward().end(bound_s)
    assert ended.saw == "completed"
    metrics: dict[str, float] = ended.result["metrics"]
    return metrics


def trained(caller: Caller, num_steps: int) -> tuple[Model, dict[str, float]]:
    """A model after so many undisturbed steps, and its loss then. All models of this function are equal."""
    model = caller.model(lora={"rank": 4, "seed": 99})
    for _ in range(num_steps):
        assert model.submit(native.TrainStep, **batch(1, 2, 3), **STEP).end(PROMPT_S).saw == "completed"
    return model, loss_of(model, PROMPT_S)


async def wait_like_a_client(http: httpx.AsyncClient, request_id: str, deadline: float) -> tuple[str, float]:
    """The state in which the future ended, and when; a lost connection and a 503 are asked again."""
    while True:
        try:
            answer = (await http.post("/retrieve_future", json={"request_id": request_id})).json()
        except httpx.TransportError:
            answer = {}
        if answer.get("status") not in (None, "pending", "running"):
            return str(answer["status"]), time.monotonic()
        assert time.monotonic() < deadline
        await asyncio.sleep(0 if answer else RETRY_S)


def test_a_gateway_is_killed_with_a_hundred_waiters(server: ServerProcess, caller: Caller, matrix: Matrix) -> None:
    model = caller.model()
    tasks = [model.submit(native.Forward, **faulty(Fault.SLEEP)) for _ in range(4)]
    bound_s = 4 * SLOW_MS / 1000 + PROMPT_S

    async def wait_and_kill() -> list[tuple[str, float]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=server.url + native.PREFIX, timeout=60, limits=limits) as http:
            polls = [wait_like_a_client(http, tasks[-1].request_id, tasks[-1].began + bound_s) for _ in range(NUM_WAITERS)]
            waiting = [asyncio.create_task(poll) for poll in polls]
            await asyncio.sleep(1)
            assert not any(task.done() for task in waiting)
            server.kill("gateway")
            return await asyncio.gather(*waiting)

    ended = asyncio.run(wait_and_kill())
    assert {state for state, _ in ended} == {"completed"}
    seconds = max(at for _, at in ended) - tasks[-1].began
    assert {task.end(bound_s).saw for task in tasks} == {"completed"}
    then = f"the same model: {model.forward().end(PROMPT_S).saw}"
    again_s = until(lambda: len(server.pids("gateway")) == 2, RESTART_S, "a new gateway")
    then += f"; a second gateway again after {again_s:.1f} s"
    saw = f"{NUM_WAITERS} x completed"
    matrix.note(Row("replicas", "killed", f"gateway, {NUM_WAITERS} waiters", saw, seconds, bound_s, "4 slow calls + answer", then))
    check_freed(caller)


def test_an_idle_trainer_is_killed(server: ServerProcess, caller: Caller, matrix: Matrix) -> None:
    model, loss = trained(caller, 3)
    server.kill("trainer")
    bound_s = RESTART_S + PROMPT_S
    began = time.monotonic()
    assert loss_of(model, bound_s) == loss
    seconds = time.monotonic() - began
    then = f"another model: {caller.model().forward().end(PROMPT_S).saw}; its loss is the one from before"
    matrix.note(Row("replicas", "killed", "trainer, idle", "completed", seconds, bound_s, "restart + answer", then))
    check_freed(caller)


def test_a_trainer_is_killed_in_a_call(server: ServerProcess, caller: Caller, matrix: Matrix) -> None:
    model, loss = trained(caller, 2)
    task = model.submit(native.Forward, **faulty(Fault.SLEEP))
    time.sleep(SLOW_MS / 2000)
    server.kill("trainer")
    bound_s = RESTART_S + SLOW_MS / 1000 + PROMPT_S
    ended = task.end(bound_s)
    assert ended.saw == "completed"
    assert loss_of(model, PROMPT_S) == loss
    then = f"another model: {caller.model().forward().end(PROMPT_S).saw}; the same model: its former loss"
    matrix.note(Row("replicas", "killed", "trainer, in a call", ended.saw, ended.seconds, bound_s, "restart + call + answer", then))
    check_freed(caller)


def test_a_trainer_is_killed_with_fifty_commands_queued(server: ServerProcess, caller: Caller, matrix: Matrix) -> None:
    _, loss = trained(caller, NUM_QUEUED)
    model, _ = trained(caller, 0)
    model.submit(native.Forward, **faulty(Fault.SLEEP))  # what the others wait behind
    tasks = [model.submit(native.TrainStep, **batch(1, 2, 3), **STEP) for _ in range(NUM_QUEUED)]
    server.kill("trainer")
    bound_s = RESTART_S + SLOW_MS / 1000 + 2 * PROMPT_S
    ended = [task.end(bound_s) for task in tasks]
    assert {end.saw for end in ended} == {"completed"}
    assert loss_of(model, PROMPT_S) == loss
    then = f"another model: {caller.model().forward().end(PROMPT_S).saw}; the loss is that of an undisturbed run"
    seconds, saw = max(end.seconds for end in ended), f"{NUM_QUEUED} x completed"
    matrix.note(Row("replicas", "killed", "trainer, 50 queued", saw, seconds, bound_s, "restart + calls + answer", then))
    check_freed(caller)


def test_a_sampler_is_killed_in_the_middle_of_a_stream(server: ServerProcess, caller: Caller, matrix: Matrix) -> None:
    sampler = caller.sampler()
    undisturbed = sampler.sample(1, 2, max_tokens=NUM_TOKENS).end(TIMEOUT_S).result["sequences"][0]["tokens"]
    told: list[int] = []
    last: dict[str, Any] = {}
    began = time.monotonic()
    with caller.http.stream("POST", "/sample_stream", json=sampler.body(1, 2, max_tokens=NUM_TOKENS)) as response:
        has_died = False
        for line in response.iter_lines():
            last = json.loads(line)
            if last["type"] == "delta":
                assert last["offset"] == len(told)
                told += last["tokens"]
                if not has_died:
                    server.kill("sampler")
                    has_died = True
    seconds = time.monotonic() - began
    assert last["type"] == "done", last
    assert told == last["result"]["sequences"][0]["tokens"] == undisturbed
    bound_s = RESTART_S + 2 * PROMPT_S
    then = f"another sample: {sampler.sample(1, 2).end(PROMPT_S).saw}"
    saw = "done, no token twice"
    matrix.note(Row("replicas", "killed", "sampler, mid-stream", saw, seconds, bound_s, "restart + sample + answer", then))
    check_freed(caller)
