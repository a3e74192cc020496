"""Store: records by (table, id) with versions, and named leases. `memory_store.py` and `redis_store.py` implement it.

What a record means is `catalog.py`'s business. Tables are named "<tenant>/<what>", so a look-up of another tenant's id cannot find
it. Lanes write records too, in the same step as their own change (`protocol.futures.Write`); both live in one store.
"""

from dataclasses import dataclass
from typing import Protocol

SCHEMA_VERSION = 1  # of everything that the store holds; a store of a newer schema is refused at start


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """`epoch`: 8 hex digits, drawn once by the first writer, changes only if the store was emptied. `secret` keys the request ids."""

    epoch: str
    secret: bytes
    schema: int


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes
    version: int  # 1 for the first write, +1 for each further one


class Store(Protocol):
    """A store that is away raises StateContention from any of these."""

    async def open(self) -> StoreInfo:
        """Read, or write as the first, the store's identity. Raises ConfigError for a newer schema or an unfit server setting."""
        ...

    async def now_ms(self) -> int: ...

    async def get(self, table: str, id: str) -> Record | None: ...

    async def put(self, table: str, id: str, value: bytes, *, expect: int | None = None) -> int:
        """Write and answer the new version. `expect`: the version that must be there now (0: none), else StateContention."""
        ...

    async def delete(self, table: str, id: str) -> bool:
        """True if there was one."""
        ...

    async def list(self, table: str) -> dict[str, Record]: ...

    async def lease(self, name: str, holder: str, ttl_ms: int) -> bool:
        """Take or extend the lease; False while another holds it."""
        ...

    async def unlease(self, name: str, holder: str) -> None: ...

    async def close(self) -> None:
        """Drop the handle; the data stay."""
        ...

    async def flush_all(self) -> None:
        """Delete everything, the identity included."""
        ...
