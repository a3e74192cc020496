"""Thousands of generated requests against a running server: it does what /openapi.json says, and a refusal leaves nothing behind."""

from collections.abc import Iterator

import httpx
import pytest
import redis
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.redis_server import RedisServer
from tests.server_process import ServerProcess
from tinsmith.protocol.native import REQUESTS

MODEL = "org/generated"
MIN_CASES = 2_000
CASES_A_MODE = 50  # of an operation
LEASES = (b"lease:", b"replica:", b"peers:")  # the server's processes take and renew these by themselves
# A body over a bound of its bytes is 413 before anybody looks at its fields.
CONFIG = schemathesis.Config.from_dict(
    {
        "checks": {
            "negative_data_rejection": {"expected-statuses": [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, 501]},
            "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", 501]},
        }
    }
)
SETTINGS = settings(
    max_examples=CASES_A_MODE,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def api(store: RedisServer) -> Iterator["schemathesis.BaseSchema"]:
    tree = {
        "models": [{"name": MODEL, "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}],
        "store": {"kind": "redis", "url": store.url},
        "execution": {"long_poll_s": 1},
    }
    with ServerProcess.start(tree) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=CONFIG)


@pytest.mark.proves("R28", "R38", "R42", "R48", "R49")
@pytest.mark.timeout(900)
def test_generated_requests_are_answered_as_documented_and_a_refusal_writes_nothing(
    api: "schemathesis.BaseSchema", store: RedisServer
) -> None:
    """Right and wrong requests, for every operation."""
    operations = [found.ok() for found in api.get_all_operations()]
    num_cases = 0
    with redis.Redis.from_url(store.url) as client:

        def ask(case: "schemathesis.Case") -> None:
            nonlocal num_cases
            num_cases += 1
            before = keys(client)
            response = case.call()
            if response.status_code >= httpx.codes.BAD_REQUEST:
                assert keys(client) <= before, response.text
            if response.status_code == httpx.codes.NOT_IMPLEMENTED:
                assert response.json()["reason"] == "endpoint_unavailable"
            case.validate_response(response, excluded_checks=[positive_data_acceptance])

        for operation in operations:
            for mode in GenerationMode if operation.body else (GenerationMode.POSITIVE,):  # any text is a right id in a path
                SETTINGS(given(operation.as_strategy(generation_mode=mode))(ask))()
    assert len(operations) >= len(REQUESTS)
    assert num_cases >= MIN_CASES


def keys(client: "redis.Redis") -> set[bytes]:
    return {key for key in client.scan_iter(count=10_000) if not key.startswith(LEASES)}
