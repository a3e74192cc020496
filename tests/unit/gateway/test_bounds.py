"""Each bound of a body on the Tinker wire, passed by one: refused by the bound's name, before anything large is built."""

import json
import sys

import pytest
import zstandard

from tests.fakes.face import BASE, Face
from tests.fuzz.seeds import protobuf_pass
from tests.unit.gateway.test_sampling import body_of, sampler
from tests.unit.gateway.test_training import failure_of
from tinsmith.gateway.openai.bodies import MAX_CHOICES
from tinsmith.protocol.sampling import MAX_NUM_SAMPLES, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOP_K
from tinsmith.protocol.wire_bounds import MAX_CONFIG, MAX_DEPTH, MAX_RANK, MAX_ZSTD_WINDOW, MIB

JSON = {"content-type": "application/json"}
ZSTD = {**JSON, "content-encoding": "zstd"}
SPARSE = {"dtype": "int64", "data": [2, 3], "shape": [2, 4], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 3]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_samples": MAX_NUM_SAMPLES + 1}, "num_samples"),
        ({"topk_prompt_logprobs": MAX_TOP_K + 1}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": MAX_TOP_K + 1}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": MAX_TOP_K + 1}, "prompt_alt_tokens_k"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 2**70}}, "sampling_params.max_tokens"),
        (
            {"sampling_params": {"stop": ["a"] * (MAX_STOPS + 1)}},
            f"sampling_params.stop: {MAX_STOPS + 1} entries, the bound is {MAX_STOPS}",
        ),
        ({"sampling_params": {"stop": list(range(MAX_STOPS + 1))}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": ["a" * (MAX_STOP_CHARACTERS + 1)]}}, "sampling_params.stop"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2**40, 2**40]}}, "target_prompt_logprobs"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x", "format": "png", "height": 10**6, "width": 10**6}]}}, "prompt.chunks[0]"),
    ],
)
async def test_a_sample_over_a_bound_is_refused(face: Face, changes: dict[str, object], named: str) -> None:
    sampler_id = await sampler(face)
    held = face.num_kept()
    answer = await face.post("/asample", body_of(sampler_id, **changes))
    assert (answer.status_code, answer.json()["reason"]) == (422, "validation_failed")
    assert answer.json()["detail"].startswith(named)
    assert face.num_kept() == held


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"shape": [2**62, 2**62]}, "shape"),
        ({"shape": [2, -4]}, "shape"),
        ({"shape": [1] * (MAX_RANK + 1)}, "shape"),
        ({"sparse_crow_indices": [0, 2, 1]}, "row pointers"),
        ({"sparse_crow_indices": [0, 2]}, "row pointers"),
        ({"sparse_crow_indices": [1, 1, 2]}, "row pointers"),
        ({"sparse_col_indices": [0, 4]}, "column indices"),
        ({"sparse_col_indices": [-1, 0]}, "column indices"),
    ],
)
async def test_a_tensor_over_a_bound_is_a_future_that_failed(face: Face, tensor: dict[str, object], says: str) -> None:
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": SPARSE | tensor}}
    model_id = await face.model()
    asked = {"model_id": model_id, "seq_id": 1, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
    failure = (await failure_of(face, await face.post("/forward_backward", asked)))["error"]
    assert failure.startswith(("data[0].loss_fn_inputs.target_tokens", "forward_backward_input.data.0.loss_fn_inputs.target_tokens"))
    assert says in failure


async def test_the_config_of_a_loss_has_a_bound(face: Face) -> None:
    config = {f"k{number}": 1.0 for number in range(MAX_CONFIG + 1)}
    asked = {"forward_backward_input": {"data": [], "loss_fn": "cross_entropy", "loss_fn_config": config}}
    answer = await face.post("/forward_backward", asked | {"model_id": await face.model(), "seq_id": 1})
    assert "loss_fn_config" in (await failure_of(face, answer))["error"]


async def test_an_image_is_never_decoded(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG that says it has 4 G pixels, at a server that cannot import what would open it."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    message = protobuf_pass()
    message.model_id = await face.model()
    header = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x0dIHDR" + (2**16).to_bytes(4) * 2 + b"\x08\x02\0\0\0"
    message.data[0].model_input[0].image.data = header
    body = message.SerializeToString()
    answer = await face.http.post("/api/v1/forward_backward", content=body, headers={"content-type": "application/x-protobuf"})
    assert "model_input.chunks[0]" in (await failure_of(face, answer))["error"]


@pytest.mark.parametrize("path", ["/forward_backward", "/asample", "/create_session", "/retrieve_future"])
async def test_nesting_and_windows_have_bounds_on_every_route(face: Face, path: str) -> None:
    deep = b'{"model_id":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}"
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=(2 * MAX_ZSTD_WINDOW).bit_length() - 1)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    wide_body = wide.compress(json.dumps({"session_id": " " * MIB}).encode()) + wide.flush()
    held = face.num_kept()
    for body, headers, status in ((deep, JSON, 413), (wide_body, ZSTD, 400)):
        answer = await face.http.post(f"/api/v1{path}", content=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert ";" in answer.json()["detail"]
    assert face.num_kept() == held


async def test_the_choices_of_a_completion_have_a_bound(face: Face) -> None:
    for path in ("completions", "chat/completions"):
        body = {"model": BASE, "n": MAX_CHOICES + 1, "prompt": [1], "messages": [{"role": "user", "content": "x"}]}
        body.pop("messages" if path == "completions" else "prompt")
        answer = await face.http.post(f"/v1/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
