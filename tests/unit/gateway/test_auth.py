"""Open mode: who may reach a loopback port."""

import logging

import pytest

from tests.fakes.face import open_face
from tinsmith.gateway.auth import MAX_HEAD, MAX_HEADERS
from tinsmith.protocol.native import PREFIX


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:8700", "[::1]"])
async def test_our_hosts_are_served(face, host):
    assert (await face.http.get("/healthz", headers={"host": host})).json() == {"status": "ok"}


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]"])
async def test_other_hosts_are_refused_on_every_path(face, host):
    for path in ("/healthz", "/no/such/path"):
        answer = await face.http.get(path, headers={"host": host})
        assert answer.status_code == 400
        assert answer.json()["reason"] == "request_rejected"
        assert "allowed_hosts" in answer.json()["detail"]


async def test_a_web_page_is_refused(face):
    answer = await face.post("/create_session", {}, origin="http://evil.example")
    assert answer.status_code == 400
    assert "allowed_origins" in answer.json()["detail"]


async def test_a_listed_origin_is_served():
    async with open_face(gateway={"allowed_origins": ["http://app.example"]}) as face:
        assert (await face.post("/create_session", {}, origin="http://app.example")).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
async def test_a_body_declares_what_a_form_cannot(face, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await face.http.post("/api/v1/create_session", content=b"{}", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["reason"] == "invalid_request"
    assert "Content-Type" in answer.json()["detail"]


async def test_parameters_of_the_content_type_are_ignored(face):
    answer = await face.http.post("/api/v1/create_session", content=b"{}", headers={"content-type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200


async def test_a_key_is_neither_needed_nor_logged(face, caplog):
    caplog.set_level(logging.DEBUG)
    await face.post("/create_session", {}, x_api_key="tml-very-secret")
    await face.post("/no_such_route", {}, x_api_key="tml-very-secret")
    assert "tml-very-secret" not in caplog.text


@pytest.mark.parametrize(
    ("query", "headers", "bound"),
    [
        ("", [(f"x-{number}", "") for number in range(MAX_HEADERS)], f"send {MAX_HEADERS} or fewer"),
        ("", [("x", "v" * MAX_HEAD)], f"more than {MAX_HEAD} bytes"),
        ("?" + "q" * (MAX_HEAD - 9000), [("x", "v" * 9000)], f"more than {MAX_HEAD} bytes"),
    ],
)
async def test_the_head_of_a_request_is_bounded_on_every_face(face, query, headers, bound):
    for path, text in (("/healthz", "detail"), ("/no/such/path", "detail"), (f"{PREFIX}/status", "error")):
        answer = await face.http.get(path + query, headers=[("host", "localhost"), *headers])
        assert (answer.status_code, answer.json()["reason"]) == (400, "invalid_request")
        assert bound in answer.json()[text]


async def test_a_head_within_its_bounds_is_served(face):
    headers = [("host", "localhost"), *((f"x-{number}", "v" * 400) for number in range(MAX_HEADERS - 20))]
    assert (await face.http.get("/healthz", headers=headers)).status_code == 200
