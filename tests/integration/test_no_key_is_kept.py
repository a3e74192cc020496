"""No API key is in a log line, a span, a record or a file, whatever its caller does with it. Over a real Redis and a real port."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from socket import create_server

import httpx
import pytest

from tests.fakes.face import BASE, INFO
from tests.redis_server import RedisServer, open_state
from tests.unit.gateway.test_sampling import body_of
from tinsmith import cli, config, telemetry
from tinsmith.deployments.gateway import HttpServer
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, LaneLimits
from tinsmith.telemetry import Traced


class Spans:
    """Everything that a trace would show."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def span(self, name: str, parent: str, attributes: Mapping[str, str | int | float]) -> Iterator[Traced]:
        self.seen.append(f"{name} {parent} {attributes}")
        noted = self.seen

        class Noting(Traced):
            def note(self, **attributes: str | int | float) -> None:
                noted.append(str(attributes))

        try:
            yield Noting()
        except Exception as error:
            self.seen.append(repr(error))
            raise

    def ended(self, name: str, parent: str, attributes: Mapping[str, str | int | float], *, seconds: float) -> None:
        self.seen.append(f"{name} {parent} {attributes} {seconds}")


@asynccontextmanager
async def listening(redis: RedisServer, directory: Path) -> AsyncIterator[str]:
    """The address of a gateway with keys whose state is in Redis."""
    state = await open_state(redis.url, LaneLimits())
    tree = {
        "models": [{"name": BASE}],
        "auth": {"mode": "keys"},
        "store": {"kind": "redis", "url": redis.url},
        "checkpoints": {"dir": str(directory)},
        "execution": {"long_poll_s": 1},
    }
    services = Services(
        config=config.validate(tree),
        store=state.store,
        lanes=state.lanes,
        events=EventReader(state.lanes, [SETTLED]),
        base_models={BASE: INFO},
    )
    listener = create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    http = HttpServer(create_app(services), listener, services.polls.end)
    await http.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await http.stop()
        await state.close()


async def use(http: httpx.AsyncClient, key: str) -> list[int]:
    """Requests that succeed, that fail, and that carry the key where it does not belong."""
    session_id = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
    created = (await http.post("/api/v1/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": BASE})).json()
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await http.post("/api/v1/create_sampling_session", json=sampling)).json()["sampling_session_id"]
    event = {"event_name": "failed", "event_data": {"headers": {"X-API-Key": key}}}
    path = "tinker://x/weights/n"
    loading = {"model_id": created["model_id"], "seq_id": 1, "path": path, "weights_access_token": key}
    copying = {"source_path": path, "destination_project_id": "p"}
    answers = [
        await http.post("/api/v1/asample", json=body_of(sampler)),
        await http.post("/api/v1/retrieve_future", json={"request_id": created["request_id"]}),
        await http.post("/api/v1/auth/token", json={}),
        await http.get("/api/v1/auth/apikey/me"),
        await http.post("/api/v1/telemetry", json={"events": [event], "platform": "x", "sdk_version": "0.38.0", "session_id": session_id}),
        await http.post("/api/v1/load_weights", json=loading),
        await http.post("/api/v1/load_weights", json=loading | {"seq_id": 2, "weights_access_token": key[:-1]}),
        await http.post("/api/v1/copy_weights", json=copying, headers={"X-Idempotency-Key": "k", "X-Tinker-Weights-Access-Token": key}),
        await http.post("/api/v1/create_model", content=b"{", headers={"content-type": "application/json"}),
        await http.get("/native/v1/status", headers={"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}),
        await http.post("/native/v1/create_model", json={"api_key": "is no field"}),
        await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}),
        await http.get("/no/such/path"),
        await http.get("/native/v1/status", headers={"X-API-Key": key[:-1]}),
        await http.get("/native/v1/status", headers={"X-API-Key": "", "Authorization": f"Basic {key}"}),
        await http.delete("/api/v1/auth/apikey/me"),
        await http.get("/native/v1/status"),
    ]
    assert all(key not in answer.text for answer in answers)
    return [answer.status_code for answer in answers]


async def test_no_api_key_is_in_logs_spans_records_or_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(logging.getLogger(telemetry.ROOT_LOGGER), "propagate", True)
    monkeypatch.setattr(logging.getLogger(telemetry.ROOT_LOGGER), "level", logging.DEBUG)
    spans = Spans()
    telemetry.trace_to(spans)
    try:
        with RedisServer() as redis:
            key = await planted(redis, tmp_path, capfd)
            async with listening(redis, tmp_path) as url, httpx.AsyncClient(base_url=url, headers={"X-API-Key": key}) as http:
                statuses = await use(http, key)
            kept = [path for directory in (redis.directory, tmp_path) for path in directory.rglob("*") if path.is_file()]
            contents = {path.name: path.read_bytes() for path in kept}
    finally:
        telemetry.trace_to(None)
    assert 200 in statuses
    assert {401, 404, 422} <= set(statuses)
    secret = key.rpartition("-")[2]
    assert any(b"create_model" in content for content in contents.values()), "the records are read"
    assert [name for name, content in contents.items() if secret.encode()[:30] in content] == []
    captured = capfd.readouterr()
    shown = {"log": caplog.text, "spans": "\n".join(spans.seen), "stdout": captured.out, "stderr": captured.err}
    assert caplog.records
    assert spans.seen
    assert [where for where, text in shown.items() if secret[:30] in text] == []


async def planted(redis: RedisServer, directory: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """A key that the command line made."""
    path = directory / "server.yaml"
    path.write_text(f"models: [{{name: {BASE}}}]\nauth: {{mode: keys}}\nstore: {{kind: redis, url: '{redis.url}'}}\n")
    assert await asyncio.to_thread(cli.main, ["keys", "add", "--tenant", "acme", str(path)]) == 0
    return capfd.readouterr().out.strip()
