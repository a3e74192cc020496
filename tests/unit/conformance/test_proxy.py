"""Faults of the proxy, one at a time, before a server that counts what reaches it."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tinsmith.conformance.proxy import Proxy, Rule

ANSWER_S = 10.0


class Counting(BaseHTTPRequestHandler):
    """Answers how many requests there were, and what this one held."""

    num = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        type(self).num += 1
        answer = json.dumps(
            {"num": type(self).num, "asked": json.loads(body), "key": self.headers["x-api-key"], "path": self.path}
        ).encode()
        self.send_response(201)
        self.send_header("content-type", "application/json")
        self.send_header("x-told", "kept")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing to the terminal."""


@pytest.fixture
def upstream() -> Iterator[str]:
    Counting.num = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(upstream: str) -> Iterator[Proxy]:
    with Proxy(upstream) as running:
        yield running


@pytest.fixture
def http(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, headers={"x-api-key": "tml-1"}, timeout=ANSWER_S) as client:
        yield client


def test_requests_pass_with_headers_body_and_query(proxy: Proxy, http: httpx.Client) -> None:
    response = http.post("/api/v1/asample?a=b", json={"seq_id": 3})
    assert (response.status_code, response.headers["x-told"]) == (201, "kept")
    assert response.json() == {"num": 1, "asked": {"seq_id": 3}, "key": "tml-1", "path": "/api/v1/asample?a=b"}
    [seen] = proxy.seen("asample")
    assert (seen.status, seen.sent(), seen.told()["num"]) == (201, {"seq_id": 3}, 1)
    assert proxy.seen("sample") == []


def test_an_answer_in_the_servers_place_for_so_many_requests(proxy: Proxy, http: httpx.Client) -> None:
    proxy.answer("asample", 503, {"detail": "busy"}, 2, retry_after_ms="10")
    answers = [http.post("/asample", json={}) for _ in range(3)]
    assert [response.status_code for response in answers] == [503, 503, 201]
    assert (answers[0].json(), answers[0].headers["retry-after-ms"]) == ({"detail": "busy"}, "10")
    assert Counting.num == 1
    assert [seen.status for seen in proxy.seen("asample")] == [503, 503, 201]


def test_a_request_that_is_carried_out_and_answered_otherwise(proxy: Proxy, http: httpx.Client) -> None:
    proxy.add(Rule("optim_step", status=503, is_executed=True))
    assert http.post("/optim_step", json={}).status_code == 503
    assert Counting.num == 1
    assert proxy.seen("optim_step")[0].told()["num"] == 1


def test_an_answer_that_is_lost(proxy: Proxy, http: httpx.Client) -> None:
    proxy.lose("optim_step")
    with pytest.raises(httpx.RemoteProtocolError):
        http.post("/optim_step", json={})
    assert http.post("/optim_step", json={}).json()["num"] == 2
    lost, kept = proxy.seen("optim_step")
    assert (lost.status, lost.told()["num"], kept.status) == (0, 1, 201)


def test_an_answer_waits_until_its_rule_lets_it_go(proxy: Proxy, http: httpx.Client) -> None:
    rule = Rule("retrieve_future", is_held=True)
    proxy.add(rule)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, "/retrieve_future", json={})
        assert http.post("/asample", json={}).status_code == 201
        assert not waiting.done()
        rule.is_held = False
        assert waiting.result(ANSWER_S).status_code == 201


def test_requests_and_answers_that_are_changed(proxy: Proxy, http: httpx.Client) -> None:
    proxy.change_config(poller=True)
    assert http.post("/client/config", json={}).json()["poller"] is True
    proxy.add(Rule("retrieve_future", change_request=lambda asked: asked | {"allow_metadata_only": False}))
    assert http.post("/retrieve_future", json={"request_id": "r"}).json()["asked"] == {"request_id": "r", "allow_metadata_only": False}


def test_rules_that_are_cleared_have_no_effect(proxy: Proxy, http: httpx.Client) -> None:
    proxy.answer("asample", 503, times=None)
    proxy.clear()
    assert http.post("/asample", json={}).status_code == 201


def test_a_server_that_is_away_is_502() -> None:
    with Proxy("http://127.0.0.1:1") as proxy:
        assert httpx.post(f"{proxy.url}/asample", json={}, timeout=ANSWER_S).status_code == 502
