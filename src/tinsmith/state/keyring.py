"""API keys: what is kept of them, how one is drawn and proved, and the ring that finds them again, over a `Store`.

A key is `tml-<key id>-<secret>`: 12 hex digits that name its record, so that a look-up is one read, and 256 random bits that prove it. Of
the secret only an HMAC-SHA256 is kept, keyed by the key's id, so that a hash proves nothing under another id. A slow hash such as scrypt
guards passwords, which can be guessed; nobody guesses 256 random bits, and a slow hash would cost every request tens of milliseconds. The
text of a key exists at its caller and, for one comparison, here; it is written nowhere.

`key_file.py` keeps the same records in a file. Knows nothing of HTTP, tokens or what a tenant may do.
"""

import hashlib
import hmac
import re
import secrets
from typing import Protocol

from pydantic import Field

from tinsmith.protocol.errors import NotFound, StateContention
from tinsmith.protocol.sessions import Kept
from tinsmith.state.store import Store

PREFIX = "tml-"  # clients refuse a key that does not begin so
_TABLE = "system/keys"
_ID_BYTES = 6  # 48 bits: also as a number exact in every reader of JSON
_SECRET_BYTES = 32
_KEY = re.compile(r"tml-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_NO_DIGEST = "0" * 64


class KeyRecord(Kept):
    """`digest`: hex of the secret's HMAC. `name`: for people; it need not be unique."""

    key_id: str
    tenant: str
    name: str
    created_ms: int
    digest: str = Field(repr=False)
    revoked_ms: int | None = None


class Keyring(Protocol):
    """Raises StateContention from each call while what holds the records is away."""

    async def find(self, key_id: str) -> KeyRecord | None:
        """Also one that is revoked. One read."""
        ...

    async def add(self, record: KeyRecord) -> None:
        """Raises StateContention where the id is taken."""
        ...

    async def revoke(self, key_id: str, now_ms: int) -> KeyRecord:
        """Idempotent: the first time stays. Raises NotFound."""
        ...

    async def records(self) -> list[KeyRecord]: ...


class StoreKeyring:
    """Implements `Keyring`: the records lie in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, key_id: str) -> KeyRecord | None:
        held = await self._store.get(_TABLE, key_id)
        return None if held is None else KeyRecord.model_validate_json(held.value)

    async def add(self, record: KeyRecord) -> None:
        await self._store.put(_TABLE, record.key_id, _encoded(record), expect=0)

    async def revoke(self, key_id: str, now_ms: int) -> KeyRecord:
        held = await self._store.get(_TABLE, key_id)
        if held is None:
            raise unknown_key(key_id)
        record = revoked(KeyRecord.model_validate_json(held.value), now_ms)
        await self._store.put(_TABLE, key_id, _encoded(record), expect=held.version)
        return record

    async def records(self) -> list[KeyRecord]:
        return [KeyRecord.model_validate_json(held.value) for held in (await self._store.list(_TABLE)).values()]


async def issue(keyring: Keyring, tenant: str, name: str, now_ms: int) -> tuple[str, KeyRecord]:
    """A new key's text, which nobody can ask for again, and its record. Raises StateContention."""
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    record = KeyRecord(key_id=key_id, tenant=tenant, name=name, created_ms=now_ms, digest=_digest(key_id, secret))
    await keyring.add(record)
    return f"{PREFIX}{key_id}-{secret}", record


def split_key(text: str) -> tuple[str, str] | None:
    """(key id, secret) of a text that has the form of a key."""
    found = _KEY.fullmatch(text)
    return None if found is None else (found[1], found[2])


def is_proved(record: KeyRecord | None, key_id: str, secret: str) -> bool:
    """Whether the secret is that of the record. Takes as long for a key that does not exist."""
    held = _NO_DIGEST if record is None else record.digest
    is_equal = hmac.compare_digest(held, _digest(key_id, secret))
    return is_equal and record is not None


def revoked(record: KeyRecord, now_ms: int) -> KeyRecord:
    return record if record.revoked_ms is not None else record.model_copy(update={"revoked_ms": now_ms})


def unknown_key(key_id: str) -> NotFound:
    return NotFound(f"key {key_id[:40]!r} is unknown; `tinsmith keys list` shows those that are there")


def taken(key_id: str) -> StateContention:
    return StateContention(f"key {key_id!r} is there already; draw another")


def _digest(key_id: str, secret: str) -> str:
    return hmac.new(key_id.encode(), secret.encode(), hashlib.sha256).hexdigest()


def _encoded(record: KeyRecord) -> bytes:
    return record.model_dump_json().encode()
