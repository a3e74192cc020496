"""Store: records by (table, id) with versions, named leases, and leased quotas and rates that hold for the whole cluster.

`memory_store.py` and `redis_store.py` implement it. What a record means is `catalog.py`'s business. Tables are named "<tenant>/<what>",
so a look-up of another tenant's id cannot find it. Lanes write records too, in the same step as their own change
(`protocol.futures.Write`); both live in one store.
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

    async def reserve(self, quota: str, holder: str, *, limit: int, ttl_ms: int) -> bool:
        """Take one of `limit` units, or extend the one that the holder has; False where all are held. A unit that is not extended within
        `ttl_ms` is free again. Extending never fails, also where the limit has become lower."""
        ...

    async def unreserve(self, quota: str, holder: str) -> None:
        """Give the unit back. Idempotent."""
        ...

    async def spend(self, budget: str, amount: float, *, per_s: float, burst: float) -> int:
        """Take `amount` from a token bucket that fills at `per_s` up to `burst`; answers 0, or the ms after which it would be there, with
        nothing taken. An amount above `burst` counts as `burst`. A resend after a lost reply may pay twice."""
        ...

    async def close(self) -> None:
        """Drop the handle; the data stay."""
        ...

    async def flush_all(self) -> None:
        """Delete everything, the identity included."""
        ...
