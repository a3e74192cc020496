"""The trace of a session, and the link to it."""

from typing import Any

import pytest

from tests.fakes.face import BASE, Face
from tests.unit.gateway.test_sampling import body_of
from tinsmith.protocol.errors import Category, ReasonCode
from tinsmith.protocol.futures import Failure, Outcome


async def exported(face: Face, session_id: str) -> str:
    answer = (await face.http.get(f"/api/v1/sessions/{session_id}/trace_export")).json()
    assert answer["status"] == "ready"
    url: str = answer["url"]
    return url


async def trace(face: Face, session_id: str) -> list[dict[str, Any]]:
    response = await face.http.get(await exported(face, session_id))
    assert response.status_code == 200, response.text
    events: list[dict[str, Any]] = response.json()["traceEvents"]
    return events


def spans(events: list[dict[str, Any]], track: str) -> list[tuple[str, int, int]]:
    """(name, begin, end) in ms of a track's spans, in the order of their beginnings; each lies inside of the one around it."""
    (pid,) = [event["pid"] for event in events if event["ph"] == "M" and event["args"]["name"] == track]
    found: list[tuple[str, int, int]] = []
    open_spans: list[tuple[str, int]] = []
    for event in events:
        if event["pid"] == pid and event["ph"] in "be":
            if event["ph"] == "b":
                open_spans.append((event["name"], len(found)))
                found.append((event["name"], event["ts"] // 1000, -1))
            else:
                name, index = open_spans.pop()
                assert name == event["name"]
                found[index] = (name, found[index][1], event["ts"] // 1000)
    assert not open_spans
    return found


async def test_a_trace_shows_waits_and_runs_by_model_and_sampler(face: Face):
    start = face.clock[0]
    session_id = await face.session()
    model_id = await face.model(session_id)
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler_id = (await face.ok("/create_sampling_session", sampler))["sampling_session_id"]
    face.advance(10)
    await face.ok("/asample", body_of(sampler_id))
    await face.take(model_id)
    face.advance(5)
    await face.settle(model_id, 0, Outcome(result=b"{}"))
    await face.ok("/optim_step", {"model_id": model_id, "seq_id": 1})
    face.advance(1)
    await face.take(model_id, 1)
    face.advance(1)
    failure = Failure(reason=ReasonCode.INTERNAL_ERROR, message="m", category=Category.SERVER)
    await face.settle(model_id, 1, Outcome(failure=failure))
    face.advance(3)
    events = await trace(face, session_id)
    assert spans(events, model_id) == [
        ("create_model", start, start + 15),
        ("wait", start, start + 10),
        ("run", start + 10, start + 15),
        ("optim_step", start + 15, start + 17),
        ("wait", start + 15, start + 16),
        ("run", start + 16, start + 17),
    ]
    assert spans(events, sampler_id) == [("sample", start + 10, start + 20), ("wait", start + 10, start + 20)]
    (failed,) = [event["args"] for event in events if event.get("args", {}).get("state") == "failed"]
    assert failed["reason"] == "internal_error"


async def test_a_trace_holds_one_session_alone(face: Face):
    first, second = await face.session(), await face.session()
    await face.model(first)
    await face.model(second)
    tracks = [event["args"]["name"] for event in await trace(face, first) if event["ph"] == "M"]
    assert tracks == [f"{first}:train:0"]


@pytest.mark.parametrize("change", ["signature", "tenant", "session", "none"])
async def test_a_link_that_was_not_signed_so_is_unknown(face: Face, change):
    session_id, other = await face.session(), await face.session()
    url = await exported(face, session_id)
    changed = {
        "signature": url[:-1] + ("0" if url[-1] != "0" else "1"),
        "tenant": url.replace("tenant=local", "tenant=other"),
        "session": url.replace(session_id, other),
        "none": url.partition("?")[0],
    }[change]
    assert (await face.http.get(changed)).status_code == 404


async def test_a_link_ends_after_an_hour(face: Face):
    url = await exported(face, await face.session())
    face.advance(3599 * 1000)
    assert (await face.http.get(url)).status_code == 200
    face.advance(1000)
    assert (await face.http.get(url)).status_code == 404
