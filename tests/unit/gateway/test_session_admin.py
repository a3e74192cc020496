"""Listing, looking up, searching and moving sessions."""

from typing import Any

import pytest

from tests.fakes.face import BASE, Face
from tests.unit.gateway.test_weights import keep
from tinsmith.lifecycle.sessions import EXPIRED, end_session
from tinsmith.protocol.sessions import SessionRecord
from tinsmith.state.audit import AuditEvent, AuditLog
from tinsmith.state.days import day_of

FOREIGN, UNKNOWN = "theirs", "nobody"  # of one length, as the answers quote them


async def furnish(face: Face) -> None:
    """A session of another tenant, with a checkpoint."""
    await face.services.catalog.add_session(SessionRecord(tenant="other", session_id=FOREIGN, created_ms=0))
    await keep(face, tenant="other", session_id=FOREIGN, run_id=FOREIGN)


async def opened(face: Face, **body: object) -> str:
    return str((await face.ok("/create_session", body))["session_id"])


async def search(face: Face, **body: object) -> list[str]:
    return [found["session_id"] for found in (await face.ok("/sessions/search", body))["sessions"]]


async def listed(face: Face, query: str = "") -> list[str]:
    response = await face.http.get(f"/api/v1/sessions{query}")
    assert response.status_code == 200, response.text
    ids: list[str] = response.json()["sessions"]
    return ids


async def three(face: Face) -> list[str]:
    """Oldest first, each of its own moment."""
    sessions = []
    for _ in range(3):
        face.advance(10)
        sessions.append(await opened(face))
    return sessions


async def test_sessions_are_listed_newest_first_in_pages(face: Face):
    await furnish(face)
    first, second, third = await three(face)
    assert await listed(face) == [third, second, first]
    assert await listed(face, "?limit=2&offset=0&access_scope=accessible") == [third, second]
    assert await listed(face, "?limit=2&offset=2") == [first]
    assert await listed(face, "?offset=3") == []


@pytest.mark.parametrize(
    ("query", "field"), [("limit=1001", "limit"), ("limit=-1", "limit"), ("offset=x", "offset"), ("access_scope=all", "access_scope")]
)
async def test_a_bad_page_is_refused_by_name(face: Face, query, field):
    refused = await face.http.get(f"/api/v1/sessions?{query}")
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith(f"{field}: ")


async def test_a_session_names_its_runs_and_samplers(face: Face):
    session_id = await opened(face, user_metadata={"k": "v"}, display_name="nightly")
    other = await opened(face)
    models = [await face.model(session_id), await face.model(session_id, model_seq_id=1)]
    await face.model(other)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler_id = (await face.ok("/create_sampling_session", sampler))["sampling_session_id"]
    answer = (await face.http.get(f"/api/v1/sessions/{session_id}?access_scope=owned")).json()
    assert answer == {
        "training_run_ids": models,
        "sampler_ids": [sampler_id],
        "user_metadata": {"k": "v"},
        "display_name": "nightly",
    }


async def test_a_session_is_moved_to_a_project(face: Face):
    session_id = await opened(face)
    for project in ("alpha", "beta"):
        face.advance(1)
        moved = await face.http.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": project})
        assert (moved.status_code, moved.json()) == (200, {})
    assert await search(face, project_ids=["alpha"]) == []
    assert await search(face, project_ids=["beta"]) == [session_id]
    entries = await AuditLog(face.store, "local").day(day_of(face.clock[0]))
    assert (entries[-1].event, entries[-1].details) == (AuditEvent.PROJECT_SESSION_SET, {"project_id": "beta"})


@pytest.mark.parametrize("body", [{}, {"project_id": "../x"}, {"project_id": ""}, {"project_id": "x" * 2000}])
async def test_a_project_must_have_a_name(face: Face, body):
    session_id = await opened(face)
    before = face.num_kept()
    refused = await face.http.put(f"/api/v1/sessions/{session_id}/project", json=body)
    assert refused.status_code == 422
    assert "project_id" in refused.json()["detail"]
    assert face.num_kept() == before


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", "/sessions/ID", None), ("PUT", "/sessions/ID/project", {"project_id": "p"}), ("GET", "/sessions/ID/trace_export", None)],
)
async def test_a_foreign_session_is_an_unknown_one(face: Face, method, path, body):
    await furnish(face)
    answers = []
    for session_id in (FOREIGN, UNKNOWN):
        answer = await face.http.request(method, "/api/v1" + path.replace("ID", session_id), json=body)
        answers.append((answer.status_code, answer.text.replace(session_id, "ID")))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


async def test_a_search_finds_the_caller_s_sessions_alone(face: Face):
    await furnish(face)
    session_id = await opened(face)
    mine, theirs = "tml:organization:local", "tml:organization:other"
    for owner in ({"type": "own"}, {"type": "accessible"}, {"type": "user", "owner_urns": [theirs, mine]}):
        assert await search(face, owner=owner) == [session_id]
    assert await search(face, owner={"type": "user", "owner_urns": [theirs]}) == []
    assert await search(face, session_id=FOREIGN) == []
    assert await search(face) == [session_id]


async def test_a_search_filters(face: Face):
    nightly = await opened(face, display_name="Nightly run A", user_metadata={"team": "x", "n": 1}, project_id="p")
    face.advance(1)
    other = await opened(face, display_name="other", user_metadata={"team": "x"})
    face.advance(1)
    bare = await opened(face)
    assert await search(face) == [bare, other, nightly]
    assert await search(face, display_name="a NIGHT") == [nightly]
    assert await search(face, display_name="night b") == []
    assert await search(face, user_metadata={"team": "x"}) == [other, nightly]
    assert await search(face, user_metadata={"team": "x", "n": "1"}) == [nightly]
    assert await search(face, project_ids=["p"]) == [nightly]
    assert await search(face, project_ids=["default"]) == [bare, other]
    assert await search(face, project_ids=["p", "nobody's"]) == [nightly]
    assert await search(face, session_id=bare) == [bare]
    assert await search(face, session_id=bare, display_name="nightly") == [bare, nightly]
    assert await search(face, session_id=bare, project_ids=["p"]) == []


async def test_a_search_goes_through_sessions_of_one_moment_page_by_page(face: Face):
    sessions = {await opened(face) for _ in range(5)}
    face.advance(1)
    newest = await opened(face)
    found: list[str] = []
    cursor: dict[str, Any] | None = None
    for _ in range(3):
        page = await face.ok("/sessions/search", {"limit": 2, "cursor": cursor})
        found += [session["session_id"] for session in page["sessions"]]
        cursor = page.get("next_cursor")
        await opened(face)  # what begins meanwhile shifts nothing
        face.advance(1)
    assert cursor is None
    assert found[0] == newest
    assert found[1:] == sorted(sessions, reverse=True)


async def test_the_status_says_how_a_session_ended(face: Face):
    active, finished, silent = [await opened(face) for _ in range(3)]
    await face.ok(f"/sessions/{finished}/finish", {"reason": {"type": "errored"}})
    await end_session(face.services.catalog, face.lanes, "local", silent, reason=EXPIRED, now_ms=face.clock[0])
    page = (await face.ok("/sessions/search", {}))["sessions"]
    assert {found["session_id"]: found["status"] for found in page} == {
        active: {"type": "active"},
        finished: {"type": "client_finished", "reason": {"type": "errored"}},
        silent: {"type": "cancelled", "detail": "expired"},
    }
    assert await search(face, statuses=[{"type": "active"}]) == [active]
    assert await search(face, statuses=[{"type": "cancelled"}]) == [silent]
    assert await search(face, statuses=[{"type": "failed"}]) == []
    assert await search(face, statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
    two = [{"type": "client_finished", "reasons": ["success", "errored"]}, {"type": "active"}]
    assert set(await search(face, statuses=two)) == {active, finished}


async def test_a_summary_counts_the_checkpoints_that_have_not_expired(face: Face):
    session_id = await opened(face, project_id="p", display_name="d", user_metadata={"k": "v"})
    for name, changes in (("a", {}), ("b", {"size_bytes": None}), ("gone", {"expires_ms": face.clock[0]})):
        await keep(face, session_id=session_id, name=name, **({"size_bytes": 5} | changes))
    await keep(face, session_id="another", name="c")
    (summary,) = (await face.ok("/sessions/search", {}))["sessions"]
    assert summary == {
        "session_id": session_id,
        "created_at": "1970-01-01T00:16:40.000Z",
        "owner": "tml:organization:local",
        "project_id": "p",
        "status": {"type": "active"},
        "checkpoints_count": 2,
        "checkpoint_storage_bytes": 5,
        "display_name": "d",
        "user_metadata": {"k": "v"},
    }


@pytest.mark.parametrize(
    "body",
    [
        {"limit": 0},
        {"limit": 201},
        {"display_name": ""},
        {"owner": {"type": "everyone"}},
        {"owner": {"type": "user", "owner_urns": []}},
        {"statuses": []},
        {"statuses": [{"type": "lost"}]},
        {"statuses": [{"type": "client_finished", "reasons": ["bored"]}]},
        {"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}},
        {"user_metadata": {"k": 1}},
    ],
)
async def test_a_bad_search_is_refused_by_name(face: Face, body):
    refused = await face.post("/sessions/search", body)
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith(next(iter(body)))
