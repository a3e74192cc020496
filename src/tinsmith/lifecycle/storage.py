"""Where artifacts lie: the seam between what a checkpoint is and what keeps its bytes.

An artifact is an immutable set of files under an id of four segments, tenant/model/kind/seq-token, with a manifest that lists them. It
exists once its manifest does. Of several writers of one id the first wins; the id holds the token of the lane's owner, so they are
retries of one owner. Ids and names that come here have been checked. What the bytes mean, whether they are what was saved, and who may
have them, others know. All calls block: run them in a thread.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from pydantic import BaseModel, ConfigDict

MANIFEST = "manifest.json"
HIDDEN = ".tmp"  # beside the tenants' folders; no segment of an id begins with a dot
LEVELS = 4  # tenant, model, kind, seq-token

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=~-]{0,250}")


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

    def encoded(self) -> bytes:
        return self.model_dump_json(indent=1).encode()


class ArtifactStorage(Protocol):
    """Every call may raise OSError besides what it names."""

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Store the files, durably, and their manifest last. An artifact that is already there stays as it is."""
        ...

    def manifest(self, artifact: str) -> bytes:
        """As it was published. Raises FileNotFoundError where there is no such artifact."""
        ...

    def read(self, artifact: str, name: str, entry: FileEntry) -> bytes:
        """A file that the artifact's manifest lists so. Raises FileNotFoundError."""
        ...

    def chunks(self, artifact: str, name: str, entry: FileEntry) -> Iterator[bytes]:
        """As `read`, piece by piece, a few MiB at most in memory."""
        ...

    def delete(self, artifact: str) -> bool:
        """The artifact as a whole; False if there was none. What a cut leaves is no artifact, and `sweep_abandoned` finds it."""
        ...

    def artifacts(self) -> Iterator[str]:
        """Ids of all artifacts, in no order."""
        ...

    def written_s(self, artifact: str) -> float | None:
        """When it was published, in s since the epoch on the storage's clock; None if it is not there."""
        ...

    def sweep_abandoned(self, before_s: float) -> int:
        """Remove what was left before that time by writes and deletions that were cut short. Answers how many there were."""
        ...

    def probe(self) -> None:
        """Write and read as artifacts are. Raises ConfigError with the remedy."""
        ...


def is_segment(text: str) -> bool:
    return _SEGMENT.fullmatch(text) is not None and ".." not in text


def is_artifact(text: str) -> bool:
    """Whether the text is the id of an artifact, be it there or not."""
    segments = text.split("/")
    return len(segments) == LEVELS and all(map(is_segment, segments))


def is_file_name(text: str) -> bool:
    return is_segment(text) and text != MANIFEST
