"""What an operator's commands ask and how they wait, against a server that is a function and a clock that is a number."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from tinsmith.operations import ORDER_S, OperationFailed, Operations
from tinsmith.protocol.native import Drain
from tinsmith.protocol.native_answers import ProcessStatus, ServerStatus, SessionInfo, SessionList

URL = "http://127.0.0.1:8700"


def process(
    id: str, role: str = "trainer", base: str | None = "org/model", *, healthy: bool = True, draining: bool = False
) -> ProcessStatus:
    return ProcessStatus(
        process_id=id, role=role, base_model=base, node="n", pid=1, is_healthy=healthy, is_draining=draining, num_used=0, num_slots=4
    )


def status_of(*processes: ProcessStatus) -> ServerStatus:
    return ServerStatus(server_version="0.1.0", store="memory", processes=processes, queues=())


@dataclass
class Server:
    """Replaces a drained process after `takes` looks at the status; loses the first `deaf_to` orders."""

    processes: dict[str, ProcessStatus]
    takes: int = 3
    deaf_to: int = 0
    time_s: float = 0.0
    orders: list[tuple[float, str]] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)
    away_while: Callable[[int], bool] = lambda looks: False
    looks_since_order: int = 0
    num_looks: int = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/native/v1/drain":
            self.orders.append((self.time_s, Drain.model_validate_json(request.content).process_id))
            self.looks_since_order = 0
            return httpx.Response(200, json={})
        if request.url.path == "/native/v1/sessions":
            session = SessionInfo(session_id="s", created_ms=0)
            return httpx.Response(200, text=SessionList(sessions=(session,)).model_dump_json())
        assert request.url.path == "/native/v1/status"
        self.num_looks += 1
        self.looks_since_order += 1
        if self.away_while(self.looks_since_order if self.orders else 0):
            raise httpx.ConnectError("refused")
        self._advance()
        return httpx.Response(200, text=status_of(*self.processes.values()).model_dump_json())

    def _advance(self) -> None:
        if len(self.orders) <= self.deaf_to or self.orders[-1][1] not in self.processes:
            return
        ordered = self.orders[-1][1]
        old = self.processes[ordered]
        if self.looks_since_order < self.takes:
            self.processes[ordered] = old.model_copy(update={"is_draining": True})
        else:
            del self.processes[ordered]
            self.processes[f"{ordered}'"] = old.model_copy(update={"process_id": f"{ordered}'", "is_draining": False})

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0.2
        self.time_s += seconds


@pytest.fixture
def server() -> Server:
    known = [process("t1"), process("s1", "sampler"), process("g1", "gateway", None), process("g2", "gateway", None)]
    return Server({one.process_id: one for one in known})


@pytest.fixture
def operations(server: Server) -> Iterator[Operations]:
    with Operations(URL, "tml-key", transport=httpx.MockTransport(server), clock=lambda: server.time_s, sleep=server.sleep) as operations:
        yield operations


def test_the_key_travels_in_a_header(operations: Operations, server: Server) -> None:
    assert [one.process_id for one in operations.status().processes] == ["t1", "s1", "g1", "g2"]
    assert [one.session_id for one in operations.sessions().sessions] == ["s"]
    assert {headers["x-api-key"] for headers in server.headers} == {"tml-key"}


def test_a_drain_returns_when_a_fresh_process_stands_in_the_place_of_the_old_one(operations: Operations, server: Server) -> None:
    operations.drain("t1")
    assert [name for _, name in server.orders] == ["t1"]
    assert set(server.processes) == {"t1'", "s1", "g1", "g2"}


def test_a_sibling_that_was_there_before_is_no_successor(operations: Operations, server: Server) -> None:
    server.processes = {"t1": process("t1", draining=True), "t2": process("t2"), "late": process("late", healthy=False)}
    looks: list[int] = []

    def sleep(seconds: float) -> None:
        server.time_s += seconds
        looks.append(len(looks))
        if len(looks) == 2:
            del server.processes["t1"]
        if len(looks) == 4:
            server.processes["t3"] = process("t3", healthy=False)
        if len(looks) == 6:
            server.processes["t3"] = process("t3")

    operations._sleep = sleep
    operations.drain("t1")
    assert len(looks) == 6


def test_an_order_that_was_lost_is_given_again(operations: Operations, server: Server) -> None:
    server.deaf_to = 1
    operations.drain("t1")
    (first, _), (second, _) = server.orders
    assert second - first >= ORDER_S


def test_an_order_to_a_process_that_has_just_ended_is_no_failure(operations: Operations, server: Server) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/native/v1/drain":
            return server(request)
        server.orders.append((server.time_s, "t1"))
        server.takes = 0
        return httpx.Response(404, json={"error": "no living process"})

    with Operations(URL, transport=httpx.MockTransport(answer), clock=lambda: server.time_s, sleep=server.sleep) as operations:
        operations.drain("t1")
    assert "t1'" in server.processes


def test_an_order_that_is_lost_on_its_way_is_given_again_and_one_that_is_refused_is_told(server: Server) -> None:
    answers: list[httpx.Response] = [httpx.Response(503, json={"error": "away"}), httpx.Response(422, json={"error": "refused; mend it"})]

    def answer(request: httpx.Request) -> httpx.Response:
        return answers.pop(0) if request.url.path == "/native/v1/drain" else server(request)

    with (
        Operations(URL, transport=httpx.MockTransport(answer), clock=lambda: server.time_s, sleep=server.sleep) as operations,
        pytest.raises(OperationFailed, match="422 refused; mend it"),
    ):
        operations.drain("t1")
    assert server.time_s >= ORDER_S


def test_a_gateway_that_ends_the_connection_that_asks_costs_nothing(operations: Operations, server: Server) -> None:
    server.away_while = lambda looks: 1 < looks < 3
    operations.drain("g1")
    assert "g1'" in server.processes


def test_all_processes_are_replaced_one_at_a_time_samplers_first_and_gateways_last(operations: Operations, server: Server) -> None:
    seen = []
    for one in operations.drain_all():
        assert sum(other.is_draining for other in server.processes.values()) == 0
        seen.append(one.process_id)
    assert seen == ["s1", "t1", "g1", "g2"]
    assert set(server.processes) == {"s1'", "t1'", "g1'", "g2'"}


def test_a_process_that_another_restart_has_replaced_meanwhile_is_done_once_its_successor_serves(
    operations: Operations, server: Server
) -> None:
    """The second gateway is gone when its turn comes, and its successor comes after a while, in which the status may not be had."""
    looks: list[int] = []
    turns = operations.drain_all()
    seen = [next(turns).process_id for _ in range(4)]
    del server.processes["g2"]

    def sleep(seconds: float) -> None:
        server.time_s += seconds
        looks.append(server.num_looks)
        server.away_while = lambda _: len(looks) == 2
        if len(looks) == 4:
            server.processes["late"] = process("late", "gateway", None)

    operations._sleep = sleep
    assert list(turns) == []
    assert seen == ["s1", "t1", "g1", "g2"]
    assert len(looks) == 4
    assert [name for _, name in server.orders] == ["s1", "t1", "g1"]


def test_a_process_that_is_not_there_is_named(operations: Operations) -> None:
    with pytest.raises(OperationFailed, match=r"--process: 'x' is not there; `tinsmith status` lists those that are"):
        operations.drain("x")


def test_a_replacement_that_does_not_come_is_told_after_the_bound(operations: Operations, server: Server) -> None:
    server.takes = 10**9
    with pytest.raises(OperationFailed, match=r"trainer t1 still drains after 60 s; the server's log says why"):
        operations.drain("t1", within_s=60)
    assert 60 <= server.time_s <= 61


def refusing(response: httpx.Response | Exception) -> Operations:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    return Operations(URL, transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (httpx.ConnectError("refused"), "cannot be reached (refused); start the server, or name its address with --url"),
        (httpx.ReadTimeout(""), "cannot be reached (ReadTimeout); start the server, or name its address with --url"),
        (httpx.Response(401, json={"error": "no"}), "401 Unauthorized; pass the key with --api-key or TINSMITH_API_KEY"),
        (httpx.Response(404, text="not here"), "404 Not Found; check --url: this path is not served there"),
        (httpx.Response(404, json={"error": "process_id: 'x' is no living process; /status lists them"}), "/status lists them"),
        (httpx.Response(403, text=""), "403 Forbidden; use a key that may do this"),
        (httpx.Response(409, json={"error": "busy; wait"}), "409 busy; wait"),
        (httpx.Response(500, json=[]), "500 Internal Server Error; the log of the server says why"),
        (httpx.Response(503, json={"error": "the store is away; try again"}), "503 the store is away; try again"),
        (httpx.Response(200, json={"processes": 1}), "does not answer as this version does; use the tinsmith of the server's version"),
    ],
)
def test_whatever_goes_wrong_is_one_line_with_a_remedy(response: httpx.Response | Exception, said: str) -> None:
    with refusing(response) as operations, pytest.raises(OperationFailed) as caught:
        operations.status()
    assert str(caught.value).startswith(URL)
    assert str(caught.value).endswith(said)
    assert "\n" not in str(caught.value)


def test_a_url_that_is_none_is_named() -> None:
    with pytest.raises(OperationFailed, match=r"--url: .* is no URL .*; write http://HOST:PORT"):
        Operations("http://a\nb")
