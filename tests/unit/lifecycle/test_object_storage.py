"""Artifacts in an object store: where their objects lie, what a store that misbehaves leads to, and that keys stay out of messages."""

import socket
import sys
import time

import fsspec
import pytest

from tests.fakes.s3_server import BUCKET, ENVIRONMENT, S3Server
from tinsmith.config import CheckpointConfig, ConfigError, ObjectStoreOptions
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id
from tinsmith.lifecycle.object_storage import ObjectStorage
from tinsmith.protocol.errors import ValidationFailed

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
OTHER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"changed"}
ARTIFACT = artifact_id("local", "5e55:train:0", ArtifactKind.TRAINING, seq=7, token=3)
FUTURE_S = 3600.0


@pytest.fixture
def memory() -> fsspec.AbstractFileSystem:
    return fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)


@pytest.fixture
def checkpoints(memory: fsspec.AbstractFileSystem) -> Checkpoints:
    return Checkpoints(ObjectStorage(memory, "/bucket/prefix"))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def objects(memory: fsspec.AbstractFileSystem) -> set[str]:
    return {path.removeprefix("/bucket/prefix/") for path in memory.find("/bucket/prefix")}


def opened(url: str, server: str) -> Checkpoints:
    return Checkpoints.open(CheckpointConfig(url=url, options=ObjectStoreOptions(endpoint_url=server, addressing="path", region="r")))


@pytest.mark.proves("P9")
def test_the_manifest_is_the_last_object(
    checkpoints: Checkpoints, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    pipe_file = memory.pipe_file

    def noted(path: str, value: bytes, mode: str = "overwrite") -> None:
        written.append(f"{mode} {path.rpartition('/')[2].rpartition('-')[2]}")
        pipe_file(path, value, mode=mode)

    monkeypatch.setattr(memory, "pipe_file", noted)
    checkpoints.write(ARTIFACT, FILES)
    assert written == ["overwrite adapter_config.json", "overwrite adapter_model.safetensors", "create manifest.json"]


@pytest.mark.proves("P9")
def test_files_of_two_writers_lie_side_by_side_and_the_losers_are_swept(
    checkpoints: Checkpoints, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as overtaken:
        overtaken.setattr(ObjectStorage, "_has", lambda self, artifact: False)
        checkpoints.write(ARTIFACT, FILES)
        with pytest.raises(FileExistsError):
            checkpoints.write(ARTIFACT, OTHER)
    assert checkpoints.read(ARTIFACT) == FILES
    assert len(objects(memory)) == 4
    assert checkpoints.sweep_abandoned(min_age_s=FUTURE_S) == 0
    assert checkpoints.sweep_abandoned(min_age_s=-FUTURE_S) == 1
    assert len(objects(memory)) == 3
    assert checkpoints.read(ARTIFACT) == FILES


@pytest.mark.proves("P8")
def test_a_manifest_whose_answer_was_lost_is_there(
    checkpoints: Checkpoints, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_file = memory.pipe_file

    def lost(path: str, value: bytes, mode: str = "overwrite") -> None:
        pipe_file(path, value, mode=mode)
        if mode == "create":
            raise OSError("connection reset")

    monkeypatch.setattr(memory, "pipe_file", lost)
    assert checkpoints.write(ARTIFACT, FILES).size_bytes == 9


def test_what_a_deletion_left_is_swept(
    checkpoints: Checkpoints, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.write(ARTIFACT, FILES)
    rm_file = memory.rm_file

    def cut(path: str) -> None:
        if not path.endswith("manifest.json"):
            raise OSError("connection reset")
        rm_file(path)

    with monkeypatch.context() as failing:
        failing.setattr(memory, "rm_file", cut)
        with pytest.raises(OSError, match="reset"):
            checkpoints.delete(ARTIFACT)
    assert list(checkpoints.artifacts()) == []
    assert len(objects(memory)) == 2
    assert checkpoints.sweep_abandoned(min_age_s=-FUTURE_S) == 1
    assert objects(memory) == set()


def test_a_sweep_keeps_what_is_written_anew_under_it(
    checkpoints: Checkpoints, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may be old when its objects are judged."""
    checkpoints.write(ARTIFACT, FILES)
    memory.rm_file(f"/bucket/prefix/{ARTIFACT}/manifest.json")
    listed = memory.find("/bucket/prefix")
    horizon_s = time.time()
    checkpoints.write(ARTIFACT, FILES)
    monkeypatch.setattr(memory, "find", lambda path: listed)
    assert ObjectStorage(memory, "/bucket/prefix").sweep_abandoned(horizon_s) == 0
    assert checkpoints.read(ARTIFACT) == FILES


def test_objects_of_others_in_the_bucket_are_left_alone(checkpoints: Checkpoints, memory: fsspec.AbstractFileSystem) -> None:
    for path in ("/bucket/prefix/README", "/bucket/prefix/a/b", "/bucket/prefix/c/d/e/f/g/h", "/bucket/prefixed/local/m/weights/1-1/x"):
        memory.pipe_file(path, b"theirs")
    assert checkpoints.sweep_abandoned(min_age_s=-FUTURE_S) == 0
    assert list(checkpoints.artifacts()) == []
    assert len(memory.find("/bucket")) == 4


def test_damage_is_found(checkpoints: Checkpoints, memory: fsspec.AbstractFileSystem) -> None:
    manifest = checkpoints.write(ARTIFACT, FILES)
    name = "adapter_model.safetensors"
    [path] = [path for path in memory.find("/bucket/prefix") if path.endswith(name)]
    for content in (b"weight!", b"weigh", None):
        if content is None:
            memory.rm_file(path)
        else:
            memory.pipe_file(path, content)
        with pytest.raises(ValidationFailed, match="damaged"):
            checkpoints.read(ARTIFACT)
        with pytest.raises(ValidationFailed, match="damaged"):
            list(checkpoints.stream(ARTIFACT, name, manifest.files[name]))


@pytest.mark.usefixtures("environment")
def test_a_store_that_lets_a_second_writer_win_is_no_store() -> None:
    with S3Server(is_guarded=False) as server:
        with pytest.raises(ConfigError, match=r"checkpoints\.url.*second writer.*If-None-Match"):
            opened(f"s3://{BUCKET}/prefix", server.url).probe()
        assert server.keys == []


@pytest.mark.usefixtures("environment")
def test_a_store_that_is_away_is_told_with_the_remedy_and_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConfigError, match=r"checkpoints\.url: bucket/prefix: .*AWS_ACCESS_KEY_ID") as told:
        opened("s3://bucket/prefix", url).probe()
    assert "planted-secret" not in str(told.value)


def test_without_its_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    with pytest.raises(ConfigError, match=r"pip install 'tinsmith\[s3\]'"):
        Checkpoints.open(CheckpointConfig(url="s3://bucket/prefix"))
