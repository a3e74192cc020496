"""Artifacts in an object store, where nothing can be renamed and every object appears by itself.

    <root>/<tenant>/<model>/<kind>/<seq>-<token>/<sha256>-<name>    the files
    <root>/<tenant>/<model>/<kind>/<seq>-<token>/manifest.json      last, and only where there is none
    <root>/.tmp/                                                    probes

Files are named by their content, so two writers of one id never change each other's; whose manifest comes first decides which files are
the artifact's, and what it does not list is left over. The store must refuse to create what is there (S3: `If-None-Match: *`).
"""

import contextlib
import errno
import importlib
import posixpath
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, Self, TypeVar

import fsspec

from tinsmith.config import ConfigError, ObjectStoreOptions
from tinsmith.lifecycle.storage import HIDDEN, MANIFEST, FileEntry, Manifest, is_artifact

_CHUNK = 4 * 1024 * 1024  # of a file that is streamed: one request each

_REMEDY = "check the bucket, checkpoints.options, and the keys in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"

P = ParamSpec("P")
T = TypeVar("T")


class ObjectStorage:
    """An `ArtifactStorage` below one prefix of an fsspec file system. `faults`: what its driver raises besides OSError."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, faults: Sequence[type[Exception]] = ()) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._faults = tuple(faults)

    @classmethod
    def open(cls, url: str, options: ObjectStoreOptions) -> Self:
        """Below an s3:// URL, with the keys that the environment holds. Asks the store nothing. Raises ConfigError without s3fs."""
        try:
            faults = importlib.import_module("botocore.exceptions").BotoCoreError
            filesystem = fsspec.filesystem("s3", **_arguments(options), use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise ConfigError(["checkpoints.url: needs s3fs; pip install 'tinsmith[s3]', or use checkpoints.dir"]) from error
        return cls(filesystem, url.removeprefix("s3://"), [faults])

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        if self._has(manifest.artifact):
            return
        for name, content in files.items():
            self._put(self._file(manifest.artifact, name, manifest.files[name]), content)
        try:
            self._create(self._path(manifest.artifact, MANIFEST), manifest.encoded())
        except OSError:  # it may be there by now: another's, or this one's, whose answer was lost
            if not self._has(manifest.artifact):
                raise

    def manifest(self, artifact: str) -> bytes:
        return self._get(self._path(artifact, MANIFEST))

    def read(self, artifact: str, name: str, entry: FileEntry) -> bytes:
        return self._get(self._file(artifact, name, entry))

    def chunks(self, artifact: str, name: str, entry: FileEntry) -> Iterator[bytes]:
        path = self._file(artifact, name, entry)
        for start in range(0, entry.size, _CHUNK):
            yield bytes(self._call(self._filesystem.cat_file, path, start=start, end=min(start + _CHUNK, entry.size)))

    def delete(self, artifact: str) -> bool:
        if not self._has(artifact):
            return False
        self._remove(self._path(artifact, MANIFEST))  # from now on it is no artifact
        for path in self._call(self._filesystem.find, self._path(artifact)):
            self._remove(path)
        return True

    def artifacts(self) -> Iterator[str]:
        for folder, names in self._folders().items():
            if MANIFEST in names and is_artifact(folder):
                yield folder

    def written_s(self, artifact: str) -> float | None:
        return self._modified_s(self._path(artifact, MANIFEST))

    def sweep_abandoned(self, before_s: float) -> int:
        """The age of an object is read last: a writer that tries again writes all files anew before its manifest, so it keeps them."""
        swept = set()
        for folder, names in self._folders().items():
            kept = self._listed(folder, names)
            for path in (self._path(folder, name) for name in names if name not in kept):
                modified_s = self._modified_s(path)
                if modified_s is not None and modified_s < before_s:
                    self._remove(path)
                    swept.add(folder)
        return len(swept)

    def probe(self) -> None:
        path, content = self._path(HIDDEN, f"probe-{uuid.uuid4().hex}"), uuid.uuid4().bytes
        try:
            self._create(path, content)
            found = self._get(path)
            with contextlib.suppress(OSError):  # FileExistsError where the store says why
                self._create(path, b"")
            is_guarded = self._get(path) == found
            self._remove(path)
        except OSError as error:
            reason = f"checkpoints.url: {self._root}: {error.strerror or error}"
            raise ConfigError([f"{reason}; {_REMEDY}"]) from error
        if found != content:
            raise ConfigError([f"checkpoints.url: {self._root} does not give back what was written; name another bucket"])
        if not is_guarded:
            raise ConfigError([f"checkpoints.url: {self._root} lets a second writer replace an object; use a store with If-None-Match"])

    def _folders(self) -> Mapping[str, set[str]]:
        """Names of the objects in the folders of artifacts, whole or not, and in the hidden one."""
        folders: defaultdict[str, set[str]] = defaultdict(set)
        for path in self._call(self._filesystem.find, self._root):
            folder, name = posixpath.split(posixpath.relpath(path, self._root))
            if folder == HIDDEN or is_artifact(folder):
                folders[folder].add(name)
        return folders

    def _listed(self, folder: str, names: set[str]) -> set[str]:
        """The objects of an artifact. Its manifest is asked only where a file is there twice."""
        if MANIFEST not in names:
            return set()
        files = [name.partition("-")[2] for name in names - {MANIFEST}]
        if len(files) == len(set(files)):
            return names
        listed = Manifest.model_validate_json(self.manifest(folder)).files
        return {MANIFEST} | {_object_name(name, entry) for name, entry in listed.items()}

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _file(self, artifact: str, name: str, entry: FileEntry) -> str:
        return self._path(artifact, _object_name(name, entry))

    def _has(self, artifact: str) -> bool:
        return self.written_s(artifact) is not None

    def _put(self, path: str, content: bytes) -> None:
        self._call(self._filesystem.pipe_file, path, content)

    def _create(self, path: str, content: bytes) -> None:
        """Raises FileExistsError, or, of stores that are sparing of words, OSError."""
        self._call(self._filesystem.pipe_file, path, content, mode="create")

    def _get(self, path: str) -> bytes:
        return bytes(self._call(self._filesystem.cat_file, path))

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(self._filesystem.rm_file, path)

    def _modified_s(self, path: str) -> float | None:
        try:
            return float(self._call(self._filesystem.modified, path).timestamp())
        except FileNotFoundError:
            return None

    def _call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except self._faults as error:
            raise OSError(errno.EIO, str(error)) from error


def _object_name(name: str, entry: FileEntry) -> str:
    return f"{entry.sha256}-{name}"


def _arguments(options: ObjectStoreOptions) -> dict[str, object]:
    """Of s3fs. Nothing secret: botocore finds the keys in the environment."""
    client = {} if options.region is None else {"region_name": options.region}
    return {
        "endpoint_url": options.endpoint_url,
        "client_kwargs": client,
        "config_kwargs": {"s3": {"addressing_style": options.addressing}},
    }
