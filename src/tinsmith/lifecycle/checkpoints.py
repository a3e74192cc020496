"""Artifacts: immutable sets of files under an id, in a directory tree that every node of the cluster sees.

    <root>/<tenant>/<model>/<kind>/<seq>-<token>/    manifest.json and the files
    <root>/.tmp/                                     artifacts being written, and being deleted

An artifact is written beside the tree and renamed into it whole, its manifest last, so a reader sees all of it or nothing. The id holds
the token of the lane's owner, so a fenced replica cannot write over its successor. What an artifact is for, and whether a caller may
have it, the catalog knows; here are bytes, sizes and hashes. All calls block: run them in a thread.
"""

import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from tinsmith.config import ConfigError
from tinsmith.protocol.errors import NotFound, ValidationFailed
from tinsmith.state.store import SCHEMA_VERSION

_MANIFEST = "manifest.json"
_TMP = ".tmp"
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=~-]{0,250}")
_LEVELS = 4  # tenant, model, kind, seq-token


class ArtifactKind(StrEnum):
    """The third segment of an artifact id."""

    SNAPSHOT = "snapshots"
    TRAINING = "weights"
    SAMPLER = "sampler_weights"


class FileEntry(BaseModel):
    """A file of an artifact: bytes, and their sha256 in hex."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    size: int
    sha256: str


class Manifest(BaseModel):
    """What an artifact holds. Fields of a newer writer are ignored; a newer schema is refused."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int
    tenant: str
    artifact: str
    files: dict[str, FileEntry]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


def artifact_id(tenant: str, model_id: str, kind: ArtifactKind, *, seq: int, token: int) -> str:
    """The id of what a lane's owner with `token` makes of the adapter as entry `seq` left it."""
    return _checked_id("/".join((model_folder(tenant, model_id), kind.value, f"{seq}-{token}")))


def model_folder(tenant: str, model_id: str) -> str:
    """The first two segments of the ids of a model's artifacts."""
    return f"{_safe(tenant)}/{_safe(model_id)}"


def folder_of(artifact: str) -> str:
    """The `model_folder` of an artifact id."""
    return "/".join(artifact.split("/", 2)[:2])


def tenant_of(artifact: str) -> str:
    """The tenant's segment of an artifact id, as it lies on disk."""
    return artifact.split("/", 1)[0]


class Checkpoints:
    """Artifacts under one root directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser()
        self._tmp = self._root / _TMP

    def write(self, artifact: str, files: Mapping[str, bytes]) -> Manifest:
        """Store the files under a new id, durably. An artifact that is already there stays: the id names its content. Raises OSError."""
        final = self._path(artifact)
        if final.exists():
            return self.manifest(artifact)
        manifest = _describe(artifact, files)
        temporary = self._temporary()
        try:
            _fill(temporary, files, manifest)
            final.parent.mkdir(parents=True, exist_ok=True)
            self._move_in(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return self.manifest(artifact)

    def manifest(self, artifact: str) -> Manifest:
        """Raises NotFound; ValidationFailed for a damaged manifest or one of a newer schema."""
        try:
            content = (self._path(artifact) / _MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound("the checkpoint's files are gone; load another checkpoint") from error
        try:
            manifest = Manifest.model_validate_json(content)
        except ValidationError as error:
            raise _damaged(_MANIFEST) from error
        if manifest.schema_version > SCHEMA_VERSION:
            raise ValidationFailed(
                f"the checkpoint has schema {manifest.schema_version}, this server reads up to {SCHEMA_VERSION}; upgrade the server"
            )
        if manifest.artifact != artifact or manifest.tenant != tenant_of(artifact):
            raise _damaged(_MANIFEST)
        return manifest

    def read(self, artifact: str) -> dict[str, bytes]:
        """All files, checked against the manifest. Raises NotFound, ValidationFailed (damaged, or of a newer schema), OSError."""
        manifest = self.manifest(artifact)
        return {name: self._checked_file(artifact, name, entry) for name, entry in manifest.files.items()}

    def file(self, artifact: str, name: str) -> Path:
        """Where a file that the manifest lists lies. Raises NotFound."""
        if name not in self.manifest(artifact).files:
            raise NotFound(f"the checkpoint has no file {name[:100]!r}")
        return self._path(artifact) / name

    def delete(self, artifact: str) -> bool:
        """Remove the artifact as a whole; False if there was none."""
        doomed = self._temporary()
        try:
            self._path(artifact).rename(doomed)
        except FileNotFoundError:
            return False
        shutil.rmtree(doomed)
        return True

    def artifacts(self) -> Iterator[str]:
        """Ids of all artifacts, in no order."""
        for path in self._root.glob("/".join(["*"] * _LEVELS)):
            segments = path.relative_to(self._root).parts
            if segments[0] != _TMP and all(map(_is_segment, segments)):
                yield "/".join(segments)

    def unnamed(self, live: Collection[str], models: Collection[str], *, min_age_s: float) -> set[str]:
        """Artifacts of these models (`model_folder`) that are outside `live` and older than `min_age_s`, which must exceed the time from
        writing an artifact to settling it."""
        horizon = time.time() - min_age_s
        candidates = (artifact for artifact in self.artifacts() if folder_of(artifact) in models and artifact not in live)
        return {artifact for artifact in candidates if self._is_older(self._path(artifact), horizon)}

    def sweep_abandoned(self, *, min_age_s: float) -> int:
        """Delete what is left of writes and deletions that were cut short longer ago than that. Answers how many there were."""
        horizon = time.time() - min_age_s
        abandoned = [path for path in self._tmp.glob("*") if self._is_older(path, horizon)]
        for path in abandoned:
            shutil.rmtree(path, ignore_errors=True)
        return len(abandoned)

    def probe(self) -> None:
        """Write and read a file as an artifact's files are. Raises ConfigError with the remedy."""
        content = uuid.uuid4().bytes
        probe = self._tmp / f"probe-{content.hex()}"
        try:
            self._tmp.mkdir(parents=True, exist_ok=True)
            _write_file(probe, content)
            found = probe.read_bytes()
            probe.unlink()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError([f"checkpoints.dir: {self._root}: {reason}; name a directory that every node can read and write"]) from error
        if found != content:
            raise ConfigError([f"checkpoints.dir: {self._root} does not give back what was written; name another directory"])

    def _path(self, artifact: str) -> Path:
        return self._root.joinpath(*_checked_id(artifact).split("/"))

    def _temporary(self) -> Path:
        self._tmp.mkdir(parents=True, exist_ok=True)
        return self._tmp / uuid.uuid4().hex

    def _move_in(self, temporary: Path, final: Path) -> None:
        """Make the artifact visible; the first writer of an id wins."""
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
            return
        for folder in (final.parent, *final.parent.parents[: _LEVELS - 1]):
            _sync_folder(folder)

    def _checked_file(self, artifact: str, name: str, entry: FileEntry) -> bytes:
        try:
            content = (self._path(artifact) / _checked_file_name(name)).read_bytes()
        except FileNotFoundError as error:
            raise _damaged(name) from error
        if len(content) != entry.size or hashlib.sha256(content).hexdigest() != entry.sha256:
            raise _damaged(name)
        return content

    @staticmethod
    def _is_older(path: Path, horizon: float) -> bool:
        try:
            return path.stat().st_mtime < horizon
        except FileNotFoundError:
            return False


def _fill(folder: Path, files: Mapping[str, bytes], manifest: Manifest) -> None:
    """All files on disk, the manifest after the others."""
    folder.mkdir()
    for name, content in files.items():
        _write_file(folder / name, content)
    _write_file(folder / _MANIFEST, manifest.model_dump_json(indent=1).encode())
    _sync_folder(folder)


def _describe(artifact: str, files: Mapping[str, bytes]) -> Manifest:
    entries = {
        _checked_file_name(name): FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(files.items())
    }
    return Manifest(schema_version=SCHEMA_VERSION, tenant=tenant_of(artifact), artifact=artifact, files=entries)


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


def _safe(text: str) -> str:
    """Text as one path segment, injective: every character that a segment may not hold becomes =XX."""
    return quote(text, safe="").replace("%", "=")


def _is_segment(text: str) -> bool:
    return _SEGMENT.fullmatch(text) is not None and ".." not in text


def _checked_id(artifact: str) -> str:
    segments = artifact.split("/")
    if len(segments) != _LEVELS or not all(map(_is_segment, segments)):
        raise ValidationFailed(f"{artifact[:200]!r} is not the id of an artifact")
    return artifact


def _checked_file_name(name: str) -> str:
    if not _is_segment(name) or name == _MANIFEST:
        raise ValidationFailed(f"{name[:100]!r} is not the name of an artifact's file")
    return name


def _damaged(name: str) -> ValidationFailed:
    return ValidationFailed(f"the checkpoint is damaged: {name[:100]!r} is not what was saved; load another checkpoint")
