"""retrieve_future and cancel_future."""

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable

import pytest

from tests.fakes.face import BASE, Face
from tests.unit.gateway.native.test_streams import SAMPLER
from tests.unit.gateway.test_sampling import body_of, sampler
from tests.unit.gateway.test_training import request, send
from tinsmith.protocol import ids, wire
from tinsmith.protocol.errors import ExecutionTimeout, StateContention, ValidationFailed
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.sampling import SampledSequence, SampleOutput, StopReason
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import ComputeOutput
from tinsmith.state.inbox import SampleAbort, decode
from tinsmith.state.lanes import inbox_topic

PROTOBUF = "application/x-protobuf"
PASS = wire.encode_compute_output(ComputeOutput((Tensor(DType.FLOAT32, (1,), array("f", [0.5]).tobytes()),), {"loss:sum": 1.0}))
SAMPLE = wire.encode_sample_output(SampleOutput([SampledSequence([1], [-0.5], StopReason.STOP)]))


async def step(face: Face) -> tuple[str, str]:
    """(model id, request id) of a pending step with seq 1, its model being made."""
    model_id = await face.model()
    promise = await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    await face.run(model_id, 0)
    return model_id, str(promise["request_id"])


async def sampled(face: Face) -> str:
    return str((await face.ok("/asample", body_of(await sampler(face))))["request_id"])


@pytest.mark.proves("R24")
async def test_a_poll_is_woken_by_the_settle(face: Face):
    model_id, rid = await step(face)
    poll = asyncio.create_task(face.retrieve(rid))
    await asyncio.sleep(0)
    await face.run(model_id, 1, b'{"metrics":{}}')
    answer = await asyncio.wait_for(poll, 0.5)
    assert (answer.status_code, answer.json()) == (200, {"metrics": {}})


@pytest.mark.proves("R20", "R24")
async def test_a_pending_future_is_a_408_with_the_queue_state(face: Face):
    model_id, rid = await step(face)
    started = asyncio.get_running_loop().time()
    answer = await face.retrieve(rid)
    assert answer.status_code == 408
    assert asyncio.get_running_loop().time() - started >= 0.9  # clients ask again at once
    assert answer.json() == {"type": "try_again", "request_id": rid, "queue_state": "active"}
    await face.lanes.release(model_id, "w", (await face.lanes.lane(model_id)).token)
    paused = (await face.retrieve(rid)).json()
    assert (paused["queue_state"], "free slot" in paused["queue_state_reason"]) == ("paused_capacity", True)


async def test_a_pending_sample_is_active(face: Face):
    rid = await sampled(face)
    assert (await face.retrieve(rid)).json()["queue_state"] == "active"


async def test_a_result_may_be_fetched_again(face: Face):
    model_id, rid = await step(face)
    await face.run(model_id, 1, b'{"metrics":null}')
    for _ in range(2):
        assert (await face.retrieve(rid)).json() == {"metrics": None}


@pytest.mark.proves("R35")
@pytest.mark.parametrize(
    ("accept", "is_protobuf"),
    [
        ("application/json", False),
        ("*/*", False),
        ("application/x-protobuf, application/json", True),
        ("application/x-protobuf", True),
    ],
)
async def test_passes_and_samples_are_encoded_as_the_caller_reads_them(face: Face, accept, is_protobuf):
    model_id = await face.model()
    promise = (await send(face, request(model_id, 1).SerializeToString())).json()
    await face.run(model_id, 0)
    await face.run(model_id, 1, PASS)
    rid = await sampled(face)
    await face.run_samples(Outcome(result=SAMPLE))
    for future, encoded, to_json in (
        (promise["request_id"], PASS, wire.compute_output_json),
        (rid, SAMPLE, wire.sample_output_json),
    ):
        answer = await face.retrieve(future, accept)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == (PROTOBUF if is_protobuf else "application/json")
        assert answer.content == encoded if is_protobuf else answer.json() == json.loads(to_json(encoded))


async def test_json_results_stay_json_whatever_is_accepted(face: Face):
    model_id, rid = await step(face)
    await face.run(model_id, 1, b'{"metrics":{}}')
    answer = await face.retrieve(rid, PROTOBUF)
    assert (answer.headers["content-type"], answer.json()) == ("application/json", {"metrics": {}})


async def test_a_large_result_tells_its_size_first(face: Face):
    model_id, rid = await step(face)
    result = b'{"metrics":{"' + b"x" * (1 << 20) + b'":1}}'
    await face.run(model_id, 1, result)
    answer = await face.retrieve(rid, allow_metadata_only=True)
    assert answer.json() == {"status": "complete_metadata", "response_payload_size": len(result)}
    assert (await face.retrieve(rid, allow_metadata_only=False)).content == result


@pytest.mark.proves("R14")
@pytest.mark.parametrize(("error", "category"), [(ValidationFailed("the data"), "user"), (ExecutionTimeout("too slow"), "server")])
async def test_a_failed_future_is_a_200_with_its_category(face: Face, error, category):
    model_id, rid = await step(face)
    await face.take(model_id, 1)
    await face.settle(model_id, 1, Outcome.failed(error, is_tainted=False))
    answer = await face.retrieve(rid, PROTOBUF)
    assert (answer.status_code, answer.json()) == (200, {"error": error.message, "category": category})


# What an id answers when there is nothing behind it


async def test_ids_that_were_never_issued_to_this_tenant_are_404_and_alike(face: Face):
    info = await face.store.open()
    foreign = ids.request_id(WorkKind.TRAINING, epoch=info.epoch, secret=info.secret, tenant="other", lane="l", seq=1)
    forged = ids.request_id(WorkKind.TRAINING, epoch=info.epoch, secret=b"wrong", tenant="local", lane="l", seq=1)
    answers = [(rid, await face.retrieve(rid)) for rid in ("nonsense", foreign, forged)]
    bodies = {answer.text.replace(rid, "ID") for rid, answer in answers}
    assert {answer.status_code for _, answer in answers} == {404}
    assert len(bodies) == 1


@pytest.mark.parametrize("work", list(WorkKind))
async def test_an_id_of_an_emptied_store(face: Face, work):
    rid = ids.request_id(work, epoch="00000000", secret=b"gone", tenant="local", lane="l", seq=1)
    answer = await face.retrieve(rid)
    if work is WorkKind.SAMPLING:
        assert answer.status_code == 410
    else:
        assert answer.status_code == 200
        assert answer.json()["category"] == "server"
        assert "restart" in answer.json()["error"]


async def test_a_store_that_is_emptied_during_the_poll(face: Face):
    _, rid = await step(face)
    poll = asyncio.create_task(face.retrieve(rid))
    await asyncio.sleep(0.01)
    await face.store.flush_all()
    answer = await asyncio.wait_for(poll, 0.9)
    assert "restart" in answer.json()["error"]


async def test_past_retention(face: Face):
    model_id, rid = await step(face)
    await face.run(model_id, 1)
    sample = await sampled(face)
    await face.run_samples(Outcome(result=SAMPLE))
    await face.retrieve(rid)
    assert (await face.retrieve(sample)).status_code == 200
    face.advance(face.lanes.limits.result_kept_ms + 1)
    await face.lanes.sweep(stuck_ms=10**12, orphan_ms=10**12)
    freed = (await face.retrieve(rid)).json()
    assert (freed["category"], "retention" in freed["error"]) == ("user", True)
    assert (await face.retrieve(sample)).status_code == 410
    for record in await face.services.catalog.sessions("local"):
        await face.ok(f"/sessions/{record.session_id}/finish", {})
    face.advance(face.lanes.limits.record_kept_ms + 1)
    await face.lanes.sweep(stuck_ms=10**12, orphan_ms=10**12)
    forgotten = (await face.retrieve(rid)).json()
    assert (forgotten["category"], "retention" in forgotten["error"]) == ("user", True)
    assert (await face.retrieve(sample)).status_code == 410


@pytest.mark.proves("R67")
async def test_after_the_session_has_ended(face: Face):
    session_id = await face.session()
    model_id = await face.model(session_id)
    done = await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    await face.run(model_id, 0)
    await face.run(model_id, 1)
    pending = await face.ok("/optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    await face.ok(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}})
    for promise in (done, pending):
        answer = (await face.retrieve(promise["request_id"])).json()
        assert (answer["category"], "has ended" in answer["error"]) == ("user", True)


@pytest.mark.proves("R67")
async def test_samples_of_a_session_that_has_ended_are_404(face: Face):
    done = await sampled(face)
    await face.run_samples(Outcome(result=SAMPLE))
    pending = await sampled(face)
    for record in await face.services.catalog.sessions("local"):
        await face.ok(f"/sessions/{record.session_id}/finish", {})
    for rid in (done, pending):
        assert (await face.retrieve(rid)).status_code == 404


async def pending_sample(face: Face) -> str:
    return await sampled(face)


async def never_issued_sample(face: Face) -> str:
    return await face.services.request_id(WorkKind.SAMPLING, "other", "s:sample:0", 1)


async def sample_of_an_emptied_store(face: Face) -> str:
    rid = await sampled(face)
    await face.store.flush_all()
    face.services.identity._read_at = float("-inf")  # as a second later
    return rid


async def sample_past_its_retention(face: Face) -> str:
    rid = await sampled(face)
    await face.run_samples(Outcome(result=SAMPLE))
    face.advance(face.lanes.limits.record_kept_ms + 1)
    await face.lanes.sweep(stuck_ms=10**12, orphan_ms=10**12)
    return rid


async def sample_that_its_caller_has(face: Face) -> str:
    sampler_id = await sampler(face)
    rid = str((await face.ok("/asample", body_of(sampler_id)))["request_id"])
    await face.run_samples(Outcome(result=SAMPLE))
    target = {"type": "sampling_session", "sampling_session_id": sampler_id}
    await face.ok("/retrieve_futures", {"target": target, "timeout": 0, "retrieved_request_ids": [rid]})
    return rid


async def sample_of_a_session_that_has_ended(face: Face) -> str:
    rid = await sampled(face)
    for record in await face.services.catalog.sessions("local"):
        await face.ok(f"/sessions/{record.session_id}/finish", {})
    return rid


@pytest.mark.parametrize(
    ("case", "status"),
    [
        (pending_sample, 408),
        (never_issued_sample, 404),
        (sample_of_an_emptied_store, 410),
        (sample_past_its_retention, 410),
        (sample_that_its_caller_has, 410),
        (sample_of_a_session_that_has_ended, 404),
    ],
)
async def test_what_a_sample_answers_that_has_no_result(face: Face, case: Callable[[Face], Awaitable[str]], status: int):
    assert (await face.retrieve(await case(face), PROTOBUF)).status_code == status


async def test_an_unload_that_never_was_is_404(face: Face):
    model_id = await face.model()
    rid = await face.services.request_id(WorkKind.CONTROL, "local", model_id, "unload")
    assert (await face.retrieve(rid)).status_code == 404


async def test_a_store_that_is_away_holds_its_caller_for_a_second(face: Face, monkeypatch):
    _, rid = await step(face)

    async def away(*_: object) -> None:
        raise StateContention("the store is away")

    monkeypatch.setattr(face.lanes, "look", away)
    monkeypatch.setattr("tinsmith.gateway.tinker.futures.HOLD_S", 0.05)
    started = asyncio.get_running_loop().time()
    answer = await face.retrieve(rid)
    assert (answer.status_code, answer.json()["reason"]) == (503, "state_contention")
    assert asyncio.get_running_loop().time() - started >= 0.05


# Cancelling


@pytest.mark.proves("R25")
async def test_cancel_drops_what_has_not_started(face: Face):
    rid = await sampled(face)
    assert await face.ok("/cancel_future", {"request_id": rid}) == {"cancelled": True, "state": "cancelled"}
    assert await face.ok("/cancel_future", {"request_id": rid}) == {"cancelled": True, "state": "cancelled"}
    assert (await face.retrieve(rid)).json()["category"] == "user"
    assert await face.take_samples() == []


@pytest.mark.proves("R25")
async def test_cancel_reports_what_has_started_unchanged(face: Face):
    model_id, rid = await step(face)
    await face.take(model_id, 1)
    assert await face.ok("/cancel_future", {"request_id": rid}) == {"cancelled": False, "state": "running"}


async def test_cancel_of_a_sample_that_runs_tells_its_sampler_to_stop(face: Face):
    await face.lanes.renew(SAMPLER)
    rid = await sampled(face)
    (entry,) = await face.lanes.pool_take(BASE, SAMPLER.id, 1, 1_000_000)
    assert await face.ok("/cancel_future", {"request_id": rid}) == {"cancelled": False, "state": "running"}
    wake = await face.lanes.wait({inbox_topic(SAMPLER.id): 0}, 1.0)
    assert [decode(text) for text in wake.events[inbox_topic(SAMPLER.id)]] == [SampleAbort(rid=entry.rid)]


async def test_cancel_of_an_unknown_id_is_404(face: Face):
    assert (await face.post("/cancel_future", {"request_id": "nonsense"})).status_code == 404
    info = await face.store.open()
    never = ids.request_id(WorkKind.SAMPLING, epoch=info.epoch, secret=info.secret, tenant="local", lane="l", seq=1)
    assert (await face.post("/cancel_future", {"request_id": never})).status_code == 404
