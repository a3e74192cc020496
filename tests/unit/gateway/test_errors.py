"""The one map from exceptions to answers."""

import asyncio
import json
import logging

import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request

from tests.fakes.face import Face
from tinsmith.gateway.errors import TINKER_STATUS, error_response, is_resent
from tinsmith.protocol.errors import LEAVES, EndpointUnavailable, ReasonCode, ValidationFailed
from tinsmith.protocol.futures import MAX_MESSAGE


@pytest.mark.proves("R17")
def test_every_reason_has_a_status():
    assert set(TINKER_STATUS) == set(ReasonCode)


@pytest.mark.proves("R13", "R15")
@pytest.mark.parametrize("leaf", LEAVES)
def test_an_answer_is_never_empty_and_never_looks_like_a_failed_future(leaf):
    answer = error_response(leaf("the message"))
    assert answer.status_code == (400 if leaf is EndpointUnavailable else leaf.status)
    assert b'"detail":"the message"' in answer.body
    assert b'"error"' not in answer.body


@pytest.mark.proves("R13")
def test_an_answer_is_one_line_of_bounded_length():
    detail = json.loads(error_response(ValidationFailed("a\nb " + "x" * 5000)).body)["detail"]
    assert (detail[:6], len(detail)) == ("a b xx", MAX_MESSAGE)


def test_what_clients_send_again_by_themselves():
    resent = {leaf.reason for leaf in LEAVES if is_resent(leaf("m"))}
    assert {ReasonCode.EXCLUSIVE_BUSY, ReasonCode.RATE_LIMIT_EXCEEDED, ReasonCode.RESOURCE_QUOTA_EXCEEDED} <= resent
    assert {ReasonCode.STATE_CONTENTION, ReasonCode.INTERNAL_ERROR} <= resent
    assert not resent & {ReasonCode.VALIDATION_FAILED, ReasonCode.ENDPOINT_UNAVAILABLE, ReasonCode.PAYLOAD_TOO_LARGE}


async def test_unknown_paths_and_methods_answer_in_json(face: Face):
    missing = await face.post("/no_such_route", {})
    assert (missing.status_code, missing.json()["reason"]) == (404, "resource_not_found")
    wrong = await face.http.get("/api/v1/optim_step")
    assert (wrong.status_code, wrong.json()["reason"]) == (405, "invalid_request")
    assert wrong.json()["detail"] == "GET /api/v1/optim_step: Method Not Allowed; use POST"


async def test_a_wrong_method_is_told_the_right_one_outside_of_both_protocols_too(face: Face):
    wrong = await face.http.post("/metrics")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert wrong.json()["detail"] == "POST /metrics: Method Not Allowed; use GET"


@pytest.mark.proves("R15")
async def test_a_defect_is_a_500_whose_text_stays_in_the_log(face: Face, caplog, monkeypatch):
    monkeypatch.setattr("tinsmith.gateway.errors.HOLD_S", 0.05)
    add_route(face.app, "/api/v1/broken", RuntimeError("the secret"))
    caplog.set_level(logging.DEBUG)
    started = asyncio.get_running_loop().time()
    answer = await face.post("/broken", {}, x_api_key="tml-very-secret")
    assert asyncio.get_running_loop().time() - started >= 0.05  # clients ask for a future again at once
    assert "tml-very-secret" not in caplog.text
    assert (answer.status_code, answer.json()["reason"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert "the secret" in caplog.text
    incident = answer.json()["detail"].split()[-1]
    assert incident in caplog.text


async def test_a_caller_that_went_away_is_no_defect(face: Face, caplog):
    add_route(face.app, "/api/v1/away", ClientDisconnect())
    caplog.set_level(logging.ERROR)
    assert (await face.post("/away", {})).status_code == 499
    assert not caplog.records


def add_route(app: FastAPI, path: str, error: Exception) -> None:
    async def fail(_: Request) -> None:
        raise error

    app.add_route(path, fail, methods=["POST"])


@pytest.mark.proves("R49")
async def test_the_openapi_document_builds(face: Face):
    paths = (await face.http.get("/openapi.json")).json()["paths"]
    assert "/native/v1/forward_backward" in paths
    assert all(path.startswith("/native/v1/") for path in paths)
