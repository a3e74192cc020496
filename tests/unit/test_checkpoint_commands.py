"""Checkpoints on the command line: exported through a server, merged, and what is refused leaves nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save
from transformers import AutoModelForCausalLM

from tests.fakes.in_process import BASE, InProcessServer, serve
from tinsmith import checkpoint_commands, cli
from tinsmith.lifecycle.checkpoints import ArtifactKind, artifact_id
from tinsmith.protocol.sessions import BaseModelInfo, CheckpointKind, CheckpointRecord
from tinsmith.protocol.training import LoraConfig
from tinsmith.state.catalog import checkpoint_write

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 50}
RUN = "5e55:train:0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    with serve(tmp_path_factory.mktemp("artifacts")) as running:
        yield running


def kept(server: InProcessServer, kind: CheckpointKind) -> str:
    """A checkpoint's path."""
    services = server.services
    artifact = artifact_id("local", RUN, ArtifactKind(kind.value), seq=1, token=1)
    services.artifacts.write(artifact, ADAPTER | {"train_state.json": b"{}"})
    record = CheckpointRecord(
        tenant="local",
        session_id="5e55",
        run_id=RUN,
        kind=kind,
        name="n",
        artifact=artifact,
        base_model=BASE,
        lora=LoraConfig(rank=4, seed=1),
        created_ms=0,
        size_bytes=1,
    )
    write = checkpoint_write(record)
    assert write.value is not None
    server.call(services.store.put(write.table, write.id, write.value))
    return record.path


def export(server: InProcessServer, path: str, out: Path, *more: str) -> int:
    return cli.main(["checkpoints", "export", path, "--out", str(out), "--url", server.url, *more])


@pytest.mark.parametrize("kind", list(CheckpointKind))
def test_an_export_is_the_adapter_alone(
    server: InProcessServer, tmp_path: Path, kind: CheckpointKind, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "below" / "adapter"
    assert export(server, kept(server, kind), out) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == ADAPTER
    assert [path.name for path in out.parent.iterdir()] == ["adapter"]
    assert capsys.readouterr().out == f"{out}\n"


@pytest.mark.parametrize(
    ("path", "more", "code", "said"),
    [
        ("tinker://nobody/weights/none", (), 1, "the server refuses (404)"),
        ("nobody/weights/none", (), 1, "is no checkpoint; send tinker://"),
        (f"tinker://{RUN}/weights/n", ("--base", "smollm2"), 2, "--base: is for --merged"),
        (f"tinker://{RUN}/weights/n", ("--api-key", "\n"), 2, "--api-key: must be printable"),
        (f"tinker://{RUN}/weights/n", ("--merged", "--base", "smollm2"), 1, "names no base model"),
    ],
)
def test_what_is_refused_leaves_nothing(
    server: InProcessServer, tmp_path: Path, path: str, more: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(server, CheckpointKind.TRAINING)
    assert export(server, path, tmp_path / "out", *more) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays(server: InProcessServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(server, kept(server, CheckpointKind.TRAINING), tmp_path) == 1
    assert "exists; name a new folder" in capsys.readouterr().err


def test_a_server_that_is_away_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["checkpoints", "export", f"tinker://{RUN}/weights/n", "--out", str(tmp_path / "out"), "--url", "http://127.0.0.1:9"]
    assert cli.main(asked) == 1
    assert "is the server up?" in capsys.readouterr().err


def test_a_merged_export_is_a_model(
    server: InProcessServer, tmp_path: Path, tiny_model: BaseModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"r": 2, "lora_alpha": 32, "base_model_name_or_path": tiny_model.name}
    files = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save({})}
    monkeypatch.setattr(checkpoint_commands, "_download", lambda url, key, path: files)
    path = f"tinker://{RUN}/weights/n"
    assert export(server, path, tmp_path / "merged", "--merged", "--base", tiny_model.path) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.vocab_size == tiny_model.vocab_size
