"""Models and training steps at the face: what is queued, what is refused, and what a refusal leaves behind."""

import json
import math
import threading
from array import array

import pytest
import zstandard

from tests.fakes.face import BASE, INFO, Face, open_face
from tinsmith.gateway.preflight import check_compute
from tinsmith.protocol import tinker_pb2 as pb
from tinsmith.protocol import wire
from tinsmith.protocol.training import AdamParams, Compute, CreateModel, Kind, OptimStep
from tinsmith.state.lanes import LaneLimits

PROTOBUF = {"content-type": "application/x-protobuf"}


def tokens(*values: int) -> bytes:
    return array("i", values).tobytes()


def request(model_id: str, seq_id: int, *, loss_fn: str = "cross_entropy", forward_only: bool = False, ids: tuple[int, ...] = (1, 2)):
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = tokens(*ids)
    datum.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=array("q", ids).tobytes(), dtype=2, shape=[len(ids)]))
    return message


async def send(face: Face, body: bytes, **headers: str):
    return await face.http.post("/api/v1/forward_backward", content=body, headers=PROTOBUF | headers)


async def failure_of(face: Face, response) -> dict[str, str]:
    """The failed future that a refusal became."""
    assert response.status_code == 200, response.text
    answer = await face.retrieve(response.json()["request_id"])
    assert answer.status_code == 200
    return dict(answer.json())


async def test_create_model_is_entry_0_of_its_own_lane(face: Face):
    session_id = await face.session()
    body = {"session_id": session_id, "model_seq_id": 3, "base_model": BASE, "user_metadata": {"k": 1}, "type": "create_model"}
    lora = {"rank": 4, "seed": 9, "train_mlp": False}
    promise = await face.ok("/create_model", body | {"lora_config": lora})
    model_id = f"{session_id}:train:3"
    assert promise["model_id"] == model_id
    ((entry, command),) = await face.take(model_id)
    assert (entry.seq, entry.kind, entry.rid) == (0, Kind.CREATE_MODEL, promise["request_id"])
    assert isinstance(command, CreateModel)
    assert (command.lora.rank, command.lora.seed, command.lora.train_mlp, command.lora.train_attn) == (4, 9, False, True)
    record = await face.services.catalog.model("local", model_id)
    assert (record.base_model, record.lora, record.user_metadata) == (BASE, command.lora, {"k": "1"})


@pytest.mark.proves("R31")
async def test_an_unseeded_model_gets_a_seed_that_a_repeat_finds_again(face: Face):
    session_id = await face.session()
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8, "seed": None}}
    first = await face.ok("/create_model", body)
    face.advance(10)
    assert await face.ok("/create_model", body) == first
    ((_, command),) = await face.take(first["model_id"])
    other = await face.model(session_id, model_seq_id=1)
    ((_, another),) = await face.take(other)
    assert command.lora.seed != another.lora.seed
    face.services.base_models["org/other"] = INFO.model_copy(update={"name": "org/other"})
    for change in ({"lora_config": {"rank": 4}}, {"base_model": "org/other"}):
        changed = await face.post("/create_model", body | change)
        assert (changed.status_code, changed.json()["reason"]) == (400, "request_rejected")


@pytest.mark.proves("R28")
@pytest.mark.parametrize(
    ("changes", "status", "names"),
    [
        ({"base_model": "org/other"}, 404, "base_model"),
        ({"base_model": None}, 422, "base_model"),
        ({"session_id": "nope"}, 404, "session"),
        ({"model_seq_id": -1}, 422, "model_seq_id"),
        ({"model_seq_id": 2**31}, 422, "model_seq_id"),
    ],
)
async def test_a_refused_model_leaves_nothing(face: Face, changes, status, names):
    session_id = await face.session()
    answer = await face.post("/create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": BASE} | changes)
    assert answer.status_code == status
    assert names in answer.json()["detail"]
    assert await face.services.catalog.models("local") == []
    assert await face.lanes.lane(f"{session_id}:train:0") is None


@pytest.mark.proves("R45")
async def test_a_tenant_has_so_many_live_models():
    async with open_face(limits={"max_models": 2}) as face:
        session_id = await face.session()
        for index in range(2):
            await face.model(session_id, model_seq_id=index)
        third = {"session_id": session_id, "model_seq_id": 2, "base_model": BASE}
        refused = await face.post("/create_model", third)
        assert (refused.status_code, refused.json()["reason"]) == (429, "resource_quota_exceeded")
        await face.model(session_id, model_seq_id=0)  # a repeat is no new model
        await face.ok("/unload_model", {"model_id": f"{session_id}:train:0"})
        await face.ok("/create_model", third)


async def test_get_info_answers_from_the_catalog(face: Face):
    model_id = await face.model()
    info = await face.ok("/get_info", {"model_id": model_id, "type": "get_info"})
    assert info["model_id"] == model_id
    assert info["model_data"] == {"model_name": BASE, "tokenizer_id": BASE}
    assert (info["is_lora"], info["lora_rank"]) == (True, 8)
    assert (await face.post("/get_info", {"model_id": "nope"})).status_code == 404


@pytest.mark.parametrize("compressed", [False, True])
async def test_a_protobuf_pass_is_queued(face: Face, compressed):
    model_id = await face.model()
    body = request(model_id, 1).SerializeToString()
    headers = {"content-encoding": "zstd"} if compressed else {}
    response = await send(face, zstandard.compress(body) if compressed else body, **headers)
    assert response.status_code == 200, response.text
    await face.run(model_id, 0)
    ((entry, command),) = await face.take(model_id, 1)
    assert entry.rid == response.json()["request_id"]
    assert entry.tokens == 2
    assert command == wire.decode_forward_backward(body).compute
    assert command.backward


async def test_a_forward_pass_by_flag_and_by_its_own_url(face: Face):
    model_id = await face.model()
    assert (await send(face, request(model_id, 1, forward_only=True).SerializeToString())).status_code == 200
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": {"data": [1, 2], "dtype": "int64"}}}
    old = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None}
    await face.ok("/forward", {"forward_input": old, "model_id": model_id, "seq_id": 2})
    await face.ok("/forward_backward", {"forward_backward_input": old, "model_id": model_id, "seq_id": 3})
    await face.run(model_id, 0)
    commands = [command for _, command in await face.take(model_id, 1)]
    assert [command.kind for command in commands] == [Kind.FORWARD, Kind.FORWARD, Kind.FORWARD_BACKWARD]
    assert isinstance(commands[0], Compute)
    assert commands[0] == commands[1]


@pytest.mark.proves("R31")
async def test_a_repeat_finds_its_promise_however_it_is_encoded(face: Face):
    model_id = await face.model()
    body = request(model_id, 1).SerializeToString()
    first = (await send(face, body)).json()
    assert (await send(face, zstandard.compress(body), **{"content-encoding": "zstd"})).json() == first
    other = await send(face, request(model_id, 1, ids=(3, 4)).SerializeToString())
    assert (other.status_code, other.json()["reason"]) == (400, "request_rejected")


@pytest.mark.proves("R28")
@pytest.mark.parametrize(
    ("message", "names"),
    [
        (lambda model_id: request(model_id, 1, loss_fn="astrology"), "loss_fn"),
        (lambda model_id: request(model_id, 1, loss_fn="importance_sampling"), "'logprobs'"),
        (lambda model_id: request(model_id, 1, loss_fn="stable_reinforce"), "use cispo or ppo"),
        (lambda model_id: request(model_id, 1, loss_fn="dpo"), "not implemented; use one of cispo"),
        (lambda model_id: request(model_id, 1, ids=(1, 500)), "[0, 100)"),
        (lambda model_id: request(model_id, 1, ids=tuple([1] * 65)), "context of 64"),
        (lambda model_id: pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy"), "data"),
        (lambda model_id: pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, data=[pb.Datum()] * 4097), "4096 datums"),
    ],
)
async def test_a_refused_pass_is_a_failed_future_that_takes_its_turn(face: Face, message, names):
    model_id = await face.model()
    body = message(model_id).SerializeToString()
    before = await face.lanes.lane(model_id)
    refused = await send(face, body)
    after = await face.lanes.lane(model_id)
    assert (after.num_pending, after.held_bytes) == (before.num_pending, before.held_bytes)
    failure = await failure_of(face, refused)
    assert failure["category"] == "user"
    assert names in failure["error"]
    assert (await send(face, body)).json() == refused.json()  # a repeat is the same promise
    await face.ok("/optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    await face.run(model_id, 0)
    assert [entry.seq for entry, _ in await face.take(model_id, 1)] == [2]


@pytest.mark.proves("R28")
async def test_numbers_that_no_json_has_cost_no_turn_of_the_next_request(face: Face):
    """Old SDKs write NaN; a body refused for it as a whole would leave a hole."""
    model_id = await face.model()
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": math.nan}}
    body = json.dumps(step).encode()
    assert b"NaN" in body
    response = await face.http.post("/api/v1/optim_step", content=body, headers={"content-type": "application/json"})
    assert "adam_params.learning_rate" in (await failure_of(face, response))["error"]


@pytest.mark.proves("R28")
async def test_a_body_that_is_too_large_is_refused_by_its_head(face: Face, monkeypatch):
    monkeypatch.setattr("tinsmith.gateway.bodies.MAX_WIRE", 200_000)
    model_id = await face.model()
    body = request(model_id, 1, ids=tuple([1] * 40_000)).SerializeToString()

    async def parts():
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    response = await face.http.post("/api/v1/forward_backward", content=parts(), headers=PROTOBUF)
    assert "200000 bytes" in (await failure_of(face, response))["error"]


@pytest.mark.proves("R28")
async def test_a_zstd_bomb_is_refused_by_its_head(face: Face):
    model_id = await face.model()
    body = zstandard.compress(request(model_id, 1).SerializeToString() + bytes(70 * 1024 * 1024))
    failure = await failure_of(face, await send(face, body, **{"content-encoding": "zstd"}))
    assert "decompressed" in failure["error"]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 422),
        (b"\xff\xff", {}, 400),
        (b"no zstd", {"content-encoding": "zstd"}, 400),
        (b"{", {"content-type": "application/json"}, 400),
        (b"[" * 40 + b"]" * 40, {"content-type": "application/json"}, 413),
        (b"[1]", {"content-type": "application/json"}, 422),
    ],
)
async def test_a_body_that_tells_nothing_is_refused_outright(face: Face, body, headers, status):
    response = await send(face, body, **headers)
    assert response.status_code == status
    assert response.json()["detail"]


async def test_an_unknown_encoding_is_refused_by_its_head(face: Face):
    model_id = await face.model()
    response = await send(face, request(model_id, 1).SerializeToString(), **{"content-encoding": "br"})
    assert "Content-Encoding" in (await failure_of(face, response))["error"]


async def test_a_model_that_is_not_there_is_404_and_leaves_nothing(face: Face):
    response = await send(face, request("nope:train:0", 1, loss_fn="astrology").SerializeToString())
    assert (response.status_code, response.json()["reason"]) == (404, "resource_not_found")


@pytest.mark.parametrize("seq_id", [0, -1, None, "1", True, 2**31, 10**30])
async def test_a_turn_needs_a_number_from_1(face: Face, seq_id):
    model_id = await face.model()
    answer = await face.post("/optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
    assert (answer.status_code, "seq_id" in answer.json()["detail"]) == (422, True)


@pytest.mark.proves("R69")
@pytest.mark.parametrize("params", [{}, {"adam_params": None}, {"adam_params": {}}, {"adam_params": {"beta1": None}}])
async def test_an_optim_step_has_the_defaults_of_the_wire(face: Face, params):
    model_id = await face.model()
    await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1} | params)
    await face.run(model_id, 0)
    ((_, command),) = await face.take(model_id, 1)
    assert command == OptimStep(optimizer=AdamParams())


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate"),
        ({"adam_params": {"learning_rate": "fast"}}, "adam_params.learning_rate"),
        ({"adam_params": {"beta1": 1}}, "adam_params.beta1"),
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "optimizer_params.type"),
    ],
)
async def test_a_refused_optim_step_names_the_field(face: Face, params, names):
    model_id = await face.model()
    response = await face.post("/optim_step", {"model_id": model_id, "seq_id": 1} | params)
    assert names in (await failure_of(face, response))["error"]


async def test_what_is_to_be_sent_again_takes_no_turn():
    async with open_face(LaneLimits(max_pending=1)) as face:
        model_id = await face.model()
        step = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
        refused = await face.post("/optim_step", step)
        assert (refused.status_code, refused.json()["reason"]) == (429, "resource_quota_exceeded")
        await face.run(model_id, 0)
        await face.ok("/optim_step", step)


async def test_unload_closes_the_model_and_its_promise_resolves(face: Face):
    model_id = await face.model()
    step = await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    promise = await face.ok("/unload_model", {"model_id": model_id})
    assert await face.ok("/unload_model", {"model_id": model_id}) == promise
    assert (await face.retrieve(promise["request_id"])).json() == {"model_id": model_id, "type": "unload_model"}
    failed = (await face.retrieve(step["request_id"])).json()
    assert (failed["category"], "unloaded" in failed["error"]) == ("user", True)
    assert (await face.post("/optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})).status_code == 410


async def test_custom_losses_are_the_clients(face: Face):
    answer = await face.post("/create_custom_loss", {})
    assert (answer.status_code, answer.json()["reason"]) == (400, "endpoint_unavailable")


async def test_a_stream_that_never_ends_is_cut_off(face: Face, monkeypatch):
    monkeypatch.setattr("tinsmith.gateway.bodies.MAX_WIRE", 1000)
    monkeypatch.setattr("tinsmith.gateway.bodies.DRAIN", 2000)
    sent = 0

    async def parts():
        nonlocal sent
        while True:
            sent += 500
            yield bytes(500)

    response = await face.http.post("/api/v1/telemetry", content=parts(), headers={"content-type": "application/json"})
    assert response.status_code == 200
    assert sent <= 3000


@pytest.mark.parametrize(("inline_tokens", "on_loop"), [(1, False), (2, True)])
async def test_a_large_pass_is_treated_as_a_small_one_off_the_loop(face: Face, monkeypatch, inline_tokens, on_loop):
    threads = []

    def checked(*args: object) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        check_compute(*args)

    monkeypatch.setattr("tinsmith.gateway.tinker.training.check_compute", checked)
    monkeypatch.setattr("tinsmith.gateway.submission.INLINE_TOKENS", inline_tokens)
    model_id = await face.model()
    assert (await send(face, request(model_id, 1).SerializeToString())).status_code == 200
    assert threads == [on_loop]
    await face.run(model_id, 0)
    ((entry, command),) = await face.take(model_id, 1)
    assert entry.digest == wire.digest(command)
