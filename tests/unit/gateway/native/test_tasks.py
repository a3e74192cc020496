"""Promises of the native protocol: the envelope, the long poll, cancelling, and one record on two faces."""

import ast
import asyncio
import json
from array import array
from pathlib import Path

import pytest

import tinsmith
from tests.fakes.face import Face, open_face
from tests.fakes.training import until
from tests.unit.gateway.native.bodies import body_of, furnished
from tests.unit.gateway.test_sampling import body_of as tinker_sample
from tinsmith.protocol import ids, wire
from tinsmith.protocol.errors import Category, ExecutionTimeout, ValidationFailed
from tinsmith.protocol.futures import Failure, Outcome
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.native import RESULTS
from tinsmith.protocol.native_answers import PassResult, SampleResult
from tinsmith.protocol.sampling import SampledSequence, SampleOutput, StopReason
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import ComputeOutput

TENSOR = Tensor(DType.FLOAT32, (2,), array("f", [0.5, float("-inf")]).tobytes())
PASS = wire.encode_compute_output(ComputeOutput((TENSOR,), {"loss:sum": 1.0}))
EMBEDDED = wire.encode_compute_output(ComputeOutput((), {"loss:sum": 1.0}, (TENSOR,)))
SAMPLE = wire.encode_sample_output(
    SampleOutput([SampledSequence([1, 2], [-0.5, -0.25], StopReason.STOP)], [None, -1.0], [None, [(3, -0.5)]])
)
ARRAY = {"dtype": "float32", "shape": [2], "data": "AAAAPwAAgP8="}


async def begun(face: Face, path: str, **changes: object) -> tuple[dict[str, str], str]:
    """Names, and the request id of the route's command as the next one of its model or pool."""
    names = await furnished(face)
    rid = str((await face.native_ok(path, body_of(path, names, **changes)))["request_id"])
    await face.run(names["MODEL"], 0, json.dumps({"model_id": names["MODEL"], "type": "create_model"}).encode())
    return names, rid


async def retrieved(face: Face, rid: str) -> dict[str, object]:
    return await face.native_ok("/retrieve_future", {"request_id": rid})


@pytest.mark.proves("R22")
@pytest.mark.parametrize("path", [path for path in RESULTS if path not in ("/load_weights",)])
async def test_every_queued_endpoint_answers_an_envelope_at_once(face: Face, path):
    names = await furnished(face)
    began = asyncio.get_running_loop().time()
    envelope = await face.native_ok(path, body_of(path, names))
    assert asyncio.get_running_loop().time() - began < 0.3
    assert {**envelope, "request_id": None, "queue_state_reason": None} == {
        "request_id": None,
        "status": "pending",
        "result": None,
        "error": None,
        "queue_state": "active" if path == "/sample" else "paused_capacity",
        "queue_state_reason": None,
    }


@pytest.mark.proves("R23")
async def test_a_command_that_ends_within_the_short_wait_needs_one_round_trip():
    async with open_face(execution={"inline_wait_s": 0.9, "long_poll_s": 1}) as face:
        names = await furnished(face)
        submitting = asyncio.create_task(face.native_ok("/sample", body_of("/sample", names)))
        await until(lambda: face.services.polls.num_waiting > 0)
        await face.run_samples(Outcome(result=SAMPLE))
        assert (await submitting)["status"] == "completed"


@pytest.mark.proves("R30")
async def test_a_submit_waits_for_nothing_where_the_short_wait_is_off():
    async with open_face(execution={"inline_wait_s": 0, "long_poll_s": 1}) as face:
        names = await furnished(face)
        assert (await face.native_ok("/sample", body_of("/sample", names)))["status"] == "pending"


@pytest.mark.proves("R24")
async def test_a_poll_is_woken_by_the_settle(face: Face):
    names, rid = await begun(face, "/optim_step")
    poll = asyncio.create_task(retrieved(face, rid))
    await asyncio.sleep(0)
    await face.run(names["MODEL"], 1, b'{"metrics":{"unclipped_grad_l2:mean":0.5}}')
    envelope = await asyncio.wait_for(poll, 0.5)
    assert (envelope["status"], envelope["result"]) == ("completed", {"metrics": {"unclipped_grad_l2:mean": 0.5}})
    assert (envelope["error"], envelope["queue_state"]) == (None, None)


@pytest.mark.proves("R20", "R24")
async def test_a_poll_whose_window_ends_is_200_with_the_queue_state(face: Face):
    names, rid = await begun(face, "/optim_step")
    began = asyncio.get_running_loop().time()
    envelope = await retrieved(face, rid)
    assert asyncio.get_running_loop().time() - began >= 0.9
    assert (envelope["status"], envelope["queue_state"], envelope["queue_state_reason"]) == ("pending", "active", None)
    await face.take(names["MODEL"], 1)
    assert (await retrieved(face, rid))["status"] == "running"
    lane = await face.lanes.lane(names["MODEL"])
    assert lane is not None
    await face.lanes.release(lane.lane, "w", lane.token)
    paused = await retrieved(face, rid)
    assert (paused["queue_state"], "free slot" in str(paused["queue_state_reason"])) == ("paused_capacity", True)


@pytest.mark.proves("R24")
async def test_completed_with_a_null_result_is_a_success(face: Face):
    names, rid = await begun(face, "/optim_step")
    await face.run(names["MODEL"], 1, b"null")
    envelope = await retrieved(face, rid)
    assert (envelope["status"], envelope["result"], envelope["error"]) == ("completed", None, None)


@pytest.mark.proves("R13", "R14", "R15", "R26")
@pytest.mark.parametrize("error", [ValidationFailed("bad rows"), ExecutionTimeout("too slow"), RuntimeError("the secret")])
async def test_a_failed_command_is_200_with_a_payload_and_no_traceback(face: Face, error):
    names, rid = await begun(face, "/optim_step")
    await face.take(names["MODEL"], 1)
    await face.settle(names["MODEL"], 1, Outcome.failed(error, is_tainted=False))
    envelope = await retrieved(face, rid)
    failure = Failure.of(error)
    assert (envelope["status"], envelope["result"]) == ("failed", None)
    assert envelope["error"] == {
        "error": failure.message,
        "reason": failure.reason.value,
        "category": failure.category.value,
        "error_code": failure.error().status,
        "request_id": rid,
        "traceback": None,
        "details": None,
    }
    assert "the secret" not in json.dumps(envelope)


@pytest.mark.proves("R24")
async def test_404_is_for_ids_never_issued_of_another_tenant_or_past_retention(face: Face):
    info = await face.store.open()
    never = ids.request_id(WorkKind.TRAINING, epoch=info.epoch, secret=info.secret, tenant="local", lane="l", seq=1)
    theirs = await face.services.request_id(WorkKind.TRAINING, "other", "l", 1)
    lost = ids.request_id(WorkKind.TRAINING, epoch="00000000", secret=info.secret, tenant="local", lane="l", seq=1)
    for rid in ("nonsense", never, theirs, lost):
        for path, body in (("/retrieve_future", {"request_id": rid}), ("/retrieve_futures", {"request_ids": [rid]})):
            answer = await face.native(path, body)
            assert (answer.status_code, answer.json()["reason"]) == (404, "resource_not_found")


async def test_a_result_that_was_freed_is_404_and_says_so(face: Face):
    names, rid = await begun(face, "/optim_step")
    await face.run(names["MODEL"], 1, b'{"metrics":{}}')
    await retrieved(face, rid)
    face.advance(face.lanes.limits.result_kept_ms + 1)
    await face.lanes.sweep(stuck_ms=10**9, orphan_ms=10**9)
    answer = await face.native("/retrieve_future", {"request_id": rid})
    assert (answer.status_code, "no longer kept" in answer.json()["error"]) == (404, True)


@pytest.mark.proves("R24")
@pytest.mark.parametrize(
    ("end", "told"),
    [(("/unload_model", {"model_id": "MODEL"}), "was unloaded"), (("/end_session", {"session_id": "SESSION"}), "has ended")],
)
async def test_a_result_that_went_with_its_model_or_session_is_410_and_says_so(face: Face, end, told):
    names, rid = await begun(face, "/optim_step")
    await face.run(names["MODEL"], 1, b'{"metrics":{}}')
    path, body = end
    await face.native_ok(path, {field: names[name] for field, name in body.items()})
    asks = [("/retrieve_future", {"request_id": rid}), ("/retrieve_futures", {"request_ids": [rid]}), ("/optim_step", None)]
    for asked, sent in asks:
        answer = await face.native(asked, body_of("/optim_step", names) if sent is None else sent)
        assert (answer.status_code, answer.json()["reason"]) == (410, "session_ended"), answer.text
        assert told in answer.json()["error"]
        assert f"the result of request {rid} is no longer kept" in answer.json()["error"]


@pytest.mark.proves("R24")
async def test_a_sample_outlives_the_models_and_not_the_session(face: Face):
    names, rid = await begun(face, "/sample")
    await face.run_samples(Outcome(result=SAMPLE))
    await face.native_ok("/unload_model", {"model_id": names["MODEL"]})
    assert (await retrieved(face, rid))["status"] == "completed"
    await face.native_ok("/end_session", {"session_id": names["SESSION"]})
    answer = await face.native("/retrieve_future", {"request_id": rid})
    assert (answer.status_code, answer.json()["reason"]) == (410, "session_ended")


async def test_a_result_whose_session_is_forgotten_is_404(face: Face):
    names, rid = await begun(face, "/optim_step")
    await face.run(names["MODEL"], 1, b'{"metrics":{}}')
    await face.native_ok("/end_session", {"session_id": names["SESSION"]})
    await face.services.catalog.forget_session(await face.services.catalog.session("local", names["SESSION"]))
    answer = await face.native("/retrieve_future", {"request_id": rid})
    assert (answer.status_code, "no longer kept" in answer.json()["error"]) == (404, True)


@pytest.mark.proves("R24")
async def test_several_are_answered_as_soon_as_one_has_ended(face: Face):
    names, first = await begun(face, "/optim_step")
    second = (await face.native_ok("/optim_step", body_of("/optim_step", names, seq_id=2)))["request_id"]
    polling = asyncio.create_task(face.native_ok("/retrieve_futures", {"request_ids": [second, first, second]}))
    await asyncio.sleep(0)
    await face.run(names["MODEL"], 1, b'{"metrics":{}}')
    tasks = (await asyncio.wait_for(polling, 0.5))["tasks"]
    assert [(task["request_id"], task["status"]) for task in tasks] == [(second, "pending"), (first, "completed"), (second, "pending")]
    at_once = await asyncio.wait_for(face.native_ok("/retrieve_futures", {"request_ids": [first, second]}), 0.5)
    assert [task["status"] for task in at_once["tasks"]] == ["completed", "pending"]


async def test_several_are_answered_when_the_window_ends(face: Face):
    names, first = await begun(face, "/optim_step")
    second = (await face.native_ok("/optim_step", body_of("/optim_step", names, seq_id=2)))["request_id"]
    tasks = (await face.native_ok("/retrieve_futures", {"request_ids": [first, second]}))["tasks"]
    assert [task["status"] for task in tasks] == ["pending", "pending"]


async def test_a_gateway_that_stops_answers_its_waiters(face: Face):
    _, rid = await begun(face, "/optim_step")
    poll = asyncio.create_task(face.native_ok("/retrieve_futures", {"request_ids": [rid, (await begun(face, "/sample"))[1]]}))
    await until(lambda: face.services.polls.num_waiting > 1)
    face.services.polls.end()
    assert [task["status"] for task in (await asyncio.wait_for(poll, 0.5))["tasks"]] == ["pending", "pending"]


@pytest.mark.proves("R25")
async def test_cancel_drops_what_has_not_started_and_reports_the_rest_unchanged(face: Face):
    names, rid = await begun(face, "/optim_step")
    later = (await face.native_ok("/optim_step", body_of("/optim_step", names, seq_id=2)))["request_id"]
    await face.take(names["MODEL"], 1)
    assert await face.native_ok("/cancel", {"request_id": rid}) == {"cancelled": False, "state": "running"}
    assert await face.native_ok("/cancel", {"request_id": later}) == {"cancelled": True, "state": "cancelled"}
    envelope = await retrieved(face, later)
    assert (envelope["status"], envelope["error"]["error_code"], envelope["error"]["reason"]) == ("cancelled", 499, "cancelled")
    await face.settle(names["MODEL"], 1, Outcome(result=b'{"metrics":{}}'))
    assert await face.native_ok("/cancel", {"request_id": rid}) == {"cancelled": False, "state": "completed"}


@pytest.mark.proves("R25")
async def test_cancel_of_an_unknown_or_foreign_id_is_404(face: Face):
    theirs = await face.services.request_id(WorkKind.SAMPLING, "other", "l", 1)
    ours = await face.services.request_id(WorkKind.SAMPLING, "local", "l", 1)
    for rid in ("nonsense", theirs, ours):
        assert (await face.native("/cancel", {"request_id": rid})).status_code == 404


# One record, two faces.

TOLD = [
    ("/forward", PASS, {"logprobs": [ARRAY], "embeddings": [], "metrics": {"loss:sum": 1.0}}),
    ("/forward_backward", EMBEDDED, {"logprobs": [], "embeddings": [ARRAY], "metrics": {"loss:sum": 1.0}}),
    ("/train_step", PASS, {"logprobs": [ARRAY], "embeddings": [], "metrics": {"loss:sum": 1.0}}),
    ("/evaluate", PASS, {"metrics": {"loss:sum": 1.0}}),
    ("/optim_step", b'{"metrics":{"a:mean":1.0}}', {"metrics": {"a:mean": 1.0}}),
    ("/save_weights", b'{"path":"tinker://x/weights/n"}', {"checkpoint": "tinker://x/weights/n"}),
    ("/publish_sampler_weights", b'{"path":"tinker://x/s/n"}', {"checkpoint": "tinker://x/s/n", "sampler_id": None}),
    ("/publish_sampler_weights", b'{"sampling_session_id":"s"}', {"checkpoint": None, "sampler_id": "s"}),
]


@pytest.mark.proves("R35")
@pytest.mark.parametrize(("path", "stored", "told"), TOLD)
async def test_what_was_submitted_here_is_retrieved_there_too(face: Face, path, stored, told):
    names, rid = await begun(face, path)
    await face.run(names["MODEL"], 1, stored)
    assert (await retrieved(face, rid))["result"] == told
    assert RESULTS[path].model_validate(told) is not None
    tinker = await face.retrieve(rid, accept="application/x-protobuf, application/json")
    assert (tinker.status_code, tinker.content) == (200, stored)


@pytest.mark.proves("R35")
async def test_a_sample_is_retrieved_on_both_faces(face: Face):
    names, rid = await begun(face, "/sample")
    await face.run_samples(Outcome(result=SAMPLE))
    told = (await retrieved(face, rid))["result"]
    assert told == {
        "sequences": [{"tokens": [1, 2], "logprobs": [-0.5, -0.25], "stop_reason": "stop", "text": None}],
        "prompt_logprobs": [None, -1.0],
        "topk_prompt_logprobs": [None, [[3, -0.5]]],
    }
    assert SampleResult.model_validate(told).sequences[0].stop_reason is StopReason.STOP
    assert (await face.retrieve(rid)).json()["sequences"][0]["tokens"] == [1, 2]
    assert names["SAMPLER"]


@pytest.mark.proves("R35")
async def test_what_was_submitted_on_the_tinker_face_is_retrieved_here(face: Face):
    session_id = await face.session()
    created = await face.ok("/create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": "org/tiny"})
    model_id = created["model_id"]
    stepped = await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1})
    refused = await face.ok("/optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {"beta1": 2}})
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/tiny"}
    sampler_id = (await face.ok("/create_sampling_session", sampling))["sampling_session_id"]
    sampled = await face.ok("/asample", tinker_sample(sampler_id))
    await face.run(model_id, 0, json.dumps({"model_id": model_id, "type": "create_model"}).encode())
    await face.run(model_id, 1, b'{"metrics":{}}')
    await face.run_samples(Outcome(result=SAMPLE))
    assert (await retrieved(face, created["request_id"]))["result"] == {"model_id": model_id}
    assert (await retrieved(face, stepped["request_id"]))["result"] == {"metrics": {}}
    assert (await retrieved(face, sampled["request_id"]))["status"] == "completed"
    born_failed = await retrieved(face, refused["request_id"])
    assert (born_failed["status"], born_failed["error"]["category"]) == ("failed", Category.USER.value)
    unloaded = await face.ok("/unload_model", {"model_id": model_id})
    assert (await retrieved(face, unloaded["request_id"]))["result"] == {"model_id": model_id}
    never = await face.services.request_id(WorkKind.CONTROL, "local", model_id, "other")
    assert (await face.native("/retrieve_future", {"request_id": never})).status_code == 404


async def test_a_large_result_is_written_off_the_loop(face: Face):
    names, rid = await begun(face, "/forward")
    large = Tensor(DType.FLOAT32, (100_000,), array("f", [0.5] * 100_000).tobytes())
    await face.run(names["MODEL"], 1, wire.encode_compute_output(ComputeOutput((large,), {"loss:sum": float("nan")})))
    answer = await face.http.post("/native/v1/retrieve_future", json={"request_id": rid})
    assert answer.headers["content-type"] == "application/json"
    result = PassResult.model_validate(json.loads(answer.content)["result"])
    assert result.logprobs[0].shape == (100_000,)


@pytest.mark.proves("R27")
def test_an_envelope_is_made_in_one_file():
    root = Path(tinsmith.__file__).parent
    makers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "TaskEnvelope"
    }
    assert {maker for maker in makers if not maker.startswith(("protocol/", "client/"))} == {"gateway/native/envelopes.py"}


@pytest.mark.proves("R19")
def test_native_routes_never_raise_the_framework_s_exception():
    root = Path(tinsmith.__file__).parent / "gateway" / "native"
    named = {
        path.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if getattr(node, "id", getattr(node, "attr", getattr(node, "name", ""))) == "HTTPException"
    }
    assert not named
