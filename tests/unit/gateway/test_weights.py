"""Checkpoints at the face."""

import pytest

from tests.fakes.face import BASE, Face
from tests.unit.gateway.test_training import failure_of
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord
from tinsmith.protocol.training import LoadWeights, LoraConfig, SaveWeights, SaveWeightsForSampler
from tinsmith.state.catalog import checkpoint_write


async def queued(face: Face, model_id: str):
    await face.run(model_id, 0)
    ((_, command),) = await face.take(model_id, 1)
    return command


async def keep(face: Face, **changes: object) -> CheckpointRecord:
    """A checkpoint in the catalog."""
    fields: dict[str, object] = {
        "tenant": "local",
        "session_id": "s",
        "run_id": "s:train:0",
        "kind": CheckpointKind.TRAINING,
        "name": "n",
        "artifact": "the-artifact",
        "base_model": BASE,
        "lora": LoraConfig(rank=8, seed=5),
        "created_ms": 0,
        "size_bytes": 1,
    }
    record = CheckpointRecord.model_validate(fields | changes)
    write = checkpoint_write(record)
    assert write.value is not None
    await face.store.put(write.table, write.id, write.value)
    return record


async def test_save_weights(face: Face):
    model_id = await face.model()
    body = {"model_id": model_id, "seq_id": 1, "path": "step-1", "overwrite": True, "ttl_seconds": 3600, "user_metadata": {"k": "v"}}
    await face.ok("/save_weights", body)
    assert await queued(face, model_id) == SaveWeights(name="step-1", overwrite=True, ttl_seconds=3600, user_metadata={"k": "v"})


@pytest.mark.proves("R69")
async def test_save_weights_with_nulls(face: Face):
    model_id = await face.model()
    await face.ok("/save_weights", {"model_id": model_id, "seq_id": 1, "path": "n", "overwrite": None, "ttl_seconds": None})
    assert await queued(face, model_id) == SaveWeights(name="n")


async def test_save_for_a_sampler_named_and_ephemeral(face: Face):
    model_id = await face.model()
    await face.ok("/save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "path": "n"})
    await face.ok("/save_weights_for_sampler", {"model_id": model_id, "seq_id": 2, "sampling_session_seq_id": 4, "kind": "snapshot"})
    await face.run(model_id, 0)
    await face.run(model_id, 1)
    ((_, command),) = await face.take(model_id, 2)
    session_id = model_id.partition(":")[0]
    assert command == SaveWeightsForSampler(sampling_session_id=f"{session_id}:sample:4")


async def test_an_inflight_save_says_so(face: Face):
    model_id = await face.model()
    await face.ok("/save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 4, "kind": "inflight"})
    sampler_id = f"{model_id.partition(':')[0]}:sample:4"
    assert await queued(face, model_id) == SaveWeightsForSampler(sampling_session_id=sampler_id, mode="inflight")


@pytest.mark.parametrize(
    ("route", "fields", "names"),
    [
        ("/save_weights", {}, "path: missing"),
        ("/save_weights", {"path": "../etc"}, "path"),
        ("/save_weights", {"path": "a/b"}, "path"),
        ("/save_weights", {"path": "n", "ttl_seconds": 60}, "ttl_seconds"),
        ("/save_weights_for_sampler", {}, "path, sampling_session_seq_id"),
        ("/save_weights_for_sampler", {"path": "n", "sampling_session_seq_id": 1}, "path, sampling_session_seq_id"),
        ("/save_weights_for_sampler", {"sampling_session_seq_id": -1}, "sampling_session_seq_id"),
        ("/save_weights_for_sampler", {"sampling_session_seq_id": 1, "kind": "frozen"}, "kind"),
        ("/save_weights_for_sampler", {"path": "n", "kind": "inflight"}, "kind"),
        ("/save_weights_external", {}, "path"),
        ("/save_weights_external", {"path": "../n"}, "path"),
        ("/save_weights_external", {"path": "n", "ttl_seconds": 60}, "ttl_seconds"),
        ("/save_weights_external", {"path": "n", "age_encryption_recipients": ["age1xyz"]}, "age_encryption_recipients"),
        ("/load_weights", {"path": "file:///etc/passwd"}, "path"),
        ("/load_weights", {"path": "tinker://s:train:0/weights/none"}, "unknown"),
        ("/load_weights", {}, "path"),
    ],
)
@pytest.mark.proves("R28")
async def test_refusals_name_the_field(face: Face, route, fields, names):
    model_id = await face.model()
    failure = await failure_of(face, await face.post(route, {"model_id": model_id, "seq_id": 1} | fields))
    assert failure["category"] == "user"
    assert names in failure["error"]


async def test_load_into_a_model_names_the_artifact(face: Face):
    held = await keep(face)
    model_id = await face.model()
    await face.ok(
        "/load_weights", {"model_id": model_id, "seq_id": 1, "path": held.path, "optimizer": True, "weights_access_token": "tml-x"}
    )
    assert await queued(face, model_id) == LoadWeights(path=held.path, artifact="the-artifact", optimizer=True)


async def test_load_into_a_new_model_takes_its_shape_from_the_checkpoint(face: Face):
    held = await keep(face, lora=LoraConfig(rank=16, seed=5, train_mlp=False))
    session_id = await face.session()
    body = {"session_id": session_id, "model_seq_id": 2, "path": held.path, "optimizer": False}
    promise = await face.ok("/load_weights", body)
    assert await face.ok("/load_weights", body) == promise
    model_id = f"{session_id}:train:2"
    ((_, command),) = await face.take(model_id)
    assert command == LoadWeights(path=held.path, artifact="the-artifact", optimizer=False, lora=held.lora)
    assert (await face.services.catalog.model("local", model_id)).lora == held.lora


@pytest.mark.parametrize(
    ("checkpoint", "body", "names"),
    [
        ({"kind": CheckpointKind.SAMPLER}, {}, "sampler_weights"),
        ({"kind": CheckpointKind.EXTERNAL}, {}, "external_weights"),
        ({"base_model": "org/other"}, {}, "org/other"),
        ({"lora": LoraConfig(rank=16, seed=0)}, {}, "LoRA"),
        ({"expires_ms": 1_000_000}, {}, "expired"),
        ({}, {"base_model": "org/other"}, "base_model"),
        ({}, {"optimizer_config": {"type": "dimuon"}}, "optimizer_config"),
    ],
)
async def test_a_checkpoint_that_does_not_fit_is_refused(face: Face, checkpoint, body, names):
    held = await keep(face, **checkpoint)
    model_id = await face.model()
    response = await face.post("/load_weights", {"model_id": model_id, "seq_id": 1, "path": held.path} | body)
    assert names in (await failure_of(face, response))["error"]


async def test_load_without_an_address_is_refused(face: Face):
    answer = await face.post("/load_weights", {"path": "tinker://s:train:0/weights/n", "optimizer": True})
    assert (answer.status_code, "session_id" in answer.json()["detail"]) == (422, True)


async def test_weights_info(face: Face):
    held = await keep(face, lora=LoraConfig(rank=16, seed=5, train_mlp=False))
    info = await face.ok("/weights_info", {"tinker_path": held.path})
    assert (info["base_model"], info["is_lora"], info["lora_rank"]) == (BASE, True, 16)
    assert (info["train_mlp"], info["train_attn"], info["train_unembed"]) == (False, True, True)
    assert (await face.post("/weights_info", {"tinker_path": "tinker://x/weights/y"})).status_code == 404
    assert (await face.post("/weights_info", {"tinker_path": "x"})).status_code == 422


async def test_what_the_store_cannot_take_now_is_no_refusal(face: Face, monkeypatch):
    model_id = await face.model()

    async def away(*_: object) -> None:
        raise StateContention("the store is away")

    monkeypatch.setattr(face.store, "now_ms", away)
    held = {"model_id": model_id, "seq_id": 1, "path": (await keep(face, expires_ms=10**15)).path}
    assert (await face.post("/load_weights", held)).status_code == 503
