"""Sessions, models and samplers of the native protocol: their life, their look-up, their quota."""

import asyncio

import pytest

from tests.fakes.face import BASE, Face, open_face
from tests.unit.gateway.native.bodies import body_of, furnished
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.sessions import CheckpointKind, SamplerRecord
from tinsmith.protocol.training import AdamParams, CreateModel, LoadWeights, LoraConfig, LrSchedule, SgdParams
from tinsmith.state.quotas import MODEL_LEASE_MS


async def test_a_session_from_its_creation_to_its_end(face: Face):
    made = await face.native_ok("/create_session", body_of("/create_session"))
    assert (made["tags"], made["metadata"], made["project_id"], made["display_name"]) == (["a"], {"k": "v"}, "p", "d")
    held = {"session_id": made["session_id"]}
    assert await face.native_get(f"/sessions/{made['session_id']}") == made
    face.advance(1000)
    assert await face.native_ok("/heartbeat", held) == made
    assert (await face.services.catalog.beats("local"))[made["session_id"]] == made["created_ms"] + 1000
    ended = await face.native_ok("/end_session", held | {"reason": "interrupted"})
    assert (ended["ended_ms"], ended["end_reason"]) == (face.clock[0], "interrupted")
    assert await face.native_ok("/end_session", held) == ended
    gone = await face.native("/heartbeat", held)
    assert (gone.status_code, gone.json()["reason"]) == (410, "session_ended")
    assert (await face.native_get("/sessions"))["sessions"] == [ended]


async def test_a_model_is_made_by_entry_zero_of_its_lane(face: Face):
    session_id = (await face.native_ok("/create_session", {}))["session_id"]
    envelope = await face.native_ok("/create_model", {"session_id": session_id, "model_seq": 0, "base_model": BASE, "metadata": {"a": "b"}})
    model_id = f"{session_id}:train:0"
    ((entry, command),) = await face.take(model_id)
    assert (entry.seq, entry.rid, isinstance(command, CreateModel)) == (0, envelope["request_id"], True)
    info = await face.native_get(f"/models/{model_id}")
    assert (info["lora_rank"], info["metadata"], info["optimizer"], info["next_seq"]) == (32, {"a": "b"}, None, 1)
    await face.native_ok("/optim_step", {"model_id": model_id, "seq_id": 1})
    assert (await face.native_get(f"/models/{model_id}"))["next_seq"] == 2
    assert (await face.native_get("/models"))["models"] == [info | {"next_seq": None}]


async def test_without_a_seed_it_follows_from_the_request(face: Face):
    names = await furnished(face)
    ((_, command),) = await face.take(names["MODEL"])
    assert isinstance(command, CreateModel)
    await face.native_ok("/create_model", {"session_id": names["SESSION"], "model_seq": 1, "base_model": BASE, "lora": {"rank": 8}})
    ((_, other),) = await face.take(f"{names['SESSION']}:train:1")
    assert isinstance(other, CreateModel)
    assert command.lora.seed != other.lora.seed


@pytest.mark.proves("R31")
async def test_a_repeated_creation_is_the_same_one_and_another_is_refused(face: Face):
    names = await furnished(face)
    body = body_of("/create_model", names)
    first, second = await asyncio.gather(face.native_ok("/create_model", body), face.native_ok("/create_model", body))
    assert first["request_id"] == second["request_id"]
    other = await face.native("/create_model", body | {"lora": {"rank": 16, "seed": 5}})
    assert (other.status_code, other.json()["reason"]) == (400, "request_rejected")


async def test_a_model_on_a_checkpoint_takes_from_it_what_the_request_leaves_open(face: Face):
    schedule = LrSchedule(warmup_steps=3)
    held = await keep(face, optimizer=SgdParams(momentum=0.5), schedule=schedule)
    model_id = await face.native_model(base_model=None, lora=None, checkpoint=held.path, load_optimizer=True)
    ((_, command),) = await face.take(model_id)
    assert command == LoadWeights(path=held.path, artifact="the-artifact", optimizer=True, lora=LoraConfig(rank=8, seed=5))
    record = await face.services.catalog.model("local", model_id)
    assert (record.base_model, record.optimizer, record.schedule) == (BASE, SgdParams(momentum=0.5), schedule)


async def test_a_model_on_a_checkpoint_may_have_settings_of_its_own(face: Face):
    held = await keep(face, optimizer=SgdParams())
    model_id = await face.native_model(lora=None, checkpoint=held.path, optimizer={"type": "adamw"}, schedule={"warmup_steps": 1})
    record = await face.services.catalog.model("local", model_id)
    assert (record.optimizer, record.schedule) == (AdamParams(eps=1e-8), LrSchedule(warmup_steps=1))


@pytest.mark.parametrize(
    ("changes", "status", "fault"),
    [
        ({"base_model": "org/other"}, 404, "is not served"),
        ({"base_model": None}, 422, "base_model, checkpoint"),
        ({"session_id": "nobody"}, 404, "unknown"),
        ({"load_optimizer": True}, 422, "load_optimizer"),
        ({"lora": {"train_attn": False, "train_mlp": False, "train_unembed": False}}, 422, "at least one"),
        ({"schedule": {"kind": "linear"}}, 422, "total_steps"),
        ({"metadata": {"k": "x" * 20_000}}, 422, "characters"),
        ({"checkpoint": "nonsense", "lora": None}, 422, "checkpoint"),
        ({"checkpoint": "tinker://s:train:0/weights/n"}, 422, "lora"),
        ({"checkpoint": "tinker://s:train:0/weights/n", "lora": None, "base_model": "org/other"}, 422, "leave base_model out"),
        ({"checkpoint": "tinker://s:train:0/weights/n", "lora": None, "load_optimizer": True}, 422, "state of sgd"),
        ({"checkpoint": "tinker://s:train:0/weights/none", "lora": None}, 404, "unknown"),
    ],
)
@pytest.mark.proves("R28")
async def test_a_refused_creation_leaves_nothing(face: Face, changes, status, fault):
    await keep(face, optimizer=SgdParams())
    names = await furnished(face)
    kept = face.num_kept()
    answer = await face.native("/create_model", body_of("/create_model", names, **changes))
    assert (answer.status_code, fault in answer.json()["error"]) == (status, True), answer.text
    assert face.num_kept() == kept


async def test_unload_closes_the_model(face: Face):
    names = await furnished(face)
    pending = (await face.native_ok("/optim_step", body_of("/optim_step", names)))["request_id"]
    info = await face.native_ok("/unload_model", {"model_id": names["MODEL"]})
    assert info["ended_ms"] == face.clock[0]
    assert await face.native_ok("/unload_model", {"model_id": names["MODEL"]}) == info
    failed = await face.native_ok("/retrieve_future", {"request_id": pending})
    assert (failed["status"], failed["error"]["reason"]) == ("failed", "session_ended")


# The quota of models.


@pytest.mark.proves("R45", "R59")
async def test_the_quota_is_shared_by_both_faces_and_a_refusal_writes_nothing():
    async with open_face(limits={"max_models": 2}) as face:
        await face.native_model()
        await face.model()
        names = {"SESSION": await face.session()}
        kept = face.num_kept()
        answer = await face.native("/create_model", body_of("/create_model", names))
        assert (answer.status_code, answer.json()["reason"]) == (429, "resource_quota_exceeded")
        assert int(answer.headers["retry-after"]) >= 1
        tinker = await face.post("/create_model", {"session_id": names["SESSION"], "model_seq_id": 0, "base_model": BASE})
        assert (tinker.status_code, tinker.json()["reason"]) == (429, "resource_quota_exceeded")
        assert face.num_kept() == kept


@pytest.mark.proves("R59")
async def test_two_gateways_never_both_grant_the_last_unit():
    async with open_face(limits={"max_models": 1}) as face:
        sessions = [await face.session() for _ in range(4)]
        bodies = [body_of("/create_model", {"SESSION": session_id}) for session_id in sessions]
        answers = await asyncio.gather(*(face.native("/create_model", body) for body in bodies))
        assert sorted(answer.status_code for answer in answers) == [200, 429, 429, 429]


@pytest.mark.proves("R59")
async def test_a_repeat_takes_no_second_unit_and_a_refused_creation_gives_its_unit_back(monkeypatch):
    async with open_face(limits={"max_models": 2}) as face:
        names = await furnished(face)
        body = body_of("/create_model", names)
        await face.native_ok("/create_model", body)
        await face.native_ok("/create_model", body)
        assert (await face.native("/create_model", body | {"lora": {"rank": 4, "seed": 5}})).status_code == 400
        await face.native_ok("/create_model", body)
    async with open_face(limits={"max_models": 1, "requests_per_s": 0.5}) as face:
        session = {"SESSION": await face.session()}
        await face.services.budgets.admit("local", 1)
        assert (await face.native("/create_model", body_of("/create_model", session))).status_code == 429
        face.advance(5000)
        await face.native_ok("/create_model", body_of("/create_model", session))


@pytest.mark.proves("R59")
async def test_a_unit_whose_creation_was_lost_with_the_store_runs_out(monkeypatch):
    async with open_face(limits={"max_models": 1}) as face:
        names = {"SESSION": await face.session()}

        async def away(_: object) -> None:
            raise StateContention("the store is away")

        with monkeypatch.context() as patch:
            patch.setattr(face.lanes, "submit", away)
            assert (await face.native("/create_model", body_of("/create_model", names))).status_code == 503
        other = body_of("/create_model", names, model_seq=7)
        assert (await face.native("/create_model", other)).status_code == 429
        face.advance(MODEL_LEASE_MS + 1)
        await face.native_ok("/create_model", other)


# Samplers.


@pytest.mark.parametrize("kind", list(CheckpointKind))
async def test_a_sampler_of_a_base_model_or_a_checkpoint(face: Face, kind):
    held = await keep(face, kind=kind)
    session_id = await face.session()
    for number, fields in enumerate(({"base_model": BASE}, {"checkpoint": held.path}, {"checkpoint": held.path, "base_model": BASE})):
        body = {"session_id": session_id, "sampler_seq": number} | fields
        made = await face.native_ok("/create_sampler", body)
        assert made == {"sampler_id": f"{session_id}:sample:{number}", "base_model": BASE, "checkpoint": fields.get("checkpoint")}
        assert await face.native_ok("/create_sampler", body) == made
    again = await face.native("/create_sampler", {"session_id": session_id, "sampler_seq": 0, "checkpoint": held.path})
    assert (again.status_code, again.json()["reason"]) == (400, "request_rejected")


async def test_a_sampler_number_that_was_published_on_is_no_base_model(face: Face):
    session_id = await face.session()
    published = SamplerRecord(
        tenant="local", session_id=session_id, sampler_id=f"{session_id}:sample:2", base_model=BASE, artifact="a", created_ms=1
    )
    await face.services.catalog.add_sampler(published)
    answer = await face.native("/create_sampler", {"session_id": session_id, "sampler_seq": 2, "base_model": BASE})
    assert (answer.status_code, answer.json()["reason"]) == (400, "request_rejected")
    assert "2 was used for another sampler; count on" in answer.json()["error"]
    assert await face.services.catalog.sampler("local", published.sampler_id) == published


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"base_model": "org/other"}, 404),
        ({"session_id": "nobody"}, 404),
        ({"base_model": None}, 422),
        ({"checkpoint": "nonsense"}, 422),
        ({"checkpoint": "tinker://s:train:0/weights/n", "base_model": "org/other"}, 422),
    ],
)
async def test_a_sampler_that_cannot_be_is_refused(face: Face, changes, status):
    await keep(face)
    names = await furnished(face)
    kept = face.num_kept()
    assert (await face.native("/create_sampler", body_of("/create_sampler", names, **changes))).status_code == status
    assert face.num_kept() == kept
