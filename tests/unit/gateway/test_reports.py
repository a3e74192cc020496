"""Audit, usage and storage of a tenant."""

from typing import Any

import pytest

from tests.fakes.face import BASE, Face
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol.futures import Tally
from tinsmith.state.audit import AuditEntry, AuditEvent, note
from tinsmith.state.days import HOUR_MS
from tinsmith.state.usage import UsageBook, UsageKind, tallies

DAY = "starting_on=1970-01-01T00:00:00Z&ending_before=1970-01-02T00:00:00Z"


async def got(face: Face, path: str) -> dict[str, Any]:
    response = await face.http.get(f"/api/v1{path}")
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def add(face: Face, *added: Tally) -> None:
    face.store.apply(added)


async def test_the_audit_log_tells_of_sessions_and_models(face: Face):
    session_id = await face.session()
    model_id = await face.model(session_id)
    face.advance(5)
    for _ in range(2):
        await face.ok(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}})
        face.advance(5)
    entries = (await got(face, "/audit"))["entries"]
    assert [(entry["timestamp"], entry["event"], entry["event_details"]["subject"]) for entry in entries] == [
        ("1970-01-01T00:16:40.000Z", "model_create", model_id),
        ("1970-01-01T00:16:40.000Z", "session_create", session_id),
        ("1970-01-01T00:16:40.005Z", "session_end", session_id),
    ]
    assert entries[2]["event_details"]["reason"] == "success"


async def test_a_refused_model_leaves_no_line(face: Face):
    session_id = await face.session()
    await face.post("/create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": "nobody/has-it"})
    assert [entry["event"] for entry in (await got(face, "/audit"))["entries"]] == ["session_create"]


async def test_the_audit_log_is_read_by_day_and_resource(face: Face):
    path = "tinker://s:train:0/weights/n"
    for event, subject, details in (
        (AuditEvent.CHECKPOINT_PUBLISH, path, {"model_id": "s:train:0"}),
        (AuditEvent.PROJECT_SESSION_SET, "s", {}),
        (AuditEvent.KEY_ADD, "key-1", {}),
    ):
        await note(face.store, AuditEntry(tenant="local", at_ms=face.clock[0], event=event, subject=subject, details=details))
    await note(face.store, AuditEntry(tenant="other", at_ms=face.clock[0], event=AuditEvent.KEY_ADD, subject="theirs"))
    seen = {}
    for resource in ("all", "checkpoints", "projects", "teams", "organizations"):
        seen[resource] = [entry["event"] for entry in (await got(face, f"/audit?event_type={resource}&day=1970-01-01"))["entries"]]
    assert seen == {
        "all": ["checkpoint_publish", "key_add", "project_session_set"],
        "checkpoints": ["checkpoint_publish"],
        "projects": ["project_session_set"],
        "teams": [],
        "organizations": ["key_add"],
    }
    (entry,) = (await got(face, "/audit?event_type=checkpoints"))["entries"]
    assert (entry["model_id"], entry["tinker_path"]) == ("s:train:0", path)
    assert (await got(face, "/audit?day=1970-01-02"))["entries"] == []


@pytest.mark.parametrize(("query", "field"), [("event_type=x", "event_type"), ("day=yesterday", "day")])
async def test_a_bad_audit_query_is_refused_by_name(face: Face, query, field):
    refused = await face.http.get(f"/api/v1/audit?{query}")
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith(field)


async def test_usage_is_told_by_the_hour(face: Face):
    face.advance(HOUR_MS - face.clock[0] + 1)
    session_id = (await face.ok("/create_session", {"user_metadata": {"k": "v"}, "project_id": "p"}))["session_id"]
    add(face, *tallies("local", session_id, BASE, {UsageKind.TRAINING: 30, UsageKind.CHECKPOINT: 2}))
    add(face, *tallies("other", "theirs", BASE, {UsageKind.TRAINING: 99}))
    face.advance(HOUR_MS)
    amounts = {UsageKind.SAMPLING: 4, UsageKind.PREFILL: 7, UsageKind.CACHED_PREFILL: 1}
    add(face, *tallies("local", session_id, BASE, amounts), *tallies("local", "forgotten", BASE, {UsageKind.TRAINING: 5}))
    await UsageBook(face.store, "local").measure({BASE: 1_500_000_000}, face.clock[0])
    answer = await got(face, f"/billing/usage/events?{DAY}")
    rows = [(row["bucket_start"], row.get("session_id"), row["event_info"]) for row in answer["data"]]
    one, two = "1970-01-01T01:00:00.000Z", "1970-01-01T02:00:00.000Z"
    assert rows == [
        (one, session_id, {"type": "training", "token_count": 30}),
        (one, session_id, {"type": "checkpoint", "count": 2}),
        (two, session_id, {"type": "sampling_prefill", "cached": False, "token_count": 7}),
        (two, "forgotten", {"type": "training", "token_count": 5}),
        (two, session_id, {"type": "sampling_sample", "token_count": 4}),
        (two, session_id, {"type": "sampling_prefill", "cached": True, "token_count": 1}),
        (two, None, {"type": "storage", "free": False, "gigabyte_hours": 1.5}),
    ]
    assert answer["sessions"] == {session_id: {"user_metadata": {"k": "v"}}, "forgotten": {"user_metadata": None}}
    first = answer["data"][0]
    assert first["bucket_end"] == two
    assert (first["base_model"], first["user_id"], first["project_id"]) == (BASE, "tml:organization:local", "p")
    assert not [key for row in answer["data"] for key in row if "cost" in key or "rate" in key]


async def test_a_report_begins_with_its_first_hour_and_ends_before_its_last(face: Face):
    for _ in range(4):
        add(face, *tallies("local", "s", BASE, {UsageKind.TRAINING: 1}))
        face.advance(HOUR_MS)
    window = "starting_on=1970-01-01T01:00:00Z&ending_before=1970-01-01T05:00:00%2B02:00"
    data = (await got(face, f"/billing/usage/events?{window}"))["data"]
    assert [row["bucket_start"][11:13] for row in data] == ["01", "02"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("starting_on=1970-01-01T00:00:00Z", "ending_before"),
        ("starting_on=1970-01-01T00:30:00Z&ending_before=1970-01-01T01:00:00Z", "starting_on"),
        ("starting_on=1970-01-01T00:00:00Z&ending_before=1970-01-01T01:00:01Z", "ending_before"),
        ("starting_on=1970-01-01T00:00:00&ending_before=1970-01-01T01:00:00Z", "starting_on"),
        ("starting_on=1970-01-01T01:00:00Z&ending_before=1970-01-01T02:00:00Z", "starting_on"),
        ("starting_on=1970-01-01T00:00:00Z&ending_before=1970-01-01T00:00:00Z", "ending_before"),
        ("starting_on=1970-01-01T00:00:00Z&ending_before=1970-01-15T01:00:00Z", "ending_before"),
    ],
)
async def test_a_bad_window_is_refused_by_name(face: Face, query, field):
    refused = await face.http.get(f"/api/v1/billing/usage/events?{query}")
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith(field)


async def test_storage_is_told_by_project(face: Face):
    session_id = (await face.ok("/create_session", {"project_id": "p"}))["session_id"]
    await keep(face, session_id=session_id, name="a", size_bytes=10**9)
    await keep(face, session_id=session_id, name="b", size_bytes=5 * 10**8)
    await keep(face, session_id=session_id, name="gone", expires_ms=face.clock[0])
    await keep(face, session_id="unfiled", run_id="u", name="c", size_bytes=3)
    await keep(face, tenant="other", session_id=session_id, name="d", size_bytes=7)
    owner = "tml:organization:local"
    filed = {"project_id": "p", "org_user_urn": owner, "checkpoint_count": 2, "size_bytes": 1_500_000_000, "size_gigabytes": 1.5}
    unfiled = {"project_id": None, "org_user_urn": owner, "checkpoint_count": 1, "size_bytes": 3, "size_gigabytes": 3e-9}
    assert (await got(face, "/billing/usage/checkpoints/current"))["data"] == [filed, unfiled]
    assert (await got(face, "/billing/usage/checkpoints/current?project_id=p"))["data"] == [filed]
    assert (await got(face, "/billing/usage/checkpoints/current?project_id=q"))["data"] == []
