"""Artifacts: immutable sets of files under an id, whole or not at all, and checked against their manifest when they are read.

    tenant/model/kind/seq-token

The id holds the token of the lane's owner, so a fenced replica cannot write over its successor. What an artifact is for, and whether a
caller may have it, the catalog knows; how bytes become durable, the storage. All calls block: run them in a thread.
"""

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from urllib.parse import quote

from pydantic import ValidationError

from tinsmith.config import CheckpointConfig
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.lifecycle.object_storage import ObjectStorage
from tinsmith.lifecycle.storage import MANIFEST, ArtifactStorage, FileEntry, Manifest, is_artifact, is_file_name
from tinsmith.protocol.errors import NotFound, ValidationFailed
from tinsmith.state.store import SCHEMA_VERSION


class ArtifactKind(StrEnum):
    """The third segment of an artifact id."""

    SNAPSHOT = "snapshots"
    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


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
    """The tenant's segment of an artifact id, as it is stored."""
    return artifact.split("/", 1)[0]


class Checkpoints:
    """The artifacts of one storage."""

    def __init__(self, storage: ArtifactStorage) -> None:
        self._storage = storage

    @classmethod
    def open(cls, config: CheckpointConfig) -> "Checkpoints":
        """Those of the configured storage, which need not answer yet. Raises ConfigError where a package for it is missing."""
        if config.url is None:
            return cls(DirectoryStorage(config.dir))
        return cls(ObjectStorage.open(config.url, config.options))

    def write(self, artifact: str, files: Mapping[str, bytes]) -> Manifest:
        """Store the files under a new id, durably. An artifact that is already there stays: the id names its content. Raises OSError."""
        self._storage.publish(_describe(artifact, files), files)
        return self.manifest(artifact)

    def manifest(self, artifact: str) -> Manifest:
        """Raises NotFound; ValidationFailed for a damaged manifest or one of a newer schema; OSError."""
        try:
            content = self._storage.manifest(_checked_id(artifact))
        except FileNotFoundError as error:
            raise NotFound("the checkpoint's files are gone; load another checkpoint") from error
        try:
            manifest = Manifest.model_validate_json(content)
        except ValidationError as error:
            raise _damaged(MANIFEST) from error
        if manifest.schema_version > SCHEMA_VERSION:
            raise ValidationFailed(
                f"the checkpoint has schema {manifest.schema_version}, this server reads up to {SCHEMA_VERSION}; upgrade the server"
            )
        if manifest.artifact != artifact or manifest.tenant != tenant_of(artifact):
            raise _damaged(MANIFEST)
        return manifest

    def read(self, artifact: str) -> dict[str, bytes]:
        """All files, checked against the manifest. Raises NotFound, ValidationFailed (damaged, or of a newer schema), OSError."""
        manifest = self.manifest(artifact)
        return {name: self._checked_file(artifact, name, entry) for name, entry in manifest.files.items()}

    def stream(self, artifact: str, name: str, entry: FileEntry) -> Iterator[bytes]:
        """A file of the manifest, in chunks. Its end is given out only if the whole is what was saved, so a damaged file is never taken for
        a whole one. Raises ValidationFailed (damaged), OSError."""
        try:
            yield from _verified(self._storage.chunks(_checked_id(artifact), _checked_file_name(name), entry), name, entry)
        except FileNotFoundError as error:
            raise _damaged(name) from error

    def delete(self, artifact: str) -> bool:
        """Remove the artifact as a whole; False if there was none."""
        return self._storage.delete(_checked_id(artifact))

    def artifacts(self) -> Iterator[str]:
        """Ids of all artifacts, in no order."""
        return self._storage.artifacts()

    def unnamed(self, live: Collection[str], models: Collection[str], *, min_age_s: float) -> set[str]:
        """Artifacts of these models (`model_folder`) that are outside `live` and older than `min_age_s`, which must exceed the time from
        writing an artifact to settling it."""
        horizon_s = time.time() - min_age_s
        candidates = (artifact for artifact in self.artifacts() if folder_of(artifact) in models and artifact not in live)
        return {artifact for artifact in candidates if self._is_older(artifact, horizon_s)}

    def sweep_abandoned(self, *, min_age_s: float) -> int:
        """Delete what is left of writes and deletions that were cut short longer ago than that. Answers how many there were."""
        return self._storage.sweep_abandoned(time.time() - min_age_s)

    def probe(self) -> None:
        """Write and read a file as an artifact's files are. Raises ConfigError with the remedy."""
        self._storage.probe()

    def _checked_file(self, artifact: str, name: str, entry: FileEntry) -> bytes:
        try:
            content = self._storage.read(artifact, _checked_file_name(name), entry)
        except FileNotFoundError as error:
            raise _damaged(name) from error
        if len(content) != entry.size or hashlib.sha256(content).hexdigest() != entry.sha256:
            raise _damaged(name)
        return content

    def _is_older(self, artifact: str, horizon_s: float) -> bool:
        written_s = self._storage.written_s(artifact)
        return written_s is not None and written_s < horizon_s


def _verified(chunks: Iterable[bytes], name: str, entry: FileEntry) -> Iterator[bytes]:
    """The chunks, the last one held back until size and hash are known to be right."""
    digest, size, held = hashlib.sha256(), 0, b""
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
        if held:
            yield held
        held = chunk
    if size != entry.size or digest.hexdigest() != entry.sha256:
        raise _damaged(name)
    if held:
        yield held


def _describe(artifact: str, files: Mapping[str, bytes]) -> Manifest:
    entries = {
        _checked_file_name(name): FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(files.items())
    }
    return Manifest(schema_version=SCHEMA_VERSION, tenant=tenant_of(_checked_id(artifact)), artifact=artifact, files=entries)


def _safe(text: str) -> str:
    """Text as one path segment, injective: every character that a segment may not hold becomes =XX."""
    return quote(text, safe="").replace("%", "=")


def _checked_id(artifact: str) -> str:
    if not is_artifact(artifact):
        raise ValidationFailed(f"{artifact[:200]!r} is not the id of an artifact")
    return artifact


def _checked_file_name(name: str) -> str:
    if not is_file_name(name):
        raise ValidationFailed(f"{name[:100]!r} is not the name of an artifact's file")
    return name


def _damaged(name: str) -> ValidationFailed:
    return ValidationFailed(f"the checkpoint is damaged: {name[:100]!r} is not what was saved; load another checkpoint")
