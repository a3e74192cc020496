"""Artifacts in a directory tree that every node of the cluster sees.

    <root>/<tenant>/<model>/<kind>/<seq>-<token>/    manifest.json and the files
    <root>/.tmp/                                     artifacts being written, and being deleted

An artifact is written beside the tree and renamed into it whole, so a reader sees all of it or nothing.
"""

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from tinsmith.config import ConfigError
from tinsmith.lifecycle.storage import HIDDEN, LEVELS, MANIFEST, FileEntry, Manifest, is_artifact

_CHUNK = 1024 * 1024  # bytes of a file that one reader holds


class DirectoryStorage:
    """An `ArtifactStorage` below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser()
        self._hidden = self._root / HIDDEN

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        final = self._root / manifest.artifact
        if final.exists():
            return
        temporary = self._temporary()
        try:
            _fill(temporary, files, manifest)
            final.parent.mkdir(parents=True, exist_ok=True)
            _move_in(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def manifest(self, artifact: str) -> bytes:
        try:
            return (self._root / artifact / MANIFEST).read_bytes()
        except NotADirectoryError as error:
            raise FileNotFoundError(artifact) from error

    def read(self, artifact: str, name: str, entry: FileEntry) -> bytes:
        return (self._root / artifact / name).read_bytes()

    def chunks(self, artifact: str, name: str, entry: FileEntry) -> Iterator[bytes]:
        with (self._root / artifact / name).open("rb") as file:
            yield from iter(lambda: file.read(_CHUNK), b"")

    def delete(self, artifact: str) -> bool:
        doomed = self._temporary()
        try:
            (self._root / artifact).rename(doomed)
        except FileNotFoundError:
            return False
        shutil.rmtree(doomed)
        return True

    def artifacts(self) -> Iterator[str]:
        for path in self._root.glob("/".join(["*"] * LEVELS)):
            artifact = path.relative_to(self._root).as_posix()
            if is_artifact(artifact):
                yield artifact

    def written_s(self, artifact: str) -> float | None:
        return _modified_s(self._root / artifact)

    def sweep_abandoned(self, before_s: float) -> int:
        ages = [(path, _modified_s(path)) for path in self._hidden.glob("*")]
        abandoned = [path for path, modified_s in ages if modified_s is not None and modified_s < before_s]
        for path in abandoned:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(abandoned)

    def probe(self) -> None:
        content = uuid.uuid4().bytes
        probe = self._hidden / f"probe-{content.hex()}"
        try:
            self._hidden.mkdir(parents=True, exist_ok=True)
            _write_file(probe, content)
            found = probe.read_bytes()
            probe.unlink()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError([f"checkpoints.dir: {self._root}: {reason}; name a directory that every node can read and write"]) from error
        if found != content:
            raise ConfigError([f"checkpoints.dir: {self._root} does not give back what was written; name another directory"])

    def _temporary(self) -> Path:
        self._hidden.mkdir(parents=True, exist_ok=True)
        return self._hidden / uuid.uuid4().hex


def _fill(folder: Path, files: Mapping[str, bytes], manifest: Manifest) -> None:
    """All files on disk, the manifest after the others."""
    folder.mkdir()
    for name, content in files.items():
        _write_file(folder / name, content)
    _write_file(folder / MANIFEST, manifest.encoded())
    _sync_folder(folder)


def _move_in(temporary: Path, final: Path) -> None:
    """Make the artifact visible; the first writer of an id wins."""
    try:
        temporary.rename(final)
    except OSError:
        if not final.exists():
            raise
        return
    for folder in (final.parent, *final.parent.parents[: LEVELS - 1]):
        _sync_folder(folder)


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _modified_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
