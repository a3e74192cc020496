"""A checkpoint, run or link of another tenant is an unknown one: the same answer after the same number of store operations."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.face import PREFIX, Face
from tests.unit.gateway.test_checkpoints import THEIRS, theirs
from tests.unit.gateway.test_weights import keep

UNKNOWN = "nobody:train:0"  # of the length of THEIRS, as the answers quote them
CKPT = "/training_runs/ID/checkpoints/weights/n"


async def counted(face: Face, method: str, path: str, body: object) -> tuple[Any, ...]:
    operations: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "put", "list", "delete", "now_ms"):
            run = getattr(face.store, name)
            patch.setattr(
                face.store, name, lambda *args, run=run, name=name, **options: (operations.append(name), run(*args, **options))[1]
            )
        answer: httpx.Response = await face.http.request(method, PREFIX + path, json=body)
    headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
    return answer.status_code, headers, answer.text, operations


@pytest.mark.parametrize("has_publications", [False, True])
@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("GET", "/training_runs/ID", None),
        ("GET", "/training_runs/ID?access_scope=accessible", None),
        ("GET", "/training_runs/ID/checkpoints", None),
        ("DELETE", CKPT, None),
        ("POST", f"{CKPT}/publish", None),
        ("DELETE", f"{CKPT}/publish", None),
        ("PUT", f"{CKPT}/ttl", {"ttl_seconds": None}),
        ("GET", f"{CKPT}/archive", None),
        ("GET", CKPT.replace("weights", "external_weights") + "/external_weights_urls", None),
        ("POST", "/weights_info", {"tinker_path": "tinker://ID/weights/n"}),
        ("POST", "/copy_weights", {"source_path": "tinker://ID/weights/n", "session_id": "SESSION", "model_seq_id": 0}),
        ("POST", "/copy_weights", {"source_path": "tinker://own/weights/n", "session_id": "ID", "model_seq_id": 0}),
        ("POST", "/save_weights_external", {"model_id": "ID", "seq_id": 1, "path": "n"}),
    ],
)
async def test_a_foreign_id_is_an_unknown_id(face: Face, method: str, route: str, body: dict[str, object] | None, has_publications: bool):
    await theirs(face)
    if has_publications:
        other = await keep(face, tenant="third", run_id="third:train:0")
        await face.services.publications.publish(other)
    session_id = await face.session()
    answers = []
    for name in (THEIRS, UNKNOWN):

        def filled(value: object, name: str = name) -> object:
            return value.replace("ID", name).replace("SESSION", session_id) if isinstance(value, str) else value

        asked = None if body is None else {key: filled(value) for key, value in body.items()}
        status, headers, text, operations = await counted(face, method, str(filled(route)), asked)
        answers.append((status, headers, re.sub(re.escape(name), "ID", text), operations))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


async def test_a_link_to_anothers_artifact_is_a_link_to_nothing(face: Face, tmp_path: Path):
    held = await theirs(face)
    query = "tenant=other&expires=1500&key=k&signature=" + "0" * 64
    answers = [await face.http.get(f"{PREFIX}/downloads/files/{artifact}/f?{query}") for artifact in (held.artifact, "nothing")]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.text for answer in answers}) == 1
