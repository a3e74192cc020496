"""Failures on the native protocol: one payload, one map, an id for every request."""

import json
import logging

import pytest
from starlette.requests import ClientDisconnect

from tests.fakes.face import Face
from tests.unit.gateway.native.bodies import ROUTES
from tests.unit.gateway.test_errors import add_route
from tinsmith import telemetry
from tinsmith.gateway.errors import NATIVE_STATUS, TINKER_STATUS, payload_response
from tinsmith.protocol.envelopes import ErrorPayload
from tinsmith.protocol.errors import LEAVES, EndpointUnavailable, GateUnavailable, RateLimited, ReasonCode, ValidationFailed
from tinsmith.protocol.futures import MAX_MESSAGE
from tinsmith.protocol.native import PREFIX


@pytest.mark.proves("R17")
def test_every_reason_has_a_native_status_of_its_own_leaf():
    assert set(NATIVE_STATUS) == set(ReasonCode)
    assert all(NATIVE_STATUS[leaf.reason] == leaf.status for leaf in LEAVES)


@pytest.mark.proves("R16", "R17")
def test_what_this_server_never_does_is_501_here_and_400_where_clients_repeat_a_5xx():
    assert (NATIVE_STATUS[EndpointUnavailable.reason], TINKER_STATUS[EndpointUnavailable.reason]) == (501, 400)
    assert {reason for reason in ReasonCode if NATIVE_STATUS[reason] != TINKER_STATUS[reason]} == {EndpointUnavailable.reason}


@pytest.mark.proves("R13", "R14", "R15")
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_payload_s_fields_lie_at_the_top_level(leaf):
    body = json.loads(payload_response(leaf("a\nb " + "x" * 5000), "the-id").body)
    assert set(body) == set(ErrorPayload.model_fields)
    assert (body["error"][:6], len(body["error"])) == ("a b xx", MAX_MESSAGE)
    assert (body["error_code"], body["reason"], body["request_id"], body["traceback"]) == (leaf.status, leaf.reason.value, "the-id", None)
    assert body["category"] in ("user", "server", "unknown")


@pytest.mark.proves("R13")
def test_the_faults_of_a_body_are_its_details():
    assert json.loads(payload_response(ValidationFailed("two", ["a: 1", "b: 2"]), "i").body)["details"] == ["a: 1", "b: 2"]


@pytest.mark.parametrize(("error", "seconds"), [(RateLimited("m", 3.2), "4"), (RateLimited("m"), "1"), (GateUnavailable("m"), "1")])
def test_429_and_503_tell_when_to_come_again(error, seconds):
    assert payload_response(error, "i").headers["retry-after"] == seconds


def test_other_refusals_do_not():
    assert "retry-after" not in payload_response(ValidationFailed("m"), "i").headers


@pytest.mark.proves("R19")
async def test_unknown_paths_and_wrong_methods_are_payloads(face: Face):
    for path in ("/no_such_route", "", "/"):
        missing = await face.http.post(PREFIX + path, json={})
        assert (missing.status_code, missing.json()["reason"], missing.json()["error_code"]) == (404, "resource_not_found", 404)
    wrong = await face.http.get(f"{PREFIX}/optim_step")
    assert (wrong.status_code, wrong.json()["error_code"], wrong.headers["allow"]) == (405, 405, "POST")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "TRACE"])
async def test_a_method_that_a_route_has_not_is_405_also_without_a_body(face: Face, method):
    answer = await face.http.request(method, f"{PREFIX}/status")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.proves("R19")
@pytest.mark.parametrize(("headers", "status"), [({"host": "evil.example"}, 400), ({"content-type": "text/plain"}, 400)])
async def test_refusals_before_any_route_are_payloads(face: Face, headers, status):
    answer = await face.http.post(f"{PREFIX}/optim_step", content=b"{}", headers={"content-type": "application/json"} | headers)
    assert (answer.status_code, answer.json()["error_code"], answer.json()["request_id"]) == (
        status,
        status,
        answer.headers["x-request-id"],
    )


@pytest.mark.proves("R15", "R19")
async def test_a_defect_is_a_payload_whose_text_stays_in_the_log_under_the_request_id(face: Face, caplog, monkeypatch):
    monkeypatch.setattr("tinsmith.gateway.errors.HOLD_S", 0)
    add_route(face.app, f"{PREFIX}/broken", RuntimeError("the secret"))
    answer = await face.http.post(f"{PREFIX}/broken", json={})
    payload = answer.json()
    assert (answer.status_code, payload["reason"], payload["traceback"]) == (500, "internal_error", None)
    assert "the secret" not in answer.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.request_id == payload["request_id"] == answer.headers["x-request-id"]
    assert "the secret" in caplog.text


async def test_a_caller_that_went_away_is_no_defect(face: Face, caplog):
    add_route(face.app, f"{PREFIX}/away", ClientDisconnect())
    answer = await face.http.post(f"{PREFIX}/away", json={})
    assert (answer.status_code, answer.json()["reason"]) == (499, "cancelled")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_every_request_has_an_id_of_its_own_on_every_face(face: Face):
    paths = (f"{PREFIX}/capabilities", "/api/v1/get_server_capabilities", "/healthz", "/nowhere")
    named = [(await face.http.get(path)).headers["x-request-id"] for path in paths for _ in range(2)]
    assert len(set(named)) == len(named)
    assert all(len(request_id) == 32 for request_id in named)


async def test_log_lines_of_a_request_carry_its_id(face: Face):
    seen: list[str | None] = []

    async def look(_: object) -> None:
        seen.append(telemetry.current_request())
        raise ValidationFailed("m")

    face.app.add_route(f"{PREFIX}/look", look, methods=["POST"])
    answer = await face.http.post(f"{PREFIX}/look", json={})
    assert seen == [answer.json()["request_id"]]


# The document.


@pytest.mark.proves("R49")
async def test_the_document_names_body_answer_and_refusals_of_every_route(face: Face):
    document = (await face.http.get("/openapi.json")).json()
    names = document["components"]["schemas"]
    assert {path for path, operations in document["paths"].items() if "post" in operations} == {PREFIX + path for path in ROUTES}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"]["200"]["content"]
            assert all(media["schema"] for media in content.values()), path
            assert {"4XX", "5XX"} <= set(operation["responses"])
            if method == "post":
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                assert schema == {"$ref": f"#/components/schemas/{ROUTES[path.removeprefix(PREFIX)].__name__}"}
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in names, reference
    assert all(names[request.__name__]["additionalProperties"] is False for request in ROUTES.values())


def references(tree: object) -> list[str]:
    if isinstance(tree, dict):
        own = [value for key, value in tree.items() if key == "$ref"]
        return own + [found for value in tree.values() for found in references(value)]
    return [found for part in tree for found in references(part)] if isinstance(tree, list) else []
