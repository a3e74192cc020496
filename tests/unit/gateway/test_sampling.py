"""Sampling at the face."""

from array import array

import pytest

from tests.fakes.face import BASE, WORKER, Face, open_face
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol.sampling import MAX_STOPS
from tinsmith.protocol.sessions import CheckpointKind, InflightTarget, SamplerRecord
from tinsmith.protocol.tensors import Csr, DType, Tensor
from tinsmith.state.catalog import sampler_write
from tinsmith.state.feeds import CLIENT_SPAN
from tinsmith.state.inflight import InflightTargets, target_writes


async def sampler(face: Face, **changes: object) -> str:
    body = {"session_id": await face.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    return str((await face.ok("/create_sampling_session", body | changes))["sampling_session_id"])


def prompt(*tokens: int) -> dict[str, object]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def body_of(sampler_id: str, **changes: object) -> dict[str, object]:
    body: dict[str, object] = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": prompt(1, 2), "num_samples": 2}
    return body | {"sampling_params": {"max_tokens": 4, "seed": 5}} | changes


async def test_a_sampling_session_of_a_base_model(face: Face):
    session_id = await face.session()
    sampler_id = await sampler(face, session_id=session_id, sampling_session_seq_id=7)
    assert sampler_id == f"{session_id}:sample:7"
    assert (await face.http.get(f"/api/v1/samplers/{sampler_id}")).json() == {
        "sampler_id": sampler_id,
        "base_model": BASE,
        "model_path": None,
    }
    assert (await face.http.get("/api/v1/samplers/nope")).status_code == 404


@pytest.mark.parametrize("base_model", [None, BASE])
@pytest.mark.parametrize("kind", list(CheckpointKind))
async def test_a_sampling_session_of_a_checkpoint(face: Face, base_model, kind):
    held = await keep(face, kind=kind)
    sampler_id = await sampler(face, base_model=base_model, model_path=held.path)
    answer = (await face.http.get(f"/api/v1/samplers/{sampler_id}")).json()
    assert answer == {"sampler_id": sampler_id, "base_model": BASE, "model_path": held.path}
    await face.ok("/asample", body_of(sampler_id))
    (sample,) = await face.take_samples()
    assert sample.adapter == "the-artifact"


@pytest.mark.parametrize(
    ("changes", "status", "names"),
    [
        ({"model_path": "tinker://s/sampler_weights/none"}, 404, "unknown"),
        ({"model_path": "somewhere"}, 400, "model_path"),
        ({"base_model": "org/other"}, 404, "base_model"),
        ({"base_model": None}, 400, "base_model"),
        ({"session_id": "nope"}, 404, "session"),
        ({"sampling_session_seq_id": -1}, 422, "sampling_session_seq_id"),
        ({"sampling_session_seq_id": 2**31}, 422, "sampling_session_seq_id"),
    ],
)
async def test_a_bad_sampling_session_is_refused_now(face: Face, changes, status, names):
    body = {"session_id": await face.session(), "sampling_session_seq_id": 0, "base_model": BASE} | changes
    answer = await face.post("/create_sampling_session", body)
    assert (answer.status_code, names in answer.json()["detail"]) == (status, True)


async def test_a_base_model_that_contradicts_the_checkpoint_is_refused(face: Face):
    held = await keep(face)
    body = {"session_id": await face.session(), "sampling_session_seq_id": 0, "base_model": "org/other", "model_path": held.path}
    assert (await face.post("/create_sampling_session", body)).status_code == 400


@pytest.mark.proves("R31")
async def test_a_sampling_session_is_created_once(face: Face):
    held = await keep(face)
    body = {"session_id": await face.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    assert await face.ok("/create_sampling_session", body) == await face.ok("/create_sampling_session", body)
    other = await face.post("/create_sampling_session", body | {"model_path": held.path})
    assert (other.status_code, other.json()["reason"]) == (400, "request_rejected")


@pytest.mark.parametrize(("max_tokens", "tokens"), [(4, 10), (2**31 - 1, 2 + 2 * 62), (None, 2 + 2 * 62)])
async def test_a_sample_counts_no_more_than_the_context_has_room_for(face: Face, max_tokens, tokens):
    await face.ok("/asample", body_of(await sampler(face), sampling_params={"max_tokens": max_tokens}))
    await face.lanes.renew(WORKER)
    (entry,) = await face.lanes.pool_take(BASE, WORKER.id, 1, 1)
    assert entry.tokens == tokens


async def test_asample_queues_and_numbers_its_sequences(face: Face):
    sampler_id = await sampler(face)
    params = {"max_tokens": 4, "seed": 5, "temperature": 0, "top_k": 3, "top_p": 0.5, "stop": ["a", "b"]}
    body = body_of(sampler_id, sampling_params=params, prompt_logprobs=True, topk_prompt_logprobs=2)
    promise = await face.ok("/asample", body, x_tinker_sampling_backpressure="1")
    assert len(set(promise["sample_sequence_ids"])) == 2
    assert await face.ok("/asample", body) == promise
    (sample,) = await face.take_samples()
    assert sample.prompt.tokens == [1, 2]
    assert sample.params.model_dump() == {
        "seed": 5,
        "max_tokens": 4,
        "temperature": 0.0,
        "top_k": 3,
        "top_p": 0.5,
        "stop": ("a", "b"),
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "logit_bias": {},
    }
    assert (sample.num_samples, sample.adapter, sample.prompt_logprobs, sample.topk_prompt_logprobs) == (2, None, True, 2)


async def test_everything_that_may_be_asked_of_a_prompt_reaches_the_sampler(face: Face):
    sampler_id = await sampler(face)
    targets = {"data": [3, 4], "dtype": "int64", "shape": [2, 3], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [2, 0]}
    asked = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "prompt_alt_tokens_k": 3, "topk_sample_logprobs": 4}
    await face.ok("/asample", body_of(sampler_id, prompt=prompt(1, 2, 3), target_prompt_logprobs=targets, **asked))
    (sample,) = await face.take_samples()
    assert {name: getattr(sample, name) for name in asked} == asked
    csr = Csr(array("q", [0, 1, 2]).tobytes(), array("q", [2, 0]).tobytes())
    assert sample.target_prompt_logprobs == Tensor(DType.INT64, (2, 3), array("q", [3, 4]).tobytes(), csr)


async def test_explicit_nulls_and_false_ask_for_nothing(face: Face):
    sampler_id = await sampler(face)
    unset = {"target_prompt_logprobs": None, "prompt_logprobs_last_n": None, "record_stability_info": False}
    await face.ok("/asample", body_of(sampler_id, **unset))
    (sample,) = await face.take_samples()
    assert (sample.target_prompt_logprobs, sample.prompt_logprobs_last_n) == (None, None)


@pytest.mark.proves("R69")
async def test_the_oldest_form_has_our_defaults(face: Face):
    sampler_id = await sampler(face)
    oldest = {"sampling_session_id": sampler_id, "seq_id": 9, "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"stop": None}}
    await face.ok("/asample", oldest | {"prompt_logprobs": None})
    (sample,) = await face.take_samples()
    assert (sample.num_samples, sample.params.temperature, sample.params.top_k, sample.params.top_p) == (1, 1.0, -1, 1.0)
    assert (sample.params.max_tokens, sample.params.stop) == (None, None)


@pytest.mark.parametrize(("stop", "kept"), [("a", ("a",)), ([], ()), ([1, 2], (1, 2)), (["x"], ("x",))])
async def test_stops(face: Face, stop, kept):
    sampler_id = await sampler(face)
    await face.ok("/asample", body_of(sampler_id, sampling_params={"stop": stop, "seed": 1}))
    (sample,) = await face.take_samples()
    assert sample.params.stop == kept


@pytest.mark.proves("R31")
async def test_an_unseeded_sample_gets_a_seed_that_a_repeat_finds_again(face: Face):
    sampler_id = await sampler(face)
    unseeded = {"sampling_params": {"max_tokens": 4}}
    first = await face.ok("/asample", body_of(sampler_id, **unseeded))
    assert await face.ok("/asample", body_of(sampler_id, **unseeded)) == first
    await face.ok("/asample", body_of(sampler_id, seq_id=1_000_000_000, **unseeded))
    one, other = await face.take_samples()
    assert one.params.seed != other.params.seed


@pytest.mark.proves("R28", "R45")
@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"prompt": prompt(*[1] * 65)}, "context of 64"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"sampling_params": {"stop": ["a"] * (MAX_STOPS + 1)}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": ""}}, "sampling_params.stop"),
        ({"prompt": prompt()}, "prompt"),
        ({"prompt": prompt(100)}, "prompt"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt.chunks[0]"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 5000}, "num_samples"),
        ({"topk_prompt_logprobs": 5000}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
        ({"topk_sample_logprobs": 5000}, "topk_sample_logprobs"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 2]}}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [100], "dtype": "int64", "shape": [1, 1]}}, "target_prompt_logprobs"),
        ({"target_prompt_logprobs": {"data": [-1], "dtype": "int64", "shape": [1, 1]}}, "target_prompt_logprobs"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k"),
        ({"prompt_alt_tokens_k": 5000}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"record_stability_info": True}, "with the losses cispo or ppo"),
        ({"seq_id": None}, "seq_id"),
        ({"seq_id": -1}, "seq_id"),
        ({"seq_id": 2**63}, "seq_id"),
    ],
)
async def test_a_refused_sample_names_the_field_and_leaves_nothing(face: Face, changes, names):
    sampler_id = await sampler(face)
    answer = await face.post("/asample", body_of(sampler_id) | changes)
    assert answer.status_code == 422
    assert names in answer.json()["detail"]
    assert await face.take_samples() == []


async def test_samples_of_unknown_and_ended_sessions_are_refused(face: Face):
    assert (await face.post("/asample", body_of("nope:sample:0"))).status_code == 404
    sampler_id = await sampler(face)
    await face.ok(f"/sessions/{sampler_id.partition(':')[0]}/finish", {})
    assert (await face.post("/asample", body_of(sampler_id))).status_code == 410


# Clients that join


async def test_clients_that_join_get_numbers_and_count_from_them(face: Face):
    sampler_id = await sampler(face)
    numbers = [(await face.ok("/join_sampling_session", {"sampling_session_id": sampler_id}))["client_counter"] for _ in range(2)]
    assert numbers == [1, 2]
    for seq_id in (0, 7, CLIENT_SPAN + 3, 2 * CLIENT_SPAN, 10**9 * CLIENT_SPAN):
        await face.ok("/asample", body_of(sampler_id, seq_id=seq_id))
    assert len(await face.take_samples()) == 5


async def test_only_a_live_sampling_session_of_the_caller_is_joined(face: Face):
    assert (await face.post("/join_sampling_session", {"sampling_session_id": "nope:sample:0"})).status_code == 404
    sampler_id = await sampler(face)
    await face.ok(f"/sessions/{sampler_id.partition(':')[0]}/finish", {})
    assert (await face.post("/join_sampling_session", {"sampling_session_id": sampler_id})).status_code == 410


# Holding back


async def test_a_full_pool_asks_its_clients_to_hold_back_and_takes_the_same_seq_id_later():
    async with open_face(limits={"max_pending_samples": 2}) as face:
        sampler_id = await sampler(face)
        for seq_id in (0, 1):
            await face.ok("/asample", body_of(sampler_id, seq_id=seq_id), x_tinker_sampling_backpressure="1")
        kept = face.num_kept()
        third = body_of(sampler_id, seq_id=2)
        for _ in range(3):
            refused = await face.post("/asample", third, x_tinker_sampling_backpressure="1")
            assert (refused.status_code, refused.json()["reason"]) == (429, "resource_quota_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
        assert face.num_kept() == kept
        repeat = await face.post("/asample", body_of(sampler_id, seq_id=1), x_tinker_sampling_backpressure="1")
        assert repeat.status_code == 200
        assert len(await face.take_samples()) == 2
        assert (await face.post("/asample", third, x_tinker_sampling_backpressure="1")).status_code == 200
        for seq_id in (3, 4):
            assert (await face.post("/asample", body_of(sampler_id, seq_id=seq_id))).status_code == 200, "it does not know the header"


# Inflight samplers


async def save_inflight(face: Face, session_id: str, number: int, seq: int) -> str:
    """As the settle of such a save leaves it; answers the sampler's id."""
    model_id, artifact, sampler_id = f"{session_id}:train:0", f"local/m/sampler_weights/{seq}-1", f"{session_id}:sample:{number}"
    target = InflightTarget(tenant="local", model_id=model_id, seq=seq, artifact=artifact, created_ms=1)
    record = SamplerRecord(
        tenant="local", session_id=session_id, sampler_id=sampler_id, base_model=BASE, artifact=artifact, inflight=target, created_ms=1
    )
    held = await InflightTargets(face.store).of_model("local", model_id)
    face.store.apply([sampler_write(record), *target_writes(target, held)])
    return sampler_id


async def test_an_inflight_sampler_samples_from_the_newest_save_of_its_model(face: Face):
    session_id = await face.session()
    old = await save_inflight(face, session_id, 0, seq=3)
    await face.ok("/asample", body_of(old, seq_id=0))
    new = await save_inflight(face, session_id, 1, seq=8)
    for sampler_id in (old, new):
        await face.ok("/asample", body_of(sampler_id, seq_id=1))
    adapters = [sample.adapter for sample in await face.take_samples()]
    assert adapters == [f"local/m/sampler_weights/{seq}-1" for seq in (3, 8, 8)]


async def test_a_repeat_after_a_newer_inflight_save_is_the_same_sample(face: Face):
    session_id = await face.session()
    sampler_id = await save_inflight(face, session_id, 0, seq=3)
    promise = await face.ok("/asample", body_of(sampler_id, seq_id=0))
    await save_inflight(face, session_id, 1, seq=8)
    assert await face.ok("/asample", body_of(sampler_id, seq_id=0)) == promise
    other = await face.post("/asample", body_of(sampler_id, seq_id=0, num_samples=1))
    assert (other.status_code, other.json()["reason"]) == (400, "request_rejected")
    (sample,) = await face.take_samples()
    assert sample.adapter == "local/m/sampler_weights/3-1"
    await face.ok("/asample", body_of(sampler_id, seq_id=1))
    assert await face.ok("/asample", body_of(sampler_id, seq_id=1))
