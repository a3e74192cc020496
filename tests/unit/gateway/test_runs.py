"""Training runs over REST."""

from typing import Any

import pytest

from tests.fakes.face import BASE, Face
from tests.unit.gateway.test_checkpoints import THEIRS, get, run_of, theirs
from tests.unit.gateway.test_weights import keep
from tinsmith.protocol.sessions import CheckpointKind


async def runs(face: Face, query: str = "") -> list[dict[str, Any]]:
    response = await get(face, f"/training_runs{query}")
    assert response.status_code == 200, response.text
    listed: list[dict[str, Any]] = response.json()["training_runs"]
    return listed


async def test_a_run_as_the_wire_has_it(face: Face):
    session_id = await face.session()
    model_id = await face.model(session_id, user_metadata={"k": "v"})
    await keep(face, run_id=model_id, name="old", created_ms=1)
    await keep(face, run_id=model_id, name="new", created_ms=2)
    await keep(face, run_id=model_id, name="s", kind=CheckpointKind.SAMPLER, created_ms=3)
    await keep(face, run_id=model_id, name="e", kind=CheckpointKind.EXTERNAL, created_ms=4)
    face.advance(5_000)
    await face.ok("/session_heartbeat", {"session_id": session_id})
    run = (await get(face, f"/training_runs/{model_id}?access_scope=owned")).json()
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/new"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/s"
    assert run | {"last_checkpoint": None, "last_sampler_checkpoint": None} == {
        "training_run_id": model_id,
        "base_model": BASE,
        "model_owner": "tml:organization:local",
        "is_lora": True,
        "corrupted": False,
        "lora_rank": 8,
        "last_request_time": "1970-01-01T00:16:45.000Z",
        "last_checkpoint": None,
        "last_sampler_checkpoint": None,
        "user_metadata": {"k": "v"},
    }
    assert await runs(face) == [run]


async def test_an_ended_run_ends_its_times_with_its_end(face: Face):
    await run_of(face, "local", "s:train:0", created_ms=1_000, ended_ms=9_000)
    (run,) = await runs(face)
    assert run["last_request_time"] == "1970-01-01T00:00:09.000Z"
    assert (run["last_checkpoint"], run["last_sampler_checkpoint"]) == (None, None)


async def test_runs_are_newest_first_and_come_in_pages(face: Face):
    for number in range(5):
        await run_of(face, "local", f"s:train:{number}", created_ms=number)
    body = (await get(face, "/training_runs?limit=2&offset=1")).json()
    assert [run["training_run_id"] for run in body["training_runs"]] == ["s:train:3", "s:train:2"]
    assert body["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}


async def test_runs_of_a_project(face: Face):
    inside = (await face.ok("/create_session", {"project_id": "p"}))["session_id"]
    of_project, of_none = await face.model(inside), await face.model()
    assert [run["training_run_id"] for run in await runs(face, "?project_id=p")] == [of_project]
    assert [run["training_run_id"] for run in await runs(face, "?project_id=default")] == [of_none]
    assert await runs(face, "?project_id=q&access_scope=accessible") == []


async def test_runs_of_others_are_seen_where_something_of_them_is_published(face: Face):
    held = await theirs(face, created_ms=7_000)
    await theirs(face, name="private", created_ms=8_000)
    assert await runs(face, "?access_scope=accessible") == []
    await face.services.publications.publish(held)
    assert await runs(face) == []
    (run,) = await runs(face, "?access_scope=accessible")
    assert run["training_run_id"] == THEIRS
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/n"
    assert run["last_request_time"] == "1970-01-01T00:00:07.000Z"
    assert run["user_metadata"] is None, "what the owner noted about the run was not published"
    assert (await get(face, f"/training_runs/{THEIRS}")).status_code == 404
    assert (await get(face, f"/training_runs/{THEIRS}?access_scope=accessible")).json() == run


@pytest.mark.parametrize("query", ["access_scope=all", "limit=-1", "offset=x"])
async def test_a_query_that_is_none(face: Face, query: str):
    answer = await get(face, f"/training_runs?{query}")
    assert answer.status_code == 422
    assert query.partition("=")[0] in answer.json()["detail"]
