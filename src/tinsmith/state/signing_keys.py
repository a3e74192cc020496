"""Signing keys: the secrets with which the cluster signs what it will accept again (a link to a file, a token), kept in the store.

A key signs until it is `ROTATION_MS` old and is accepted for as long again, so at most two generations are valid at once, and whatever a
key has signed stays verifiable for at least `ROTATION_MS`: nothing may be signed for longer than that. Every process finds the same keys;
the first that sees the newest one too old draws the next. Each purpose has keys of its own, so a signature made for one proves nothing to
another. Knows nothing of what is signed, or how.
"""

import secrets
from dataclasses import dataclass, field

from pydantic import Field

from tinsmith.protocol.errors import StateContention
from tinsmith.protocol.sessions import Kept
from tinsmith.state.store import Store

ROTATION_MS = 24 * 3600 * 1000  # far above the hour that a link or a token lives; short enough that a secret that leaked is soon worthless
_TABLE = "system/signing_keys"
_SECRET_BYTES = 32  # as wide as the SHA-256 that it keys
_ATTEMPTS = 3  # of a rotation that others make at the same time: the second one finds theirs


@dataclass(frozen=True, slots=True)
class SigningKey:
    """`key_id` travels with a signature; `secret` (32 bytes) never leaves the cluster."""

    key_id: str
    secret: bytes = field(repr=False)


class _Generation(Kept):
    key_id: str
    secret_hex: str = Field(repr=False)
    created_ms: int

    def key(self) -> SigningKey:
        return SigningKey(self.key_id, bytes.fromhex(self.secret_hex))


class _Ring(Kept):
    """Oldest first."""

    generations: tuple[_Generation, ...] = ()

    def signing(self, now_ms: int) -> _Generation | None:
        """The newest, unless it is too old to sign."""
        return next((held for held in reversed(self.generations) if now_ms - held.created_ms < ROTATION_MS), None)

    def accepted(self, now_ms: int) -> tuple[_Generation, ...]:
        return tuple(held for held in self.generations if now_ms - held.created_ms < 2 * ROTATION_MS)


class SigningKeys:
    """The keys of one purpose. Raises StateContention from each call while the store is away."""

    def __init__(self, store: Store, purpose: str) -> None:
        self._store = store
        self._purpose = purpose

    async def current(self) -> SigningKey:
        """The key to sign with now; draws the first one, and the next where it is due."""
        for attempt in range(1, _ATTEMPTS + 1):
            ring, version, now_ms = await self._read()
            signing = ring.signing(now_ms)
            if signing is not None:
                return signing.key()
            drawn = _draw(now_ms)
            rotated = _Ring(generations=(*ring.accepted(now_ms), drawn))
            try:
                await self._store.put(_TABLE, self._purpose, rotated.model_dump_json().encode(), expect=version)
            except StateContention:
                if attempt == _ATTEMPTS:
                    raise
                continue
            return drawn.key()
        raise StateContention(f"the signing key for {self._purpose} was rotated by others {_ATTEMPTS} times at once; ask again")

    async def find(self, key_id: str) -> SigningKey | None:
        """The key of that id, while what it has signed may be accepted."""
        ring, _, now_ms = await self._read()
        return next((held.key() for held in ring.accepted(now_ms) if held.key_id == key_id), None)

    async def _read(self) -> tuple[_Ring, int, int]:
        """The ring, its version (0: none yet), and the store's time in ms."""
        held = await self._store.get(_TABLE, self._purpose)
        now_ms = await self._store.now_ms()
        if held is None:
            return _Ring(), 0, now_ms
        return _Ring.model_validate_json(held.value), held.version, now_ms


def _draw(now_ms: int) -> _Generation:
    return _Generation(key_id=secrets.token_hex(8), secret_hex=secrets.token_hex(_SECRET_BYTES), created_ms=now_ms)
