"""Artifacts on disk: whole or not at all, checked when read, and no path that a caller could choose."""

import json
from pathlib import Path

import pytest

from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id, folder_of, model_folder, tenant_of
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.protocol.errors import NotFound, ValidationFailed
from tinsmith.state.store import SCHEMA_VERSION

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 10}
ARTIFACT = artifact_id("local", "5e55:train:0", ArtifactKind.TRAINING, seq=7, token=3)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(DirectoryStorage(tmp_path / "root"))


def folder(tmp_path: Path) -> Path:
    return tmp_path / "root" / ARTIFACT


def test_an_artifact_comes_back_as_it_was_written(checkpoints: Checkpoints) -> None:
    manifest = checkpoints.write(ARTIFACT, FILES)
    assert checkpoints.read(ARTIFACT) == FILES
    assert manifest.size_bytes == sum(map(len, FILES.values()))
    assert (manifest.tenant, manifest.artifact, manifest.schema_version) == ("local", ARTIFACT, SCHEMA_VERSION)


def test_an_id_holds_tenant_model_kind_seq_and_token() -> None:
    assert ARTIFACT == "local/5e55=3Atrain=3A0/weights/7-3"
    assert tenant_of(ARTIFACT) == "local"
    assert folder_of(ARTIFACT) == model_folder("local", "5e55:train:0") == "local/5e55=3Atrain=3A0"


def test_different_models_have_different_folders() -> None:
    ids = {artifact_id("t", model, ArtifactKind.SNAPSHOT, seq=1, token=1) for model in ("a:b", "a=3Ab", "a%3Ab", "a b", "a/b")}
    assert len(ids) == 5


@pytest.mark.parametrize("artifact", ["", "a/b/c", "a/b/c/d/e", "../b/c/d", "a/b/c/..", "/b/c/d", "a/b/c/.x", "a/b/c/d\n", "a/b\0/c/d"])
def test_an_id_cannot_leave_the_tree(checkpoints: Checkpoints, artifact: str) -> None:
    for use in (checkpoints.read, checkpoints.manifest, checkpoints.delete):
        with pytest.raises(ValidationFailed, match="not the id"):
            use(artifact)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "manifest.json", "x" * 300])
def test_a_file_name_cannot_leave_its_artifact(checkpoints: Checkpoints, name: str) -> None:
    with pytest.raises(ValidationFailed, match="not the name"):
        checkpoints.write(ARTIFACT, {name: b""})


def test_an_unknown_artifact_is_not_found(checkpoints: Checkpoints) -> None:
    with pytest.raises(NotFound, match="load another"):
        checkpoints.read(ARTIFACT)


@pytest.mark.proves("R11")
@pytest.mark.parametrize("damage", ["truncated", "changed", "gone", "manifest", "manifest of another"])
def test_damage_is_found(checkpoints: Checkpoints, tmp_path: Path, damage: str) -> None:
    checkpoints.write(ARTIFACT, FILES)
    weights, manifest = folder(tmp_path) / "adapter_model.safetensors", folder(tmp_path) / "manifest.json"
    match damage:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "changed":
            weights.write_bytes(bytes(2560))
        case "gone":
            weights.unlink()
        case "manifest":
            manifest.write_text("{")
        case "manifest of another":
            manifest.write_text(manifest.read_text().replace("7-3", "7-4"))
    with pytest.raises(ValidationFailed, match=r"damaged.*load another checkpoint"):
        checkpoints.read(ARTIFACT)


def test_a_manifest_cannot_name_a_file_elsewhere(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.write(ARTIFACT, FILES)
    manifest = folder(tmp_path) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("adapter_config.json", "../../../../secret"))
    with pytest.raises(ValidationFailed, match="not the name"):
        checkpoints.read(ARTIFACT)


def test_a_newer_schema_is_refused_with_the_remedy(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.write(ARTIFACT, FILES)
    manifest = folder(tmp_path) / "manifest.json"
    content = json.loads(manifest.read_text()) | {"schema_version": SCHEMA_VERSION + 1, "later_field": 1}
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValidationFailed, match="upgrade the server"):
        checkpoints.read(ARTIFACT)


def test_a_delete_removes_all_of_it_once(checkpoints: Checkpoints) -> None:
    checkpoints.write(ARTIFACT, FILES)
    assert checkpoints.delete(ARTIFACT)
    assert not checkpoints.delete(ARTIFACT)
    with pytest.raises(NotFound):
        checkpoints.read(ARTIFACT)


def test_what_is_old_and_outside_the_names_is_unnamed(checkpoints: Checkpoints) -> None:
    model, other = "5e55:train:0", "5e55:train:1"
    leftover, foreign = (artifact_id("local", owner, ArtifactKind.SNAPSHOT, seq=7, token=2) for owner in (model, other))
    for artifact in (ARTIFACT, leftover, foreign):
        checkpoints.write(artifact, FILES)
    models = {model_folder("local", model)}
    assert checkpoints.unnamed({ARTIFACT}, models, min_age_s=3600) == set()  # it may be on its way to being named
    assert checkpoints.unnamed({ARTIFACT}, models, min_age_s=-1) == {leftover}


def test_a_listing_survives_what_vanishes_under_it(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "artifacts", lambda self: iter([ARTIFACT]))
    assert checkpoints.unnamed((), {folder_of(ARTIFACT)}, min_age_s=-1) == set()
