"""Sessions, traces, audit and usage through the stock SDK's REST clients and its command line."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.fakes.in_process import BASE, InProcessServer, serve
from tests.sdk_process import has_succeeded

RESULT_S = 30
KEY = "tml-test"
METADATA = {"team": "blue"}
TRAINED, PREFILLED, DRAWN, SAVED = 4 + 4 + 4, 3, 2 * 5, 1

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@dataclass(frozen=True)
class Scene:
    """A server on which one session has trained, saved, sampled and finished."""

    server: InProcessServer
    session_id: str
    run_id: str
    sampler_id: str
    path: str


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with serve(tmp_path_factory.mktemp("artifacts")) as server:
        yield _played(server)


def _played(server: InProcessServer) -> Scene:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY, user_metadata=METADATA, project_id="blue-1")
    client = service.create_lora_training_client(BASE, rank=8).result(RESULT_S)
    data = [_datum(1, 2, 3), _datum(4, 5, 6)]
    for step in (client.forward(data, "cross_entropy"), client.forward_backward(data, "cross_entropy")):
        step.result(RESULT_S)
    client.optim_step(types.AdamParams(learning_rate=0.1)).result(RESULT_S)
    path = client.save_state("kept").result(RESULT_S).path
    client.forward_backward(data, "cross_entropy").result(RESULT_S)
    sampler = service.create_sampling_client(base_model=BASE).result(RESULT_S)
    prompt = types.ModelInput.from_ints([7, 8, 9])
    sampler.sample(prompt, 2, types.SamplingParams(max_tokens=5, seed=1, stop=[])).result(RESULT_S)
    service.close("success").result(RESULT_S)
    session_id = client.model_id.partition(":")[0]
    return Scene(server, session_id, client.model_id, f"{session_id}:sample:0", path)


def _datum(*tokens: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs={"target_tokens": np.array(tokens[1:], dtype=np.int64)}
    )


@pytest.fixture(scope="module")
def rest(scene: Scene) -> Iterator[tinker.RestClient]:
    client = tinker.RestClient(base_url=scene.server.url, api_key=KEY)
    yield client
    client.holder.close()


@pytest.fixture(scope="module")
def admin(scene: Scene) -> Iterator[tinker.AdminClient]:
    client = tinker.AdminClient(base_url=scene.server.url, api_key=KEY)
    yield client
    client.holder.close()


def test_sessions_are_listed_and_looked_up(scene: Scene, rest: tinker.RestClient):
    assert rest.list_sessions().result(RESULT_S).sessions[0] == scene.session_id
    assert rest.list_sessions(limit=5, offset=1, access_scope="accessible").result(RESULT_S).sessions == []
    session = rest.get_session(scene.session_id).result(RESULT_S)
    assert (session.training_run_ids, session.sampler_ids) == ([scene.run_id], [scene.sampler_id])
    assert session.user_metadata == METADATA
    sampler = rest.get_sampler(scene.sampler_id).result(RESULT_S)
    assert (sampler.sampler_id, sampler.base_model, sampler.model_path) == (scene.sampler_id, BASE, None)
    with pytest.raises(tinker.NotFoundError):
        rest.get_session("nobody").result(RESULT_S)


@pytest.mark.filterwarnings("ignore::tinker.lib.experimental.ExperimentalWarning")
def test_sessions_are_searched_page_by_page(scene: Scene, rest: tinker.RestClient):
    (found,) = rest.search_sessions(types.SessionSearchRequest(user_metadata=METADATA)).result(RESULT_S).sessions
    assert (found.session_id, found.project_id, found.checkpoints_count) == (scene.session_id, "blue-1", 1)
    assert isinstance(found.status, types.ClientSessionFinished)
    assert found.status.reason.type == "success"
    assert found.checkpoint_storage_bytes is not None
    assert found.checkpoint_storage_bytes > 0
    with httpx.Client(base_url=f"{scene.server.url}/api/v1") as http:
        more = [http.post("/create_session", json={"project_id": "paged"}).json()["session_id"] for _ in range(5)]
    request = types.SessionSearchRequest(project_ids=["paged"], limit=2, owner=types.AccessibleSearchOwner())
    seen: list[str] = []
    while True:
        page = rest.search_sessions(request).result(RESULT_S)
        seen += [session.session_id for session in page.sessions]
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert sorted(seen) == sorted(more)


def test_a_session_is_moved_to_a_project(scene: Scene, rest: tinker.RestClient):
    with httpx.Client(base_url=f"{scene.server.url}/api/v1") as http:
        session_id = http.post("/create_session", json={}).json()["session_id"]
    rest.assign_session_project(session_id, "moved").result(RESULT_S)
    record = scene.server.call(scene.server.services.catalog.session("local", session_id))
    assert record.project_id == "moved"


def test_a_trace_is_exported_and_downloaded_without_a_key(scene: Scene, rest: tinker.RestClient):
    with urlopen(rest.export_session_trace(scene.session_id).result(RESULT_S), timeout=RESULT_S) as response:  # noqa: S310 - our own server
        events = json.load(response)["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {scene.run_id, scene.sampler_id}
    begun = Counter(event["name"] for event in events if event["ph"] == "b")
    assert begun == {
        "create_model": 1,
        "forward": 1,
        "forward_backward": 2,
        "optim_step": 1,
        "save_weights": 1,
        "sample": 1,
        "wait": 7,
        "run": 7,
    }


def test_usage_is_exact(scene: Scene, admin: tinker.AdminClient):
    usage = admin.get_billing_usage(*_window()).result(RESULT_S)
    assert {event.session_id for event in usage.data} == {scene.session_id}
    counts = {event.event_info.type: event.event_info for event in usage.data}
    assert counts["training"].token_count == TRAINED
    assert counts["sampling_sample"].token_count == DRAWN
    assert counts["checkpoint"].count == SAVED
    assert sum(event.event_info.token_count for event in usage.data if event.event_info.type == "sampling_prefill") == PREFILLED
    assert all(event.base_model == BASE and event.project_id == "blue-1" and event.estimated_cost_usd is None for event in usage.data)
    assert usage.sessions[scene.session_id].user_metadata == METADATA
    (stored,) = admin.get_current_checkpoint_storage_usage("blue-1").result(RESULT_S).data
    assert stored.checkpoint_count == 1
    assert stored.size_gigabytes == stored.size_bytes / 1e9 > 0


def test_the_audit_log_tells_what_happened(scene: Scene, admin: tinker.AdminClient):
    entries = admin.get_audit_log().result(RESULT_S).entries
    own = [entry.event for entry in entries if scene.session_id in str(entry.event_details["subject"])]
    assert own == ["session_create", "model_create", "checkpoint_save", "session_end"]
    (saved,) = admin.get_audit_log("checkpoints", day=datetime.now(UTC).date()).result(RESULT_S).entries
    assert (saved.tinker_path, saved.model_id) == (scene.path, scene.run_id)


def _window() -> tuple[str, str]:
    """This hour and the one before."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return (hour - timedelta(hours=1)).isoformat(), (hour + timedelta(hours=1)).isoformat()


def command_line(scene: Scene, home: Path, *arguments: str) -> str:
    """What a command of the SDK's own prints."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TINKER_BASE_URL": scene.server.url,
        "TINKER_API_KEY": KEY,
        "COLUMNS": "400",
    }
    done = subprocess.run(
        [str(Path(sys.executable).with_name("tinker")), *arguments], env=environment, cwd=home, capture_output=True, text=True, timeout=120
    )
    assert has_succeeded(done), done.stdout + done.stderr
    return done.stdout


def in_json(scene: Scene, home: Path, *arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(command_line(scene, home, "--format", "json", *arguments))
    return answer


def test_command_line_version_status_and_models(scene: Scene, tmp_path: Path):
    assert command_line(scene, tmp_path, "version").strip() == f"tinker {tinker.__version__}"
    assert "Tinker accessible: yes" in command_line(scene, tmp_path, "auth", "status")
    assert BASE in command_line(scene, tmp_path, "model", "list")
    (model,) = in_json(scene, tmp_path, "model", "list", "TINY")["models"]
    assert (model["model_name"], model["trainable"]) == (BASE, True)


def test_command_line_exports_a_trace(scene: Scene, tmp_path: Path):
    shown = command_line(scene, tmp_path, "session", "export-trace", scene.session_id)
    assert "Saved to" in shown
    assert json.loads((tmp_path / f"{scene.session_id}.pftrace").read_text())["traceEvents"]
    written = in_json(scene, tmp_path, "session", "export-trace", scene.session_id, "-o", "t.pftrace")
    assert written["file_size_bytes"] == (tmp_path / "t.pftrace").stat().st_size
    url = command_line(scene, tmp_path, "session", "export-trace", scene.session_id, "--url-only").strip()
    assert url.startswith(scene.server.url)


def test_command_line_shows_usage_and_storage(scene: Scene, tmp_path: Path):
    assert str(TRAINED) in command_line(scene, tmp_path, "billing", "usage", *_window())
    data = in_json(scene, tmp_path, "billing", "usage", *_window())["data"]
    (trained,) = [row["event_info"]["token_count"] for row in data if row["event_info"]["type"] == "training"]
    assert trained == TRAINED
    assert "blue-1" in command_line(scene, tmp_path, "billing", "checkpoint-storage")
    (stored,) = in_json(scene, tmp_path, "billing", "checkpoint-storage", "--project-id", "blue-1")["data"]
    assert stored["checkpoint_count"] == 1
