"""Sessions, capabilities and configuration."""

import pytest

from tests.fakes.face import BASE, Face


async def test_capabilities_name_the_served_models(face: Face):
    answer = (await face.http.get("/api/v1/get_server_capabilities")).json()
    assert answer == {"supported_models": [{"model_name": BASE, "max_context_length": 64, "trainable": True, "sampleable": True}]}


async def test_client_configuration(face: Face):
    flags = await face.ok("/client/config", {"sdk_version": "0.38.0"})
    assert flags["parallel_fwdbwd_chunks"] is True
    assert flags["pjwt_auth_enabled"] is False
    assert (await face.ok("/client/dynamic_config", {"sdk_version": "0.38.0"}))["sample_cancel_enabled"] is True


async def test_health_answers_with_and_without_the_prefix(face: Face):
    for path in ("/healthz", "/api/v1/healthz"):
        assert (await face.http.get(path)).json() == {"status": "ok"}


async def test_telemetry_is_dropped(face: Face):
    assert await face.ok("/telemetry", {"events": [{"event_data": {"X-API-Key": "k"}}]}) == {"status": "accepted"}


@pytest.mark.proves("R69")
async def test_a_session_remembers_what_it_was_told(face: Face):
    body = {"tags": ["a"], "user_metadata": {"n": 1, "s": "t"}, "sdk_version": "0.38.0", "display_name": "d", "newer": 1}
    session_id = (await face.ok("/create_session", body))["session_id"]
    record = await face.services.catalog.session("local", session_id)
    assert (record.tags, record.user_metadata, record.display_name) == (["a"], {"n": "1", "s": "t"}, "d")
    bare = (await face.ok("/create_session", {}))["session_id"]
    assert bare != session_id


@pytest.mark.parametrize(
    "body",
    [{"tags": ["x" * 2000]}, {"tags": ["x"] * 65}, {"user_metadata": {"k": "x" * 20_000}}, {"display_name": "x" * 2000}, {"tags": "a"}, []],
)
async def test_bad_sessions_are_refused(face: Face, body):
    assert (await face.post("/create_session", body)).status_code == 422


async def test_a_heartbeat_keeps_a_session(face: Face):
    session_id = await face.session()
    face.advance(5000)
    assert await face.ok("/session_heartbeat", {"session_id": session_id}) == {"type": "session_heartbeat"}
    assert await face.services.catalog.beats("local") == {session_id: face.clock[0]}


async def test_a_heartbeat_of_an_unknown_session_is_404(face: Face):
    assert (await face.post("/session_heartbeat", {"session_id": "nope"})).status_code == 404


@pytest.mark.proves("R67")
async def test_finish_ends_the_session_once(face: Face):
    session_id = await face.session()
    await face.model(session_id)
    assert await face.ok(f"/sessions/{session_id}/finish", {"reason": {"type": "errored"}, "detail": "x"}) == {}
    assert await face.ok(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None}) == {}
    record = await face.services.catalog.session("local", session_id)
    assert record.end_reason == "errored"
    assert (await face.post("/session_heartbeat", {"session_id": session_id})).status_code == 410
    refused = await face.post("/create_model", {"session_id": session_id, "model_seq_id": 1, "base_model": BASE})
    assert (refused.status_code, refused.json()["reason"]) == (410, "session_ended")


async def test_finish_refuses_what_it_does_not_know(face: Face):
    assert (await face.post("/sessions/nope/finish", {})).status_code == 404
    session_id = await face.session()
    assert (await face.post(f"/sessions/{session_id}/finish", {"reason": {"type": "bored"}})).status_code == 422
