"""Storages of artifacts: whole or not at all, the first writer of an id wins, and what was cut short is swept."""

import hashlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.fakes.s3_server import BUCKET, S3Server
from tinsmith.config import ObjectStoreOptions
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.lifecycle.object_storage import ObjectStorage
from tinsmith.lifecycle.storage import ArtifactStorage, FileEntry, Manifest
from tinsmith.state.store import SCHEMA_VERSION

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)), "empty.json": b""}
LARGE = bytes(range(256)) * 17_000  # over a chunk of every storage, and no whole number of them
ARTIFACT = artifact_id("local", "5e55:train:0", ArtifactKind.TRAINING, seq=7, token=3)
FUTURE_S = 3600.0


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["directory", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStorage:
    match request.param:
        case "directory":
            return DirectoryStorage(tmp_path / "root")
        case "memory":
            memory = fsspec.filesystem("memory", global_store=False, skip_instance_cache=True)
            return ObjectStorage(memory, "/bucket/prefix")
        case _:
            server: S3Server = request.getfixturevalue("s3_server")
            monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            options = ObjectStoreOptions(endpoint_url=server.url, addressing="path", region="us-east-1")
            return ObjectStorage.open(f"s3://{BUCKET}/{uuid.uuid4().hex}", options)


def described(files: dict[str, bytes], artifact: str = ARTIFACT) -> Manifest:
    entries = {name: FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    return Manifest(schema_version=SCHEMA_VERSION, tenant="local", artifact=artifact, files=entries)


def publish(storage: ArtifactStorage, files: dict[str, bytes], artifact: str = ARTIFACT) -> Manifest:
    manifest = described(files, artifact)
    storage.publish(manifest, files)
    return manifest


def found(storage: ArtifactStorage, artifact: str = ARTIFACT) -> dict[str, bytes]:
    manifest = Manifest.model_validate_json(storage.manifest(artifact))
    return {name: storage.read(artifact, name, entry) for name, entry in manifest.files.items()}


class Cut(OSError):
    """The writer ended here."""


def cut_after(num_writes: int) -> "CutFiles":
    return CutFiles(FILES, num_writes)


class CutFiles(dict[str, bytes]):
    """Files of which only the first so many can be had."""

    def __init__(self, files: dict[str, bytes], num_whole: int) -> None:
        super().__init__(files)
        self._num_whole = num_whole

    def items(self) -> Iterator[tuple[str, bytes]]:  # type: ignore[override]
        for number, item in enumerate(super().items()):
            if number == self._num_whole:
                raise Cut
            yield item


@pytest.mark.proves("P8", "P9")
def test_an_artifact_comes_back_whole_and_in_pieces(storage: ArtifactStorage) -> None:
    files = FILES | {"adapter_model.safetensors": LARGE}
    manifest = publish(storage, files)
    assert storage.manifest(ARTIFACT) == manifest.encoded()
    assert found(storage) == files
    chunks = list(storage.chunks(ARTIFACT, "adapter_model.safetensors", manifest.files["adapter_model.safetensors"]))
    assert len(chunks) > 1
    assert b"".join(chunks) == LARGE
    assert b"".join(storage.chunks(ARTIFACT, "empty.json", manifest.files["empty.json"])) == b""


@pytest.mark.proves("P8", "P9")
def test_the_first_writer_of_an_id_wins(storage: ArtifactStorage) -> None:
    publish(storage, FILES)
    publish(storage, {"adapter_config.json": b"other"})
    assert found(storage) == FILES


@pytest.mark.proves("P9")
def test_a_writer_that_finds_another_while_it_writes_changes_nothing(storage: ArtifactStorage) -> None:
    class Overtaken(dict[str, bytes]):
        def items(self) -> Iterator[tuple[str, bytes]]:  # type: ignore[override]
            publish(storage, FILES)
            yield from super().items()

    late = Overtaken(dict.fromkeys(FILES, b"other"))
    storage.publish(described(dict(late)), late)
    assert found(storage) == FILES
    assert list(storage.artifacts()) == [ARTIFACT]
    storage.sweep_abandoned(time.time() + FUTURE_S)
    assert found(storage) == FILES


@pytest.mark.proves("P9")
def test_what_has_no_manifest_is_no_artifact(storage: ArtifactStorage) -> None:
    with pytest.raises(Cut):
        storage.publish(described(FILES), cut_after(2))
    assert list(storage.artifacts()) == []
    assert storage.written_s(ARTIFACT) is None
    assert not storage.delete(ARTIFACT)
    with pytest.raises(FileNotFoundError):
        storage.manifest(ARTIFACT)
    publish(storage, FILES)
    assert found(storage) == FILES


def test_what_is_not_there_is_not_found(storage: ArtifactStorage) -> None:
    entry = FileEntry(size=1, sha256="0" * 64)
    with pytest.raises(FileNotFoundError):
        storage.manifest(ARTIFACT)
    with pytest.raises(FileNotFoundError):
        storage.read(ARTIFACT, "file", entry)
    with pytest.raises(FileNotFoundError):
        list(storage.chunks(ARTIFACT, "file", entry))
    assert storage.written_s(ARTIFACT) is None
    assert list(storage.artifacts()) == []
    assert storage.sweep_abandoned(time.time() + FUTURE_S) == 0


def test_artifacts_are_listed_dated_and_deleted_one_by_one(storage: ArtifactStorage) -> None:
    other = artifact_id("local", "5e55:train:0", ArtifactKind.SAMPLER, seq=7, token=3)
    for artifact in (ARTIFACT, other):
        publish(storage, {"adapter_config.json": b"{}"}, artifact)
        written_s = storage.written_s(artifact)
        assert written_s is not None
        assert abs(written_s - time.time()) < 60
    assert set(storage.artifacts()) == {ARTIFACT, other}
    assert storage.delete(ARTIFACT)
    assert not storage.delete(ARTIFACT)
    assert list(storage.artifacts()) == [other]
    with pytest.raises(FileNotFoundError):
        storage.manifest(ARTIFACT)
    assert found(storage, other) == {"adapter_config.json": b"{}"}


def test_an_id_can_be_written_again_after_its_deletion(storage: ArtifactStorage) -> None:
    publish(storage, FILES)
    storage.delete(ARTIFACT)
    publish(storage, {"adapter_config.json": b"other"})
    assert found(storage) == {"adapter_config.json": b"other"}


def test_a_sweep_leaves_what_is_whole_and_what_is_young(storage: ArtifactStorage) -> None:
    publish(storage, FILES)
    assert storage.sweep_abandoned(time.time() - FUTURE_S) == 0
    assert storage.sweep_abandoned(time.time() + FUTURE_S) == 0
    assert found(storage) == FILES


def test_the_probe_leaves_nothing_behind(storage: ArtifactStorage) -> None:
    storage.probe()
    assert storage.sweep_abandoned(time.time() + FUTURE_S) == 0
    assert list(storage.artifacts()) == []


def test_checkpoints_lie_in_any_storage(storage: ArtifactStorage) -> None:
    checkpoints = Checkpoints(storage)
    manifest = checkpoints.write(ARTIFACT, FILES)
    assert checkpoints.read(ARTIFACT) == FILES
    name = "adapter_model.safetensors"
    assert b"".join(checkpoints.stream(ARTIFACT, name, manifest.files[name])) == FILES[name]
    assert checkpoints.unnamed((), {"local/5e55=3Atrain=3A0"}, min_age_s=FUTURE_S) == set()
    assert checkpoints.unnamed((), {"local/5e55=3Atrain=3A0"}, min_age_s=-FUTURE_S) == {ARTIFACT}
