"""API keys in a file, for a server whose store does not outlive it: hashes as `keyring.py` makes them, and nothing else.

The command line writes it and the gateways look at it again when it has changed. A write replaces the file as a whole, under a lock beside
it, so a reader sees the state before or after and two writers lose nothing of each other. A file that cannot be read lets nobody in.
"""

import asyncio
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from tinsmith.config import AuthConfig
from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.sessions import Kept
from tinsmith.state.keyring import KeyRecord, Keyring, StoreKeyring, revoked, taken, unknown_key
from tinsmith.state.store import SCHEMA_VERSION, Store

_Stamp = tuple[int, int, int]  # inode, time of the last change in ns, bytes


class _Content(Kept):
    schema_version: int = SCHEMA_VERSION
    keys: Mapping[str, KeyRecord] = {}


class FileKeyring:
    """Implements `Keyring`. The file need not exist: no keys then. Work on files is done off the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self._seen: tuple[_Stamp, _Content] | None = None

    async def find(self, key_id: str) -> KeyRecord | None:
        return (await asyncio.to_thread(self._read)).keys.get(key_id)

    async def add(self, record: KeyRecord) -> None:
        await asyncio.to_thread(self._add, record)

    async def revoke(self, key_id: str, now_ms: int) -> KeyRecord:
        return await asyncio.to_thread(self._revoke, key_id, now_ms)

    async def records(self) -> list[KeyRecord]:
        return list((await asyncio.to_thread(self._read)).keys.values())

    def _add(self, record: KeyRecord) -> None:
        def added(keys: Mapping[str, KeyRecord]) -> KeyRecord:
            if record.key_id in keys:
                raise taken(record.key_id)
            return record

        self._change(added)

    def _revoke(self, key_id: str, now_ms: int) -> KeyRecord:
        def ended(keys: Mapping[str, KeyRecord]) -> KeyRecord:
            if key_id not in keys:
                raise unknown_key(key_id)
            return revoked(keys[key_id], now_ms)

        return self._change(ended)

    def _change(self, change: Callable[[Mapping[str, KeyRecord]], KeyRecord]) -> KeyRecord:
        """Write the one record that `change` makes of the present ones."""
        try:
            with self._locked():
                content = self._read()
                record = change(content.keys)
                self._write(_Content(keys={**content.keys, record.key_id: record}))
        except OSError as error:
            raise self._unfit(str(error.strerror)) from error
        return record

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path.with_name(f"{self._path.name}.lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self) -> _Content:
        """Raises StateContention for a file that is not fit to be read."""
        try:
            stamp = _stamp(self._path)
            if self._seen is not None and self._seen[0] == stamp:
                return self._seen[1]
            content = _Content.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _Content()
        except OSError as error:
            raise self._unfit(str(error.strerror)) from error
        except ValidationError as error:
            raise self._unfit("no list of keys") from error
        if content.schema_version > SCHEMA_VERSION:
            raise self._unfit(f"of schema {content.schema_version}, and this program knows {SCHEMA_VERSION}; upgrade tinsmith")
        self._seen = (stamp, content)
        return content

    def _write(self, content: _Content) -> None:
        """Readable by this user alone."""
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.model_dump_json(indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._path)
        except BaseException:
            os.unlink(name)
            raise

    def _unfit(self, why: str) -> StateContention:
        return StateContention(f"auth.keys_file: {self._path} cannot be used ({why}); mend it, or move it away and add keys anew")


def keyring_of(auth: AuthConfig, store: Store) -> Keyring:
    """Where the configuration keeps the keys."""
    return StoreKeyring(store) if auth.keys_file is None else FileKeyring(auth.keys_file)


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
