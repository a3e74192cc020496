"""Seq ids that come twice, in disorder, not at all, or with another body; on both protocols."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.chaos.matrix import Matrix, Row
from tests.chaos.scene import E_S, GRACE_S, PROMPT_S, Caller, Model, Task, batch, start
from tests.server_process import ServerProcess
from tinsmith.protocol import native

NUM_REPEATS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(tmp_path_factory.mktemp("checkpoints")) as server:
        yield server


@pytest.fixture
def caller(server: ServerProcess) -> Iterator[Caller]:
    with Caller(server.url) as caller:
        yield caller
        caller.end_session()


@dataclass
class Face:
    """A protocol, as these tests use it: `send` posts a forward_backward, or another kind of call, under a seq id."""

    name: str
    send: Callable[[Model, str, int, tuple[int, ...]], httpx.Response]

    def submit(self, model: Model, seq: int, *, kind: str = "forward_backward", tokens: tuple[int, ...] = (1, 2, 3)) -> Task:
        began = time.monotonic()
        answer = self.send(model, kind, seq, tokens)
        assert answer.status_code == httpx.codes.OK, answer.text
        return Task(model.caller, answer.json()["request_id"], began)


def over_native(model: Model, kind: str, seq: int, tokens: tuple[int, ...]) -> httpx.Response:
    data = {} if kind == "optim_step" else batch(*tokens)
    return httpx.post(f"{model.caller.url}{native.PREFIX}/{kind}", json={"model_id": model.id, "seq_id": seq, **data}, timeout=60)


def over_tinker(model: Model, kind: str, seq: int, tokens: tuple[int, ...]) -> httpx.Response:
    body: dict[str, Any] = {"model_id": model.id, "seq_id": seq}
    if kind == "optim_step":
        body["adam_params"] = {"learning_rate": 0.1}
    else:
        targets = {"data": list(tokens), "dtype": "int64"}
        weights = {"data": [1.0] * len(tokens), "dtype": "float32"}
        text = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
        datum = {"model_input": text, "loss_fn_inputs": {"target_tokens": targets, "weights": weights}}
        body["forward_backward_input"] = {"data": [datum], "loss_fn": "cross_entropy"}
    return httpx.post(f"{model.caller.url}/api/v1/{kind}", json=body, timeout=60)


@pytest.fixture(params=[Face("native", over_native), Face("tinker", over_tinker)], ids=["native", "tinker"])
def face(request: pytest.FixtureRequest) -> Face:
    assert isinstance(request.param, Face)
    return request.param


def next_call(face: Face, model: Model, seq: int) -> str:
    ended = face.submit(model, seq).end(PROMPT_S)
    assert ended.saw == "completed"
    return f"the next seq: completed after {ended.seconds:.1f} s"


def test_a_seq_id_that_comes_many_times_at_once_is_one_command(matrix: Matrix, caller: Caller, face: Face) -> None:
    model = caller.model()
    with ThreadPoolExecutor(NUM_REPEATS) as threads:
        tasks = list(threads.map(lambda _: face.submit(model, 1), range(NUM_REPEATS)))
    assert len({task.request_id for task in tasks}) == 1
    ended = tasks[0].end(PROMPT_S)
    assert ended.saw == "completed"
    assert face.submit(model, 1).request_id == tasks[0].request_id, "also once it has ended"
    then = next_call(face, model, 2)
    matrix.note(Row("seq ids", f"{NUM_REPEATS} at once", face.name, "completed, one id", ended.seconds, PROMPT_S, "answer", then))


def test_a_seq_id_with_another_body_is_refused_and_the_first_stays(matrix: Matrix, caller: Caller, face: Face) -> None:
    model = caller.model()
    first = face.submit(model, 1)
    began = time.monotonic()
    refusal = face.send(model, "forward_backward", 1, (7, 8, 9))
    seconds = time.monotonic() - began
    assert (refusal.status_code, refusal.json()["reason"]) == (400, "request_rejected")
    assert first.end(PROMPT_S).saw == "completed"
    then = next_call(face, model, 2)
    matrix.note(Row("seq ids", "another body", face.name, "request_rejected", seconds, PROMPT_S, "answer", then))


def test_seq_ids_out_of_order_run_in_order(matrix: Matrix, caller: Caller, face: Face) -> None:
    model = caller.model()
    tasks = [face.submit(model, seq) for seq in (2, 4, 3)]
    tasks.append(face.submit(model, 1))
    ended = [task.end(PROMPT_S) for task in tasks]
    assert {end.saw for end in ended} == {"completed"}
    then = next_call(face, model, 5)
    matrix.note(Row("seq ids", "out of order", face.name, "completed", max(end.seconds for end in ended), PROMPT_S, "answer", then))


def test_a_missing_seq_id_is_given_up_after_the_grace_and_its_late_call_fails(matrix: Matrix, caller: Caller, face: Face) -> None:
    model, other = caller.model(), caller.model()
    waiting = face.submit(model, 2)
    next_call(face, other, 1)
    ended = waiting.end(GRACE_S + PROMPT_S)
    assert ended.saw == "completed"
    assert ended.seconds >= GRACE_S
    assert face.submit(model, 1).end(PROMPT_S).saw == "request_rejected"
    then = f"another model meanwhile: completed; its late call: request_rejected; {next_call(face, model, 3)}"
    matrix.note(Row("seq ids", "missing", face.name, "completed", ended.seconds, GRACE_S + PROMPT_S, "grace + answer", then))


def test_a_call_that_is_never_split_does_not_wait_for_a_missing_one(matrix: Matrix, caller: Caller, face: Face) -> None:
    model = caller.model()
    ended = face.submit(model, 2, kind="optim_step").end(PROMPT_S)
    assert ended.saw == "completed"
    assert ended.seconds < GRACE_S
    then = next_call(face, model, 3)
    matrix.note(Row("seq ids", "missing before an optim_step", face.name, "completed", ended.seconds, GRACE_S, "no grace", then))


def test_a_refused_seq_id_holds_nobody_back(matrix: Matrix, caller: Caller, face: Face) -> None:
    """The native face gives it back, for the next call; on the Tinker wire it is used up."""
    model = caller.model()
    began = time.monotonic()
    refusal = face.send(model, "forward_backward", 1, (1, 2**31 - 1))  # no token of this model
    seconds = time.monotonic() - began
    if face.name == "native":
        assert refusal.json()["reason"] == "validation_failed", refusal.text
        then = next_call(face, model, 1)
    else:
        assert Task(caller, refusal.json()["request_id"], began).end(E_S).saw == "validation_failed"
        then = next_call(face, model, 2)
    matrix.note(Row("seq ids", "refused", face.name, "validation_failed", seconds, PROMPT_S, "answer", then))
