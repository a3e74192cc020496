"""What every native route refuses, and that a refusal leaves nothing behind."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.face import INFO, Face, open_face
from tests.unit.gateway.native.bodies import ROUTES, body_of, furnished
from tinsmith.config import ConfigError, GatewayConfig, ServerConfig
from tinsmith.protocol.native import PREFIX

TRAINING = ("/forward", "/forward_backward", "/evaluate", "/train_step")


def test_the_bodies_of_these_tests_are_those_of_the_protocol():
    for path, request in ROUTES.items():
        assert request.model_validate_json(json.dumps(body_of(path))) is not None


@pytest.mark.proves("R38", "R28")
@pytest.mark.parametrize("path", ROUTES)
async def test_an_unknown_field_is_422_on_every_route(face: Face, path):
    names = await furnished(face)
    kept = face.num_kept()
    answer = await face.native(path, body_of(path, names, learning_rte=1))
    assert answer.status_code == 422, answer.text
    assert answer.json()["details"] == ["learning_rte: no such field; leave it out"]
    assert face.num_kept() == kept


@pytest.mark.proves("R39")
@pytest.mark.parametrize("name", ["token", "api_key", "tenant", "x_api_key"])
@pytest.mark.parametrize("path", ROUTES)
async def test_an_identity_in_a_body_is_422_and_not_repeated(face: Face, path, name):
    answer = await face.native(path, body_of(path, {}, **{name: "tml-secret"}))
    assert (answer.status_code, answer.json()["reason"]) == (422, "validation_failed")
    assert "tml-secret" not in answer.text


@pytest.mark.proves("R13", "R19")
async def test_each_fault_has_a_line_of_its_own(face: Face):
    answer = await face.native("/sample", {"seq_id": "1", "sampler_id": 5, "prompt_ids": [True], "no\nsuch": 1})
    payload = answer.json()
    assert (answer.status_code, payload["error_code"], payload["category"], payload["reason"]) == (422, 422, "user", "validation_failed")
    assert [line.partition(":")[0] for line in payload["details"]] == ["sampler_id", "seq_id", "prompt_ids", "no such"]
    assert payload["error"].endswith("(and 1 more)")
    assert payload["traceback"] is None


@pytest.mark.parametrize(
    ("conversations", "details"),
    [
        (
            [{"messages": [{"role": "x", "content": "a"}]}],
            ["conversations.0.messages.0.role: Input should be 'system', 'user', 'assistant' or 'tool'"],
        ),
        ([{"messages": [{"role": "user", "content": "a", "z": 1}]}], ["conversations.0.messages.0.z: no such field; leave it out"]),
        ([{"messages": []}], ["conversations.0.messages: list should have at least 1 item, not 0"]),
        ([], ["conversations: list should have at least 1 item, not 0"]),
        (
            [{"messages": [{"role": "user", "content": "a"}] * 1025}],
            ["conversations.0.messages: list should have at most 1024 items, not 1025"],
        ),
    ],
)
async def test_a_fault_of_an_item_is_not_told_of_its_list_too(face: Face, conversations, details):
    body = {"model_id": "m", "seq_id": 1, "conversations": conversations}
    answer = await face.native("/forward_backward", body)
    assert (answer.status_code, answer.json()["details"]) == (422, details)


@pytest.mark.parametrize(
    ("content", "status", "names"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 422, "body"),
        (b"null", 422, "body"),
        (b'{"tags": ' + b"[" * 40 + b"]" * 40 + b"}", 413, "nesting"),
        (b'{"tags": [' + b"1," * (5 * 1024 * 1024 + 1) + b"1]}", 413, "values"),
    ],
)
async def test_the_bounds_of_a_body_come_before_its_fields(face: Face, content, status, names):
    answer = await face.http.post(f"{PREFIX}/create_session", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, names in answer.json()["error"]) == (status, True), answer.text


async def test_a_body_over_the_byte_bound_is_413(face: Face, monkeypatch):
    monkeypatch.setattr("tinsmith.gateway.bodies.MAX_WIRE", 1000)
    answer = await face.native("/create_session", {"display_name": "x" * 2000})
    assert (answer.status_code, answer.json()["reason"]) == (413, "payload_too_large")


async def test_protobuf_is_for_the_other_face(face: Face):
    answer = await face.http.post(f"{PREFIX}/create_session", content=b"", headers={"content-type": "application/x-protobuf"})
    assert (answer.status_code, "Content-Type" in answer.json()["error"]) == (400, True)


@pytest.mark.proves("R43")
@pytest.mark.parametrize(
    "ids",
    [[1, True], [1, 1.0], [1.5], ["1"], [[1], 2], [1, [2]], [None], [[[[1]]]], {"dtype": "float32", "shape": [1], "data": "AACAPw=="}],
)
async def test_token_ids_are_integers_and_nothing_like_them(face: Face, ids):
    names = await furnished(face)
    for path in TRAINING:
        answer = await face.native(path, body_of(path, names, batch={"input_ids": ids}))
        assert (answer.status_code, "batch.input_ids" in answer.json()["error"]) == (422, True), answer.text


@pytest.mark.proves("R43")
@pytest.mark.parametrize(
    ("batch", "fault"),
    [
        ({"input_ids": [[[1]]]}, "batch.input_ids"),
        ({"input_ids": [1, 2], "inputs": {"target_tokens": [[[2]], [[3]]]}}, "target_tokens"),
        ({"input_ids": [[1, 2]], "inputs": {"target_tokens": [1, 2]}}, "target_tokens"),
        ({"input_ids": [[1, 2]], "inputs": {"target_tokens": [[1, 2], [3, 4]]}}, "target_tokens"),
        ({"input_ids": [[1, 2]], "inputs": {"target_tokens": [[1]]}}, "target_tokens"),
        ({"input_ids": [[1, 2]], "inputs": {"target_tokens": [[[1], [2, 3]]]}}, "target_tokens"),
        ({"input_ids": [[-1]], "inputs": {"target_tokens": [[1]]}}, "token ids"),
        ({"input_ids": [[2**31]], "inputs": {"target_tokens": [[1]]}}, "token ids"),
        ({"input_ids": [[100]], "inputs": {"target_tokens": [[1]]}}, "token ids"),
        ({"input_ids": [[]], "inputs": {"target_tokens": [[]]}}, "no tokens"),
    ],
)
async def test_ranks_and_rows_are_held_to_the_field(face: Face, batch, fault):
    names = await furnished(face)
    answer = await face.native("/forward", body_of("/forward", names, batch=batch))
    assert (answer.status_code, fault in answer.json()["error"]) == (422, True), answer.text


@pytest.mark.proves("R43")
async def test_two_million_ids_are_read_in_one_pass_off_the_loop_and_more_are_refused_by_the_bound():
    async with open_face(base=INFO.model_copy(update={"max_context": 1024})) as face:
        names = await furnished(face)
        longest_ms = await watched(face, "/forward", body_of("/forward", names, loss="infonce", batch={"input_ids": [[1] * 512] * 4096}))
        assert longest_ms < 1000  # of the loop's own turns: this machine may be busy
        refused = await face.native("/forward", body_of("/forward", names, seq_id=2, batch={"input_ids": [[1] * 513] * 4096}))
        assert (refused.status_code, "2097152 elements" in refused.json()["error"]) == (422, True), refused.text


async def watched(face: Face, path: str, body: object) -> float:
    """Send a body that must be accepted; the longest time in ms that the event loop was held meanwhile."""
    content = json.dumps(body).encode()
    longest, is_over = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not is_over:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - began)

    watching = asyncio.create_task(watch())
    answer = await face.http.post(PREFIX + path, content=content, headers={"content-type": "application/json"})
    is_over = True
    await watching
    assert answer.status_code == 200, answer.text
    return 1000 * longest


def numeric_faults() -> Iterator[tuple[str, str, Any]]:
    """(route, field, a value just outside its bounds)."""
    for path in ROUTES:
        body = body_of(path)
        if "seq_id" in body:
            yield from ((path, "seq_id", value) for value in ((-1,) if "sample" in path else (0, -1, 2**31)))
    for path in TRAINING:
        yield from ((path, "micro_batch_tokens", value) for value in (0, -1, 2**31))
    yield from (("/create_model", "model_seq", value) for value in (-1, 2**31))
    yield from (("/create_sampler", "sampler_seq", value) for value in (-1, 2**31))
    yield from (("/publish_sampler_weights", "sampler_seq", value) for value in (-1, 2**31))
    for path in ("/save_weights", "/publish_sampler_weights"):
        yield from ((path, "ttl_s", value) for value in (0, 3599, 10 * 365 * 24 * 3600 + 1))
    yield from (("/create_model", "lora.rank", value) for value in (0, 513))
    yield from (("/create_model", "lora.seed", value) for value in (-1, 2**63))
    yield from (("/create_model", "schedule.warmup_steps", value) for value in (-1,))
    yield from (("/create_model", "schedule.total_steps", value) for value in (0,))
    yield from (("/create_model", "schedule.final_fraction", value) for value in (-0.1, 1.1))
    for path in ("/create_model", "/optim_step", "/train_step"):
        for field, values in OPTIMIZER_FAULTS.items():
            yield from ((path, f"optimizer.{field}", value) for value in values)
    for path in ("/sample", "/sample_stream"):
        yield from ((path, "num_samples", value) for value in (0, 1025))
        yield from ((path, "topk_prompt_logprobs", value) for value in (-1, 1025))
        for field, values in SAMPLING_FAULTS.items():
            yield from ((path, f"sampling.{field}", value) for value in values)


OPTIMIZER_FAULTS: dict[str, tuple[float, ...]] = {
    "learning_rate": (-1e-9,),
    "beta1": (-0.1, 1.0),
    "beta2": (-0.1, 1.0),
    "eps": (0.0, -1e-9),
    "weight_decay": (-0.1,),
    "max_grad_norm": (0.0, -1.0),
}
SAMPLING_FAULTS: dict[str, tuple[float, ...]] = {
    "max_tokens": (0, -1, 2**31),
    "temperature": (-0.1,),
    "top_k": (-2, 2**31),
    "top_p": (0.0, -0.1, 1.01),
    "seed": (-1, 2**63),
}


@pytest.mark.proves("R48", "R28")
async def test_every_numeric_bound_is_a_422_that_names_the_field(face: Face):
    names = await furnished(face)
    kept = face.num_kept()
    for path, field, value in numeric_faults():
        body = body_of(path, names)
        *parents, leaf = field.split(".")
        node = body
        for parent in parents:
            node[parent] = node = dict(node.get(parent, {}))
        node[leaf] = value
        if field == "sampler_seq" and path == "/publish_sampler_weights":
            del body["name"]
        answer = await face.native(path, body)
        named = answer.json()["details"][0].partition(":")[0].replace(".adamw", "")
        assert (answer.status_code, named) == (422, field), (path, field, value, answer.text)
    assert face.num_kept() == kept


@pytest.mark.proves("R48")
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", '"0.1"', "true"])
async def test_a_number_is_finite_and_no_text(face: Face, value):
    names = await furnished(face)
    content = json.dumps(body_of("/sample", names, sampling={"temperature": "HERE"})).replace('"HERE"', value)
    answer = await face.http.post(f"{PREFIX}/sample", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, "temperature" in answer.json()["error"]) == (422, True), answer.text


@pytest.mark.proves("R50")
async def test_no_header_and_no_field_of_the_configuration_relaxes_parsing(face: Face):
    names = await furnished(face)
    body = body_of("/optim_step", names, seq_id="1", extra=1)
    for name in ("x-lenient", "x-strict", "x-client-version", "user-agent", "prefer", "accept-version"):
        answer = await face.http.post(f"{PREFIX}/optim_step", json=body, headers={name: "false"})
        assert (answer.status_code, len(answer.json()["details"])) == (422, 2)
    with pytest.raises(ConfigError, match="no such field"):
        await open_face(gateway={"strict": False}).__aenter__()
    assert not [name for name in (*GatewayConfig.model_fields, *ServerConfig.model_fields) if "strict" in name or "lenient" in name]


ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    2**63,
    10**400,
    1.5,
    "",
    "x" * 3000,
    "\x00\n",
    "é\U0001f600",
    "../../etc",
    [],
    {},
    [[]],
    {"a": None},
)


def odd_ones(body: Any) -> Iterator[Any]:
    """The body with one of its parts replaced, for each part and each odd value."""
    yield from ODD
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, part in items:
        for odd in odd_ones(part):
            changed = body.copy()
            changed[key] = odd
            yield changed


@pytest.mark.proves("R13", "R15", "R28")
@pytest.mark.parametrize("path", [path for path in ROUTES if path not in ("/retrieve_future", "/retrieve_futures", "/sample_stream")])
async def test_odd_bodies_are_answers_or_refusals_that_leave_nothing(path):
    async with open_face(execution={"inline_wait_s": 0, "long_poll_s": 1}) as face:
        names = await furnished(face)
        for odd in odd_ones(body_of(path, names)):
            kept = face.num_kept()
            answer = await face.http.post(PREFIX + path, content=json.dumps(odd), headers={"content-type": "application/json"})
            assert answer.status_code < 500, (odd, answer.text)
            if answer.status_code != 200:
                payload = answer.json()
                assert face.num_kept() == kept, (odd, answer.text)
                assert (payload["error"] != "", payload["error_code"], payload["category"]) == (True, answer.status_code, "user"), odd
                assert not any(secret in answer.text for secret in (INFO.path, "Traceback"))
