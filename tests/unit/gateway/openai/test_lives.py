"""What becomes of a request under /v1 when its caller, its sampler, its session or its gateway goes; and errors at large."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.fakes.face import BASE, Face, open_face
from tests.unit.gateway.native.bodies import tiny
from tests.unit.gateway.openai.scene import SAMPLER, WAIT_S, Scene, outcome, texts_of
from tests.unit.gateway.test_weights import keep
from tinsmith.gateway.openai import generation
from tinsmith.gateway.openai.sessions import FACE, MAX_AGE_MS
from tinsmith.lifecycle.sessions import SessionSweep
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.futures import FutureRecord, Outcome, State
from tinsmith.protocol.sessions import BaseModelInfo, CheckpointKind, SessionRecord
from tinsmith.state.audit import AuditEvent, AuditLog
from tinsmith.state.days import day_of
from tinsmith.state.inbox import SampleAbort
from tinsmith.state.lanes import Role, work_topic

PATH = "/completions"


async def leave(asking: "asyncio.Task[httpx.Response]") -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_ends_its_sample(scene: Scene, stream: bool) -> None:
    asking = scene.begin(PATH, prompt=[5], stream=stream)
    entry, _ = await scene.take()
    await leave(asking)
    assert await scene.aborts() == [SampleAbort(rid=entry.rid)]
    services = scene.face.services
    assert services.streams.num_open == services.polls.num_waiting == 0


async def test_a_connection_that_closes_ends_its_sample(scene: Scene) -> None:
    """As a server tells it: the app's task is not cancelled."""
    has_left = asyncio.Event()
    sent: list[dict[str, Any]] = []
    body = b'{"model": "org/tiny", "prompt": [5]}'
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b"", "headers": headers}
    running = asyncio.create_task(scene.face.app(scope | {"http_version": "1.1", "scheme": "http", "client": None}, receive, send))
    entry, _ = await scene.take()
    has_left.set()
    async with asyncio.timeout(WAIT_S):
        await running
    assert await scene.aborts() == [SampleAbort(rid=entry.rid)]
    assert sent[0]["status"] == 499


async def test_an_answer_that_is_whole_aborts_nothing(scene: Scene) -> None:
    await scene.answer(PATH, scene.drawn(" a"), prompt=[5])
    await scene.events(PATH, scene.drawn(" a"), prompt=[5])
    assert await scene.aborts(0.01) == []
    assert scene.face.services.streams.num_open == scene.face.services.polls.num_waiting == 0


async def test_a_prompt_that_fails_ends_the_others(scene: Scene) -> None:
    asking = scene.begin(PATH, prompt=[[5], [6]])
    (first, _), (second, _) = await scene.take(), await scene.take()
    await scene.face.lanes.pool_settle(SAMPLER.id, [(first, failed())])
    assert (await asking).status_code == 500
    assert await scene.aborts() == [SampleAbort(rid=second.rid)]


def failed() -> Outcome:
    return Outcome.failed(RuntimeError("a kernel failed"), is_tainted=False)


async def test_without_a_living_sampler_a_request_is_503_and_nothing_is_kept(tiny_model: BaseModelInfo) -> None:
    async with open_face(base=tiny(tiny_model)) as face:
        await face.lanes.renew(replace(SAMPLER, role=Role.TRAINER))
        for stream in (False, True):
            response = await face.http.post("/v1/completions", json={"model": BASE, "prompt": [5], "stream": stream})
            assert (response.status_code, response.json()["error"]["type"], response.headers["retry-after"]) == (503, "server_error", "1")
        assert await face.services.catalog.sessions("local") == []
        await face.lanes.renew(SAMPLER)
        assert await face.lanes.pool_take(BASE, SAMPLER.id, 9, 9) == []


async def test_a_tenant_over_its_rate_is_429_with_the_time_to_come_again(tiny_model: BaseModelInfo) -> None:
    async with open_face(base=tiny(tiny_model), limits={"requests_per_s": 0.5}) as face:
        scene = await scene_on(face, tiny_model)
        await scene.asked(PATH, prompt=[5])
        response = await scene.post(PATH, prompt=[[5], [6]])
        assert (response.status_code, response.headers["retry-after"]) == (429, "2")
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert await face.lanes.pool_take(BASE, SAMPLER.id, 9, 9) == []


async def test_a_gateway_that_stops_says_so(scene: Scene) -> None:
    asking = scene.begin(PATH, prompt=[5])
    await scene.take()
    scene.face.services.polls.end()
    response = await asking
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "this gateway stops" in response.json()["error"]["message"]


async def test_a_sample_that_outlives_the_bound_is_504_and_aborted(tiny_model: BaseModelInfo) -> None:
    async with open_face(base=tiny(tiny_model), execution={"long_poll_s": 1, "timeout_s": 0.2}) as face:
        scene = await scene_on(face, tiny_model)
        response = await scene.post(PATH, prompt=[5])
        assert response.status_code == 504
        assert "0.2 s" in response.json()["error"]["message"]
        assert await face.lanes.pool_take(BASE, SAMPLER.id, 9, 9) == [], "it was cancelled where it waited"


async def test_a_store_that_is_away_for_a_moment_costs_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PAUSE_S", 0.01)
    look, outages = scene.face.lanes.look, [StateContention("away")] * 2

    async def flaky(tenant: str, rid: str) -> FutureRecord | None:
        if outages:
            raise outages.pop()
        return await look(tenant, rid)

    monkeypatch.setattr(scene.face.lanes, "look", flaky)
    assert (await scene.answer(PATH, scene.drawn(" a"), prompt=[5]))["choices"][0]["text"] == " a"
    assert outages == []


async def test_a_sample_that_the_store_has_lost_is_503(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(tenant: str, rid: str) -> None: ...

    monkeypatch.setattr(scene.face.lanes, "look", nothing)
    response = await scene.post(PATH, prompt=[5])
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")


async def test_a_sample_that_was_run_again_and_drew_another_token_is_no_answer(scene: Scene) -> None:
    first, second = scene.drawn(" a b"), scene.drawn(" c b")
    asking = scene.begin(PATH, prompt=[5], stream=True)
    entry, _ = await scene.take()
    scene.hear(entry, 0, first.tokens[:1], [-1.0])
    for _ in range(5):
        await asyncio.sleep(0)
    await scene.settle(entry, outcome(second))
    assert '"error"' in (await asking).text
    assert "[DONE]" not in (await asking).text


# --- errors at large


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
async def test_paths_that_are_none_are_told_in_that_apis_form(scene: Scene, method: str, path: str, status: int) -> None:
    response = await scene.face.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "media_type"), [(b"{", "application/json"), (b"[]", "application/json"), (b"{}", "text/plain"), (b"{}", None)]
)
async def test_a_body_that_is_none_is_400(scene: Scene, content: bytes, media_type: str | None) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    response = await scene.face.http.post("/v1/completions", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_base_model_without_a_tokenizer_has_no_text() -> None:
    async with open_face() as face:
        response = await face.http.post("/v1/completions", json={"model": BASE, "prompt": [5]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


# --- the session of the face


async def scene_on(face: Face, info: BaseModelInfo) -> Scene:
    await face.lanes.renew(SAMPLER)
    face.services.renderers._read[BASE] = texts_of(info.path)
    return Scene(face, await face.lanes.tail([work_topic(BASE)]))


async def sessions(scene: Scene) -> list[SessionRecord]:
    return await scene.face.services.catalog.sessions("local")


async def test_all_requests_of_a_tenant_share_a_session_and_its_samplers(scene: Scene) -> None:
    held = await keep(scene.face, kind=CheckpointKind.SAMPLER)
    for model in (BASE, held.path, BASE, held.path):
        await scene.asked(PATH, prompt=[5], model=model)
    (session,) = await sessions(scene)
    assert (session.tags, session.tenant) == ([FACE], "local")
    noted = await AuditLog(scene.face.store, "local").day(day_of(session.created_ms))
    assert [entry.subject for entry in noted if entry.event is AuditEvent.SESSION_CREATE] == [session.session_id]
    assert len(await scene.face.services.catalog.samplers("local")) == 2


async def test_requests_that_come_at_once_share_it_too(scene: Scene) -> None:
    asking = [scene.begin(PATH, prompt=[5]) for _ in range(4)]
    for _ in asking:
        entry, _ = await scene.take()
        await scene.settle(entry, outcome(scene.drawn(" a")))
    assert {(await one).status_code for one in asking} == {200}
    live = {record.session_id for record in await sessions(scene)}
    used = {sampler.session_id for sampler in await scene.face.services.catalog.samplers("local")}
    assert used <= live


async def test_each_request_keeps_the_session_alive_and_silence_ends_it(scene: Scene) -> None:
    face = scene.face
    sweep = SessionSweep(face.store, face.lanes, holder="j", timeout_ms=300_000, stuck_ms=1 << 40, orphan_ms=1 << 40, lease_ms=1 << 40)
    await scene.asked(PATH, prompt=[5])
    await sweep.run()
    for _ in range(3):
        face.advance(200_000)
        await scene.asked(PATH, prompt=[5])
        report = await sweep.run()
        assert report is not None
        assert report.expired == ()
    (session,) = await sessions(scene)
    face.advance(300_001)
    report = await sweep.run()
    assert report is not None
    assert report.expired == (session.session_id,)
    await scene.asked(PATH, prompt=[5])
    assert len(await sessions(scene)) == 2


async def test_a_session_is_used_for_a_day_so_its_samplers_are_bounded(scene: Scene) -> None:
    await scene.asked(PATH, prompt=[5])
    scene.face.advance(MAX_AGE_MS - 1)
    await scene.asked(PATH, prompt=[5])
    assert len(await sessions(scene)) == 1
    scene.face.advance(1)
    await scene.asked(PATH, prompt=[5])
    assert len(await sessions(scene)) == 2


async def test_a_long_sample_keeps_its_session_alive(tiny_model: BaseModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_face(base=tiny(tiny_model), execution={"long_poll_s": 1, "session_timeout_s": 0.4}) as face:
        scene = await scene_on(face, tiny_model)
        asking = scene.begin(PATH, prompt=[5])
        entry, _ = await scene.take()
        (session,) = await sessions(scene)
        beat, is_heard = face.services.catalog.beat, asyncio.Event()

        async def heard(tenant: str, session_id: str, now_ms: int) -> None:
            await beat(tenant, session_id, now_ms)
            is_heard.set()

        monkeypatch.setattr(face.services.catalog, "beat", heard)
        face.advance(5_000)
        async with asyncio.timeout(WAIT_S):
            await is_heard.wait()
        assert await face.services.catalog.beats("local") == {session.session_id: face.clock[0]}
        await scene.settle(entry, outcome(scene.drawn(" a")))
        assert (await asking).status_code == 200


async def test_a_seeded_request_is_the_same_sample_each_time_under_another_id(scene: Scene) -> None:
    samples = []
    for _ in range(2):
        asking = scene.begin(PATH, prompt=[5], seed=-7, n=2)
        entry, sample = await scene.take()
        samples.append((entry.rid, sample))
        await scene.settle(entry, outcome(scene.drawn(" a"), scene.drawn(" b")))
        assert (await asking).json()["id"] == f"cmpl-{entry.rid}"
    (first, one), (second, other) = samples
    assert first != second
    assert one == other
    assert one.params.seed == -7


async def test_a_request_that_ended_before_it_ran_is_cancelled(scene: Scene) -> None:
    asking = scene.begin(PATH, prompt=[5])
    assert (await scene.face.lanes.wait(scene.cursors, WAIT_S)).events
    await leave(asking)
    entries = await scene.face.lanes.pool_take(BASE, SAMPLER.id, 9, 9)
    assert entries == []
    (record,) = [record for record in scene.face.lanes._futures._records.values() if record.tenant == "local"]
    assert record.state is State.CANCELLED
