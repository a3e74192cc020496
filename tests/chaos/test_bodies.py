"""Bodies over each bound: refused by the bound's name, soon, and the next request is served."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest
import zstandard

from tests.chaos.matrix import Matrix, Row
from tests.chaos.scene import PROMPT_S, Caller, Model, Task, batch, start
from tests.server_process import ServerProcess
from tinsmith.protocol import native
from tinsmith.protocol.wire_bounds import MAX_CHUNKS, MAX_COMMAND, MAX_DATUMS, MAX_DECODED, MAX_DEPTH, MAX_TENSORS, MAX_WIRE, MIB

LARGE_S = 30.0  # to send, read and refuse tens of MiB on a busy machine
GIB = 1024 * MIB
JSON = {"content-type": "application/json"}
ZSTD = {**JSON, "content-encoding": "zstd"}


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
class Oversized:
    """What is sent to /forward_backward, and the reason of its refusal."""

    name: str
    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    reason: str = "payload_too_large"


def padded(size: int) -> bytes:
    """A native body of that many bytes."""
    return b'{"model_id":"m","seq_id":1,' + b" " * size + b'"texts":["a"]}'


def zeros(size: int) -> bytes:
    """Zstd of that many blanks, made in pieces."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    pieces = [compressor.compress(b" " * MIB) for _ in range(size // MIB)]
    return b"".join([*pieces, compressor.flush()])


def bomb(content: bytes) -> Oversized:
    return Oversized(f"zstd bomb: 1 GiB in {len(content) // 1024} KiB", content, ZSTD)


def windowed(log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=log)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(padded(MIB)) + compressor.flush()


def rows(num: int, length: int) -> bytes:
    ids = "[" + ",".join(["[" + ",".join(["1"] * length) + "]"] * num) + "]"
    return f'{{"model_id":"m","seq_id":1,"batch":{{"input_ids":{ids},"inputs":{{"target_tokens":{ids}}}}}}}'.encode()


def named_tensors(num: int) -> bytes:
    inputs = {f"t{index}": [1] for index in range(num)}
    return json.dumps({"model_id": "m", "seq_id": 1, "batch": {"input_ids": [1], "inputs": inputs}}).encode()


def nested(depth: int) -> bytes:
    return b'{"model_id":' + b"[" * depth + b"]" * depth + b"}"


BUILDERS: list[Callable[[], Oversized]] = [
    lambda: Oversized("wire: 64 MiB + 1", padded(MAX_WIRE)),
    lambda: Oversized("decoded: zstd of 65 MiB", zeros(MAX_DECODED + MIB), ZSTD),
    lambda: bomb(zeros(GIB)),
    lambda: Oversized("zstd window: 16 MiB", windowed(24), ZSTD, "invalid_request"),
    lambda: Oversized("command: 2.1 M ids, over 16 MiB", rows(300, MAX_COMMAND // 8 // 300 + 10), reason="validation_failed"),
    lambda: Oversized("datums: 4,097", rows(MAX_DATUMS + 1, 1)),
    lambda: Oversized("tensors: 65", named_tensors(MAX_TENSORS + 1), reason="validation_failed"),
    lambda: Oversized("JSON depth: 33", nested(MAX_DEPTH + 1)),
]


def next_call(model: Model) -> str:
    ended = model.forward().end(PROMPT_S)
    assert ended.saw == "completed"
    return f"the same model: completed after {ended.seconds:.1f} s"


@pytest.mark.parametrize("build", BUILDERS)
def test_a_native_body_over_a_bound_is_refused(
    server: ServerProcess, matrix: Matrix, caller: Caller, build: Callable[[], Oversized]
) -> None:
    body = build()
    model = caller.model()
    content = body.content.replace(b'"model_id":"m"', f'"model_id":"{model.id}"'.encode())
    began = time.monotonic()
    answer = httpx.post(f"{server.url}{native.PREFIX}/forward_backward", content=content, headers=body.headers, timeout=60)
    seconds = time.monotonic() - began
    assert answer.json()["reason"] == body.reason, answer.text
    matrix.note(Row("bodies", body.name, "native", answer.json()["reason"], seconds, LARGE_S, "transfer", next_call(model)))


def tinker_body(model: Model, *, num_datums: int = 1, num_chunks: int = 1, num_tensors: int = 0) -> dict[str, object]:
    tensor = {"data": [1], "dtype": "int64"}
    inputs = {"target_tokens": {"data": [1] * num_chunks, "dtype": "int64"}} | {f"t{index}": tensor for index in range(num_tensors)}
    datum = {"model_input": {"chunks": [{"tokens": [1]}] * num_chunks}, "loss_fn_inputs": inputs}
    data = [datum] * num_datums
    return {"model_id": model.id, "seq_id": 1, "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("datums: 4,097", {"num_datums": MAX_DATUMS + 1}),
        ("chunks: 4,097 of a datum", {"num_chunks": MAX_CHUNKS + 1}),
        ("tensors: 66 of a datum", {"num_tensors": MAX_TENSORS + 1}),
    ],
)
def test_a_tinker_body_over_a_bound_is_a_future_that_failed(
    server: ServerProcess, matrix: Matrix, caller: Caller, name: str, size: dict[str, int]
) -> None:
    model = caller.model()
    began = time.monotonic()
    answer = httpx.post(f"{server.url}/api/v1/forward_backward", json=tinker_body(model, **size), timeout=60)
    assert answer.status_code == httpx.codes.OK, answer.text
    ended = Task(caller, answer.json()["request_id"], began).end(LARGE_S)
    assert ended.saw == "validation_failed"
    model.next_seq = 2
    matrix.note(Row("bodies", name, "tinker", ended.saw, ended.seconds, LARGE_S, "transfer", next_call(model)))


def test_a_body_of_just_the_bound_is_taken(server: ServerProcess, matrix: Matrix, caller: Caller) -> None:
    """So that the rows above speak of the bound and of nothing else."""
    model = caller.model()
    content = json.dumps({"model_id": model.id, "seq_id": 1, **batch(1, 2, 3)}).encode()
    content = content[:-1] + b" " * (MAX_WIRE - len(content)) + b"}"
    assert len(content) == MAX_WIRE
    began = time.monotonic()
    answer = httpx.post(f"{server.url}{native.PREFIX}/forward_backward", content=content, headers=JSON, timeout=60)
    assert answer.status_code == httpx.codes.OK, answer.text
    ended = Task(caller, answer.json()["request_id"], began).end(LARGE_S)
    assert ended.saw == "completed"
    model.next_seq = 2
    matrix.note(Row("bodies", "wire: 64 MiB exactly", "native", ended.saw, ended.seconds, LARGE_S, "transfer", next_call(model)))
