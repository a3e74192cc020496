"""One exchange: what is sent, what is sent again, and what is raised."""

import logging
import sys
import traceback

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from tests.fakes.native_server import URL, NativeServer, refused
from tinsmith.client import AsyncClient, ClientClosed, ClientValidationError, ConnectionFailed, HttpError, UnexpectedAnswer
from tinsmith.client.transport import HTTP_TIMEOUT_S, MAX_PAUSE_S, MAX_RETRIES, Transport
from tinsmith.config import ExecutionConfig
from tinsmith.protocol.envelopes import Answer
from tinsmith.protocol.errors import (
    Category,
    EndpointUnavailable,
    ExclusiveBusy,
    InternalError,
    InvalidRequest,
    NotFound,
    RateLimited,
    ReasonCode,
    SessionEnded,
    StateContention,
    Unauthenticated,
    ValidationFailed,
)
from tinsmith.protocol.native import Heartbeat
from tinsmith.protocol.native_answers import SessionInfo

BEAT = Heartbeat(session_id="s")
KEY = "tml-a-very-secret-key"


@pytest.fixture
async def transport(server: NativeServer):
    transport = Transport(URL, KEY, transport=server.transport, sleep=server.sleep)
    yield transport
    await transport.close()


@pytest.mark.proves("R34")
def test_one_http_timeout_covers_the_longest_long_poll_and_stays_below_two_minutes():
    [bound] = [mark.le for mark in ExecutionConfig.model_fields["long_poll_s"].metadata if hasattr(mark, "le")]
    assert bound < HTTP_TIMEOUT_S <= 120
    http = Transport(URL, None)._http
    assert (http.timeout.read, http.timeout.write, http.timeout.connect) == (HTTP_TIMEOUT_S,) * 3


async def test_a_request_is_the_protocols_json_with_the_key_in_its_header(transport, server):
    await transport.post(BEAT, Answer)
    [call] = server.calls
    assert (call.method, call.path, call.request) == ("POST", "/heartbeat", BEAT)
    assert (call.headers["x-api-key"], call.headers["content-type"]) == (KEY, "application/json")
    assert "authorization" not in call.headers


async def test_without_a_key_no_key_is_sent(server):
    transport = Transport(URL + "/", None, transport=server.transport)
    await transport.post(BEAT, Answer)
    assert "x-api-key" not in server.calls[0].headers


async def test_a_server_may_lie_below_a_path():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200, json={})

    await Transport("https://host/tinsmith/", None, transport=httpx.MockTransport(answer)).post(BEAT, Answer)
    assert asked == ["https://host/tinsmith/native/v1/heartbeat"]


TIMES_OUT = httpx.ReadTimeout("slow")
RESENT = [
    httpx.ConnectError("refused"),
    TIMES_OUT,
    httpx.RemoteProtocolError("cut"),
    httpx.Response(408),
    httpx.Response(502, text="<html>bad gateway</html>"),
    refused(RateLimited("slower")),
    refused(StateContention("away")),
    refused(InternalError("oops")),
]


@pytest.mark.proves("R32")
@pytest.mark.parametrize("reply", RESENT, ids=lambda reply: getattr(reply, "status_code", type(reply).__name__))
async def test_what_may_pass_is_sent_again_with_the_same_bytes(transport, server, reply):
    server.script("/heartbeat", reply, reply)
    await transport.post(BEAT, Answer)
    assert len({call.body for call in server.calls}) == 1
    assert len(server.calls) == 3


@pytest.mark.proves("R32")
async def test_five_retries_in_a_row_are_the_last_and_pauses_double_up_to_thirty_seconds(transport, server):
    server.script("/heartbeat", *[httpx.ConnectError("refused")] * 9)
    with pytest.raises(ConnectionFailed, match=r"ConnectError: refused.*is the server running"):
        await transport.post(BEAT, Answer)
    assert len(server.calls) == 1 + MAX_RETRIES == 6
    for pause, top in zip(server.pauses, [1, 2, 4, 8, 16], strict=True):
        assert 0.75 * top <= pause <= top <= MAX_PAUSE_S == 30


@pytest.mark.proves("R32")
async def test_the_servers_retry_after_is_honoured_within_reason(transport, server):
    contention = StateContention("away")
    server.script(
        "/heartbeat",
        refused(contention, retry_after="7"),
        refused(contention, retry_after="86400"),
        refused(contention, retry_after="Wed, 21 Oct 2026 07:28:00 GMT"),
    )
    await transport.post(BEAT, Answer)
    assert server.pauses[:2] == [7.0, 120.0]
    assert 3 <= server.pauses[2] <= 4


FINAL = [InvalidRequest, Unauthenticated, NotFound, ExclusiveBusy, SessionEnded, ValidationFailed, EndpointUnavailable]


@pytest.mark.proves("R32")
@pytest.mark.parametrize("kind", FINAL)
async def test_a_refusal_is_raised_at_once(transport, server, kind):
    server.script("/heartbeat", refused(kind("the reason")))
    with pytest.raises(HttpError):
        await transport.post(BEAT, Answer)
    assert (len(server.calls), server.pauses) == (1, [])


@pytest.mark.proves("R33")
async def test_a_refusal_carries_all_that_the_server_said(transport, server):
    server.script("/heartbeat", refused(ValidationFailed("one: is wrong")))
    with pytest.raises(HttpError) as raised:
        await transport.post(BEAT, Answer)
    error = raised.value
    assert (error.status, error.error_code, error.reason) == (422, 422, ReasonCode.VALIDATION_FAILED)
    assert (error.category, error.request_id, error.details) == (Category.USER, "http-1", ("one: detail",))
    assert (error.message, error.may_have_arrived) == ("one: is wrong", False)
    assert str(error) == "422 validation_failed: one: is wrong (one: detail)"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(403, text="<html>"), "Forbidden (an answer without an error payload)"),
        (httpx.Response(302), "Found (an answer without an error payload)"),
        (httpx.Response(400, json={"detail": "a\nb", "reason": "new_reason"}), "a b"),
        (httpx.Response(400, json={"error": "short"}), "short"),
        (httpx.Response(400, json=[1]), "Bad Request (an answer without an error payload)"),
    ],
)
async def test_an_answer_of_somebody_else_is_an_http_error_of_unknown_category(transport, server, reply, message):
    server.script("/heartbeat", reply)
    with pytest.raises(HttpError) as raised:
        await transport.post(BEAT, Answer)
    error = raised.value
    assert (error.status, error.message, error.reason, error.category) == (reply.status_code, message, None, Category.UNKNOWN)
    assert 400 <= error.error_code <= 599


@pytest.mark.parametrize(
    ("replies", "may_have_arrived"),
    [
        ([refused(ValidationFailed("no"))], False),
        ([httpx.ConnectError("refused"), refused(ValidationFailed("no"))], False),
        ([httpx.ReadTimeout("slow"), refused(ValidationFailed("no"))], True),
        ([refused(StateContention("away")), refused(ValidationFailed("no"))], True),
        ([refused(RateLimited("slower")), refused(ValidationFailed("no"))], False),
        ([refused(EndpointUnavailable("never"))], False),
        ([httpx.ReadError("cut"), *[httpx.ConnectError("refused")] * 5], True),
        ([httpx.ConnectError("refused")] * 6, False),
        ([httpx.Response(408)] * 6, True),
    ],
)
async def test_an_error_tells_whether_a_try_may_have_been_accepted(transport, server, replies, may_have_arrived):
    server.script("/heartbeat", *replies)
    with pytest.raises((HttpError, ConnectionFailed)) as raised:
        await transport.post(BEAT, Answer)
    assert raised.value.may_have_arrived is may_have_arrived


async def test_an_answer_that_is_none_of_the_protocol_is_named(transport, server):
    server.script("/heartbeat", httpx.Response(200, text="<html>"), httpx.Response(200, json={"session_id": 1, "created_ms": 1}))
    with pytest.raises(UnexpectedAnswer, match=r"/native/v1/heartbeat is none of this protocol \(body"):
        await transport.post(BEAT, SessionInfo)
    with pytest.raises(UnexpectedAnswer, match=r"\(session_id: "):
        await transport.post(BEAT, SessionInfo)


async def test_a_single_try_is_not_repeated(transport, server):
    server.script("/heartbeat", httpx.ConnectError("refused"))
    with pytest.raises(ConnectionFailed):
        await transport.post_once(BEAT, Answer)
    assert len(server.calls) == 1


async def test_after_close_nothing_is_sent(transport, server):
    await transport.close()
    with pytest.raises(ClientClosed, match="open another"):
        await transport.post(BEAT, Answer)
    assert server.calls == []


@pytest.mark.proves("R33")
@pytest.mark.parametrize(
    "url",
    [
        *("server:8700", "ftp://server", "http://", "http://host:port", "http://user:word@host", " http://host", "http://a\\b"),
        *("http://a b", "http://a%20b", "http://a,b", "http://host?x=1", "http://host/path#part", None, 5, b"http://host"),
    ],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ClientValidationError) as raised:
        AsyncClient(url)
    assert raised.value.field == "base_url"
    assert "word" not in str(raised.value).replace("password", "")


@pytest.mark.parametrize("url", ["http://a_b-c.test:1", "http://10.0.0.1", "http://[::1]:80", "https://bücher.example/path"])
def test_an_address_of_a_server_is_taken(url):
    assert AsyncClient(url)


@pytest.mark.proves("R33")
@pytest.mark.parametrize("key", ["", "tml-é-sekret", "tml-sekret\n", 5, b"sekret"])
def test_a_key_that_no_header_holds_is_refused_without_being_shown(key):
    with pytest.raises(ClientValidationError) as raised:
        AsyncClient(URL, key)
    assert raised.value.field == "api_key"
    assert "sekret" not in everything_of(raised.value)


def everything_of(error: BaseException) -> str:
    """What a log, or a crash reporter could show of an error and of those it hangs on."""
    parts = []
    seen: BaseException | None = error
    while seen is not None:
        parts += ["".join(traceback.format_exception(seen)), repr(seen), repr(vars(seen)), repr(getattr(seen, "request", None))]
        assert getattr(seen, "_request", None) is None, "an error of httpx holds the request, and the request the key"
        seen = seen.__cause__ or seen.__context__
    return "".join(parts) + repr(error.__reduce__())


@pytest.mark.proves("R33")
async def test_the_key_is_in_no_repr_no_log_and_no_exception(server, caplog):
    caplog.set_level(logging.DEBUG)
    client = AsyncClient(URL, KEY, transport=server.transport, sleep=server.sleep)
    server.script("/capabilities", *[httpx.ConnectError("refused")] * 6, refused(Unauthenticated("no such key")), httpx.Response(200))
    shown = []
    for kind in (ConnectionFailed, HttpError, UnexpectedAnswer):
        with pytest.raises(kind) as raised:
            await client.capabilities()
        shown.append(everything_of(raised.value))
    shown += [repr(client), repr(client._transport), repr(client._transport._http), caplog.text]
    assert repr(client) == "AsyncClient('http://server.test:8700')"
    assert KEY not in "".join(shown)
    await client.close()


async def test_a_call_joins_the_callers_trace(transport, server):
    context = SpanContext(trace_id=0xA1, span_id=0xB2, is_remote=False, trace_flags=TraceFlags(1))
    with trace.use_span(NonRecordingSpan(context)):
        await transport.post(BEAT, Answer)
    await transport.post(BEAT, Answer)
    assert server.calls[0].headers["traceparent"] == f"00-{0xA1:032x}-{0xB2:016x}-01"
    assert "traceparent" not in server.calls[1].headers


async def test_without_opentelemetry_there_is_no_trace_to_join(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.propagate", None)
    transport = Transport(URL, None, transport=server.transport)
    await transport.post(BEAT, Answer)
    assert "traceparent" not in server.calls[0].headers
