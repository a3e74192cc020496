"""Models under /v1."""

import pytest

from tests.fakes.face import BASE, Face, open_face
from tests.unit.gateway.openai.scene import CHAT, Scene
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord

OTHER = "another"


async def sampler_checkpoint(face: Face, **changes: object) -> CheckpointRecord:
    return await keep(face, **({"kind": CheckpointKind.SAMPLER} | changes))


async def listed(face: Face) -> list[str]:
    answer = (await face.http.get("/v1/models")).json()
    assert answer["object"] == "list"
    return [model["id"] for model in answer["data"]]


async def test_base_models_and_own_sampler_checkpoints_are_listed() -> None:
    async with open_face() as face:
        held = await sampler_checkpoint(face, created_ms=5_500)
        await keep(face)
        await sampler_checkpoint(face, name="old", expires_ms=999_999)
        await sampler_checkpoint(face, name="elsewhere", base_model="org/other")
        await sampler_checkpoint(face, tenant=OTHER, run_id="o:train:0")
        assert await listed(face) == [BASE, held.path]
        answer = await face.http.get(f"/v1/models/{held.path}")
        assert answer.json() == {
            "id": held.path,
            "object": "model",
            "created": 5,
            "owned_by": "you",
            "root": held.path,
            "parent": BASE,
            "max_model_len": 64,
        }
        assert (await face.http.get(f"/v1/models/{BASE}")).json()["owned_by"] == "tinsmith"
        assert (await face.http.get(f"/v1/models/{BASE.replace('/', '%2F')}")).json()["id"] == BASE


async def test_what_others_have_published_is_listed_until_it_is_saved_anew() -> None:
    async with open_face() as face:
        held = await sampler_checkpoint(face, tenant=OTHER, run_id="o:train:0")
        await face.services.publications.publish(held)
        assert await listed(face) == [BASE, held.path]
        assert (await face.http.get(f"/v1/models/{held.path}")).json()["owned_by"] == "another tenant"
        await sampler_checkpoint(face, tenant=OTHER, run_id="o:train:0", artifact="a-newer-one")
        assert await listed(face) == [BASE]
        assert (await face.http.get(f"/v1/models/{held.path}")).status_code == 404


@pytest.mark.parametrize("kind", list(CheckpointKind))
async def test_a_sampler_checkpoint_is_sampled_by_its_path(scene: Scene, kind: CheckpointKind) -> None:
    held = await keep(scene.face, kind=kind)
    if kind is CheckpointKind.SAMPLER:
        sample = await scene.asked("/chat/completions", model=held.path, messages=CHAT)
        assert sample.adapter == "the-artifact"
        return
    refused = await scene.post("/chat/completions", model=held.path, messages=CHAT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


UNKNOWN = ["org/none", "tinker://s:train:9/sampler_weights/n", "tinker://x", "tinker://o:train:0/sampler_weights/n"]


@pytest.mark.parametrize("name", UNKNOWN)
async def test_unknown_malformed_and_foreign_models_are_the_same_404(scene: Scene, name: str) -> None:
    await sampler_checkpoint(scene.face, tenant=OTHER, run_id="o:train:0")
    kept = scene.face.num_kept()
    for response in (
        await scene.face.http.get(f"/v1/models/{name}"),
        await scene.post("/completions", model=name, prompt=[5]),
        await scene.post("/chat/completions", model=name, messages=CHAT),
    ):
        assert response.status_code == 404
        assert response.json()["error"] == {
            "message": f"model: {name!r} does not exist, or is not yours; GET /v1/models lists those that you may use",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    assert scene.face.num_kept() == kept
