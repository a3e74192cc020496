"""Artifacts in a directory: written beside the tree and renamed into it, and nothing of a failed write stays."""

import os
import threading
from pathlib import Path

import pytest

from tinsmith.config import ConfigError
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id
from tinsmith.lifecycle.directory_storage import DirectoryStorage

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 10}
ARTIFACT = artifact_id("local", "5e55:train:0", ArtifactKind.TRAINING, seq=7, token=3)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(DirectoryStorage(tmp_path / "root"))


@pytest.mark.proves("P8", "P9")
def test_the_first_write_of_an_id_stays(checkpoints: Checkpoints, tmp_path: Path) -> None:
    first = checkpoints.write(ARTIFACT, FILES)
    assert checkpoints.write(ARTIFACT, {"other": b"1"}) == first
    assert checkpoints.read(ARTIFACT) == FILES
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []


@pytest.mark.proves("P9")
def test_of_two_writers_at_once_one_wins_and_both_succeed(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    rename = Path.rename

    def rename_together(self: Path, target: Path) -> Path:
        both.wait(5)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_together)
    threads = [threading.Thread(target=checkpoints.write, args=(ARTIFACT, {"f": bytes([index])})) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert checkpoints.read(ARTIFACT)["f"] in (b"\0", b"\1")


def test_a_write_that_fails_leaves_nothing(checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(ARTIFACT, FILES)
    assert list(checkpoints.artifacts()) == []
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []


def test_a_rename_that_fails_is_told(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise OSError("read-only")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="read-only"):
        checkpoints.write(ARTIFACT, FILES)


def test_what_was_abandoned_goes_when_it_is_old(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.write(ARTIFACT, FILES)
    abandoned = tmp_path / "root" / ".tmp" / "half"
    abandoned.mkdir()
    (abandoned / "adapter_config.json").write_bytes(b"{")
    assert checkpoints.sweep_abandoned(min_age_s=3600) == 0
    assert checkpoints.sweep_abandoned(min_age_s=-1) == 1
    assert not abandoned.exists()
    assert list(checkpoints.artifacts()) == [ARTIFACT]


def test_a_probe_finds_a_usable_directory(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.probe()
    assert list((tmp_path / "root" / ".tmp").iterdir()) == []


def test_a_probe_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"checkpoints\.dir.*name a directory"):
        DirectoryStorage(blocked / "below").probe()
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"something else")
    with pytest.raises(ConfigError, match="give back"):
        DirectoryStorage(tmp_path).probe()
