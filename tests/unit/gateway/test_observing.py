"""What the gateway measures of requests, and who gets to see the metrics."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.face import Face, open_face
from tinsmith import telemetry
from tinsmith.gateway.observing import ObservingMiddleware
from tinsmith.telemetry import Measurement


@pytest.fixture
def measured() -> Iterator[list[Measurement]]:
    found: list[Measurement] = []
    with telemetry.recording(found.append):
        yield found


def requests_in(measured: list[Measurement]) -> list[dict[str, str]]:
    return [dict(one.labels) for one in measured if one.name == telemetry.HTTP_REQUESTS]


async def test_requests_are_counted_and_timed_by_route_template(face: Face, measured: list[Measurement]) -> None:
    await face.http.get("/api/v1/healthz")
    await face.http.get("/api/v1/samplers/nobody")
    assert [(one["route"], one["method"]) for one in requests_in(measured)] == [
        ("/api/v1/healthz", "GET"),
        ("/api/v1/samplers/{sampler_id}", "GET"),
    ]
    assert [one["status"] for one in requests_in(measured)] == ["200", "404"]
    times = [one for one in measured if one.name == telemetry.HTTP_REQUEST]
    assert [dict(one.labels) for one in times] == [
        {"route": "/api/v1/healthz", "method": "GET"},
        {"route": "/api/v1/samplers/{sampler_id}", "method": "GET"},
    ]
    assert all(one.value >= 0 for one in times)


async def test_callers_cannot_make_up_label_values(face: Face, measured: list[Measurement]) -> None:
    await face.http.get("/api/v1/made-up-1")
    await face.http.request("MADEUP", "/api/v1/healthz")
    await face.http.get("/api/v1/healthz", headers={"host": "evil.example"})
    assert [(one["route"], one["method"]) for one in requests_in(measured)] == [
        ("other", "GET"),
        ("/api/v1/healthz", "other"),
        ("other", "GET"),
    ]


async def test_a_defect_counts_as_500(measured: list[Measurement]) -> None:
    async def broken(*_: object) -> None:
        raise KeyError("secret")

    with pytest.raises(KeyError):
        await ObservingMiddleware(broken)({"type": "http", "method": "GET", "headers": []}, broken, broken)  # type: ignore[arg-type]
    assert requests_in(measured) == [{"route": "other", "method": "GET", "status": "500"}]


async def test_what_is_no_request_passes_unmeasured(measured: list[Measurement]) -> None:
    seen: list[str] = []

    async def app(scope: dict[str, str], *_: object) -> None:
        seen.append(scope["type"])

    await ObservingMiddleware(app)({"type": "lifespan"}, app, app)  # type: ignore[arg-type]
    assert (seen, measured) == (["lifespan"], [])


async def test_metrics_answer_the_exposition_behind_the_same_host_guard_and_outside_the_api() -> None:
    async with open_face() as face:

        async def exposition() -> bytes:
            return b"# TYPE x gauge\nx 1\n"

        object.__setattr__(face.services, "exposition", exposition)
        answer = await face.http.get("/metrics")
        assert (answer.status_code, answer.content) == (200, b"# TYPE x gauge\nx 1\n")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (await face.http.get("/metrics", headers={"host": "evil.example"})).status_code == 400
        assert "/metrics" not in (await face.http.get("/openapi.json")).json()["paths"]


async def test_metrics_that_are_off_are_no_page() -> None:
    async def exposition() -> bytes:
        return b"x 1\n"

    async with open_face(telemetry={"metrics": False}) as face:
        object.__setattr__(face.services, "exposition", exposition)
        assert (await face.http.get("/metrics")).status_code == 404
    async with open_face() as face:
        assert (await face.http.get("/metrics")).status_code == 404


async def test_long_polls_that_wait_are_a_gauge(face: Face, measured: list[Measurement]) -> None:
    model = await face.model()
    rid = (await face.ok("/optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}))["request_id"]
    await face.retrieve(rid)
    assert [one.value for one in measured if one.name == telemetry.LONG_POLLS_WAITING] == [1, 0]


class Recorder:
    """A tracer that keeps names, parents and attributes."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, dict[str, object]]] = []

    @contextmanager
    def span(self, name: str, parent: str, attributes: dict[str, object]) -> Iterator[telemetry.Traced]:
        noted = dict(attributes)
        self.spans.append((name, parent, noted))

        class Opened(telemetry.Traced):
            parent = f"span-{len(self.spans)}"

            def note(self, **more: object) -> None:
                noted.update(more)

        yield Opened()


async def test_a_submission_carries_the_trace_of_its_request(face: Face) -> None:
    model = await face.model()
    recorder = Recorder()
    telemetry.trace_to(recorder)  # type: ignore[arg-type]
    try:
        body = {"model_id": model, "seq_id": 1, "adam_params": {}}
        await face.ok("/optim_step", body, traceparent="the-clients-own")
    finally:
        telemetry.trace_to(None)
    assert recorder.spans == [
        ("gateway.request", "the-clients-own", {"method": "POST", "route": "/api/v1/optim_step", "status": "200"}),
    ]
    entries = [entry for seq in (0, 1) for entry, _ in await face.take(model, seq)]
    assert [entry.trace for entry in entries] == ["", "span-1"]


@pytest.mark.parametrize("place", ["header", "query"])
async def test_no_key_of_a_caller_reaches_a_label(face: Face, measured: list[Measurement], place: str) -> None:
    key = "tml-planted-key"
    sent: dict[str, dict[str, str]] = {"header": {"headers": {"x-api-key": key}}, "query": {"params": {"key": key}}}[place]  # type: ignore[assignment]
    await face.http.get("/api/v1/healthz", **sent)  # type: ignore[arg-type]
    assert measured
    assert key not in str(measured)
