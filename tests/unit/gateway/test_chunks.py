"""Chunks that are no text: every way into the server refuses them by their place, and nothing is queued without them."""

import pytest

from tests.fakes.face import Face
from tests.unit.gateway.test_sampling import body_of, sampler
from tests.unit.gateway.test_training import failure_of, request, send
from tinsmith.protocol import tinker_pb2 as pb

TEXT = {"type": "encoded_text", "tokens": [1]}
JSON_CHUNKS = {
    "image": {"type": "image", "data": "no base64 at all", "format": "png", "expected_tokens": 4},
    "image_asset_pointer": {"type": "image_asset_pointer", "location": "https://example.org/cat.png", "format": "png"},
    "dmel": {"type": "dmel", "dmel": "no base64 at all"},
}
BINARY_CHUNKS = {
    "image": pb.Chunk(image=pb.ImageChunk(data=b"no image at all", format="png")),
    "dmel": pb.Chunk(dmel=pb.DmelChunk(dmel=b"nothing at all")),
}


@pytest.mark.parametrize("kind", JSON_CHUNKS)
async def test_a_sample(face: Face, kind: str):
    body = body_of(await sampler(face), prompt={"chunks": [TEXT, JSON_CHUNKS[kind]]})
    answer = await face.post("/asample", body)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(f"prompt.chunks[1]: {kind} chunks need")
    assert "send encoded_text chunks" in answer.json()["detail"]
    assert await face.take_samples() == []


@pytest.mark.parametrize("kind", JSON_CHUNKS)
async def test_a_pass_as_json(face: Face, kind: str):
    model_id = await face.model()
    datum = {"model_input": {"chunks": [TEXT, JSON_CHUNKS[kind]]}, "loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64"}}}
    inner = {"data": [datum], "loss_fn": "cross_entropy"}
    answer = await face.post("/forward_backward", {"model_id": model_id, "seq_id": 1, "forward_backward_input": inner})
    failure = await failure_of(face, answer)
    assert failure["category"] == "user"
    assert failure["error"].startswith(f"data[0].model_input.chunks[1]: {kind} chunks need")


@pytest.mark.parametrize("kind", BINARY_CHUNKS)
async def test_a_pass_as_protobuf(face: Face, kind: str):
    model_id = await face.model()
    message = request(model_id, 1)
    message.data[0].model_input.append(BINARY_CHUNKS[kind])
    failure = await failure_of(face, await send(face, message.SerializeToString()))
    assert failure["category"] == "user"
    assert failure["error"].startswith(f"data[0].model_input.chunks[1]: {kind} chunks need")
