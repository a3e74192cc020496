"""Errors in the form of OpenAI's API."""

import pytest

from tinsmith.gateway.openai.errors import answer_of, status_of
from tinsmith.protocol.errors import (
    LEAVES,
    Cancelled,
    EndpointUnavailable,
    InputTokensExceeded,
    NotFound,
    PayloadTooLarge,
    QuotaExceeded,
    SessionEnded,
    StateContention,
    TinsmithError,
    Unauthenticated,
    ValidationFailed,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (ValidationFailed("n: too many; send fewer"), 400, "invalid_request_error", "n", "validation_failed"),
        (EndpointUnavailable("audio: not served"), 400, "invalid_request_error", "audio", "unsupported_parameter"),
        (InputTokensExceeded("messages: long"), 400, "invalid_request_error", "messages", "context_length_exceeded"),
        (PayloadTooLarge("body: large"), 413, "invalid_request_error", "body", "payload_too_large"),
        (NotFound("model: 'a' does not exist"), 404, "invalid_request_error", "model", "model_not_found"),
        (NotFound("'/v1/a' is no path"), 404, "invalid_request_error", None, "resource_not_found"),
        (Unauthenticated("the key is unknown"), 401, "authentication_error", None, "invalid_api_key"),
        (QuotaExceeded("5 samples are waiting"), 429, "rate_limit_error", None, "resource_quota_exceeded"),
        (SessionEnded("session a has ended"), 503, "server_error", None, "session_ended"),
        (StateContention("away"), 503, "server_error", None, "state_contention"),
        (Cancelled("it was cancelled"), 499, "invalid_request_error", None, "cancelled"),
    ],
)
def test_an_error(error: TinsmithError, status: int, kind: str, param: str | None, code: str) -> None:
    told = answer_of(error).error
    assert (status_of(error), told.type, told.param, told.code) == (status, kind, param, code)
    assert told.message == error.message


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_caller_at_fault_and_a_server_at_fault_are_told_apart(leaf: type[TinsmithError]) -> None:
    told = answer_of(leaf("why")).error
    assert (told.type == "server_error") is (status_of(leaf("why")) >= 500)
