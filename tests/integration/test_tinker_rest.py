"""The stock SDK's REST client and command line against the gateway, with fake engines behind it."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.fakes.in_process import BASE, InProcessServer, serve
from tests.sdk_process import has_succeeded

RESULT_S = 30
COMMAND_S = 120
FILES = {"adapter_config.json", "adapter_model.safetensors"}

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    with serve(tmp_path_factory.mktemp("artifacts")) as running:
        yield running


@pytest.fixture
def service(server: InProcessServer) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test", project_id="home")
    yield client
    client.close("success").result()


@pytest.fixture(scope="module")
def rest(server: InProcessServer) -> Iterator[tinker.RestClient]:
    """One for all: clients of one address share their connections, and whoever closes one closes all."""
    client = tinker.RestClient(base_url=server.url, api_key="tml-test")
    yield client
    client.holder.close()


@pytest.fixture
def command(server: InProcessServer, tmp_path: Path) -> Command:
    """Run the `tinker` program; answers its output, as data where it is JSON. `fails`: what it is to say as it fails."""

    def run(*arguments: str, form: str = "json", fails: str | None = None) -> Any:
        environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-test", "HOME": str(tmp_path), "COLUMNS": "240"}
        ran = subprocess.run(
            [sys.executable, "-m", "tinker.cli", "--format", form, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
            cwd=tmp_path,
        )
        if fails is not None:
            assert (ran.returncode, fails in ran.stderr) == (1, True), ran.stderr
            return None
        assert has_succeeded(ran), ran.stderr
        return json.loads(ran.stdout) if form == "json" and ran.stdout else ran.stdout

    return run


def saved(service: tinker.ServiceClient, name: str = "n") -> tuple[tinker.TrainingClient, str]:
    """A run with a training checkpoint: its client and the checkpoint's path."""
    client = service.create_lora_training_client(BASE, rank=8).result(RESULT_S)
    return client, client.save_state(name).result(RESULT_S).path


def of_run(rest: tinker.RestClient, path: str) -> dict[str, types.Checkpoint]:
    """The checkpoints of the path's run, by path."""
    run_id = types.ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    return {entry.tinker_path: entry for entry in rest.list_checkpoints(run_id).result(RESULT_S).checkpoints}


def test_runs_and_checkpoints_are_listed(service: tinker.ServiceClient, rest: tinker.RestClient):
    client, path = saved(service)
    sampler = client.save_weights_for_sampler("n").result(RESULT_S).path
    run = rest.get_training_run(client.model_id).result(RESULT_S)
    assert (run.base_model, run.is_lora, run.lora_rank, run.corrupted) == (BASE, True, 8, False)
    assert run.last_request_time.tzinfo is not None
    assert run.last_checkpoint is not None
    assert run.last_sampler_checkpoint is not None
    assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == (path, sampler)
    runs = rest.list_training_runs(limit=1).result(RESULT_S)
    assert [entry.training_run_id for entry in runs.training_runs] == [client.model_id]
    assert rest.list_training_runs(project_id="nowhere").result(RESULT_S).training_runs == []
    mine = rest.list_training_runs(project_id="home", limit=100).result(RESULT_S)
    assert client.model_id in [entry.training_run_id for entry in mine.training_runs]
    newest = rest.list_user_checkpoints(limit=2).result(RESULT_S)
    assert {entry.tinker_path for entry in newest.checkpoints} == {path, sampler}
    assert newest.cursor is not None
    assert newest.cursor.total_count >= 2
    older = rest.list_user_checkpoints(limit=100, offset=2).result(RESULT_S)
    assert not {entry.tinker_path for entry in older.checkpoints} & {path, sampler}
    assert {entry.checkpoint_type for entry in of_run(rest, path).values()} == {"training", "sampler"}


def test_publish_and_unpublish_twice(service: tinker.ServiceClient, rest: tinker.RestClient):
    _, path = saved(service)
    for call, is_public in (
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.unpublish_checkpoint_from_tinker_path, False),
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        call(path).result(RESULT_S)
        assert of_run(rest, path)[path].public is is_public


def test_a_ttl_is_set_and_removed(service: tinker.ServiceClient, rest: tinker.RestClient):
    _, path = saved(service)
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result(RESULT_S)
    expires_at = of_run(rest, path)[path].expires_at
    assert expires_at is not None
    assert timedelta(minutes=110) < expires_at - datetime.now(UTC) < timedelta(minutes=121)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(RESULT_S)
    assert of_run(rest, path)[path].expires_at is None
    with pytest.raises(tinker.UnprocessableEntityError):
        rest.set_checkpoint_ttl_from_tinker_path(path, 60).result(RESULT_S)


def test_a_deleted_checkpoint_is_unknown(service: tinker.ServiceClient, rest: tinker.RestClient):
    client, path = saved(service)
    sampler = client.save_weights_for_sampler("n").result(RESULT_S).path
    rest.delete_checkpoint_from_tinker_path(path).result(RESULT_S)
    assert set(of_run(rest, path)) == {sampler}
    for call in (rest.delete_checkpoint_from_tinker_path, rest.get_weights_info_by_tinker_path):
        with pytest.raises(tinker.NotFoundError):
            call(path).result(RESULT_S)


def test_weights_info(service: tinker.ServiceClient, rest: tinker.RestClient):
    _, path = saved(service)
    info = rest.get_weights_info_by_tinker_path(path).result(RESULT_S)
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_mlp) == (BASE, True, 8, True)


def test_external_weights_are_downloaded_by_their_links(service: tinker.ServiceClient, rest: tinker.RestClient):
    client, _ = saved(service)
    answer = client.save_weights_external("n", ttl_seconds=3600).result(RESULT_S)
    assert answer.path == f"tinker://{client.model_id}/external_weights/n"
    links = rest.get_external_weights_urls(answer.path).result(RESULT_S)
    assert links.expires.tzinfo is not None
    assert set(links.urls) == FILES
    sizes = 0
    for url in links.urls.values():
        with urllib.request.urlopen(url, timeout=RESULT_S) as response:  # noqa: S310 - of our own server
            sizes += len(response.read())
    held = of_run(rest, answer.path)[answer.path]
    assert (held.checkpoint_type, held.size_bytes) == ("external", sizes)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(links.urls["adapter_config.json"].replace("signature=", "signature=0"), timeout=RESULT_S)  # noqa: S310


def test_an_external_name_is_used_once(service: tinker.ServiceClient):
    client, _ = saved(service)
    client.save_weights_external("n").result(RESULT_S)
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        client.save_weights_external("n").result(RESULT_S)
    client.save_weights_external("m").result(RESULT_S)


def test_a_copy_is_loaded_when_its_source_is_gone(service: tinker.ServiceClient, rest: tinker.RestClient):
    _, path = saved(service)
    copy = rest.copy_weights(path, "archive", ttl_seconds=3600).result(RESULT_S)
    assert copy != path
    assert service.copy_weights(path).result(RESULT_S) not in (path, copy)
    rest.delete_checkpoint_from_tinker_path(path).result(RESULT_S)
    assert of_run(rest, copy)[copy].checkpoint_type == "training"
    (run,) = rest.list_training_runs(project_id="archive").result(RESULT_S).training_runs
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == copy
    assert service.create_training_client_from_state(copy).result(RESULT_S).get_info().lora_rank == 8


def test_a_copy_that_is_sent_twice_is_made_once(service: tinker.ServiceClient, rest: tinker.RestClient):
    _, path = saved(service)
    request = types.CopyWeightsRequest(source_path=path, destination_project_id="twice")

    async def copy() -> str:
        with rest.holder.aclient(tinker.lib.client_connection_pool_type.ClientConnectionPoolType.TRAIN) as client:
            return (await client.models.copy_weights(request=request, extra_headers={"X-Idempotency-Key": "the-key"})).tinker_path

    paths = {rest.holder.run_coroutine_threadsafe(copy()).result(RESULT_S) for _ in range(2)}
    assert len(paths) == 1
    assert len(rest.list_training_runs(project_id="twice").result(RESULT_S).training_runs) == 1


# The command line


def test_run_commands(service: tinker.ServiceClient, command: Command):
    client, path = saved(service)
    listed = command("run", "list", "--limit", "0")
    assert client.model_id in [run["training_run_id"] for run in listed["runs"]]
    assert command("run", "info", client.model_id)["last_checkpoint"]["tinker_path"] == path
    assert client.model_id in command("run", "list", form="table")
    assert path in command("run", "info", client.model_id, form="table")
    command("run", "info", "nobody", fails="Resource not found")


def test_checkpoint_commands(service: tinker.ServiceClient, command: Command):
    client, path = saved(service)
    assert [entry["tinker_path"] for entry in command("checkpoint", "list", "--run-id", client.model_id)["checkpoints"]] == [path]
    assert path in [entry["tinker_path"] for entry in command("checkpoint", "list", "--limit", "0")["checkpoints"]]
    command("checkpoint", "publish", path)
    command("checkpoint", "set-ttl", path, "--ttl", "7200")
    info = command("checkpoint", "info", path)
    assert (info["public"], info["expires_at"] is None, info["lora_rank"]) == (True, False, 8)
    command("checkpoint", "set-ttl", path, "--remove")
    command("checkpoint", "unpublish", path)
    info = command("checkpoint", "info", path)
    assert (info["public"], info["expires_at"]) == (False, None)
    assert command("checkpoint", "delete", "--yes", path) == {"deleted_count": 1, "failed": []}
    command("checkpoint", "info", path, fails="not found")


def test_checkpoint_commands_as_tables(service: tinker.ServiceClient, command: Command):
    client, path = saved(service)
    for arguments in (("list",), ("list", "--run-id", client.model_id), ("info", path)):
        assert "weights/n" in command("checkpoint", *arguments, form="table")
    for arguments in (("publish", path), ("unpublish", path), ("set-ttl", path, "--ttl", "7200"), ("set-ttl", path, "--remove")):
        command("checkpoint", *arguments, form="table")
    assert "Deleted 1 checkpoint" in command("checkpoint", "delete", "--yes", "--run-id", client.model_id, form="table")


@pytest.mark.parametrize("form", ["json", "table"])
def test_download_commands(service: tinker.ServiceClient, rest: tinker.RestClient, command: Command, tmp_path: Path, form: str):
    """A training checkpoint is exported through a session of the program's own, of which nothing stays."""
    client, training = saved(service)
    external = client.save_weights_external("e").result(RESULT_S).path
    sampler = client.save_weights_for_sampler("s").result(RESULT_S).path
    before = rest.list_user_checkpoints().result(RESULT_S).cursor
    folders = []
    for path in (training, external):
        command("checkpoint", "download", path, "--output", str(tmp_path / "out"), form=form)
        folder = tmp_path / "out" / path.removeprefix("tinker://").replace("/", "_")
        assert {file.name for file in folder.iterdir()} == FILES
        folders.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert folders[0] == folders[1]
    assert rest.list_user_checkpoints().result(RESULT_S).cursor == before
    command("checkpoint", "download", sampler, fails="cannot be downloaded")
