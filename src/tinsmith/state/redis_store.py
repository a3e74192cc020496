"""Records, leases and quotas in Redis. One hash a table, a field an id: "<version>:<value>", so a record is read in one look.

Knows nothing of lanes, only that they share its link and its identity.
"""

import logging
import secrets
from collections.abc import Sequence

from tinsmith.config import ConfigError
from tinsmith.protocol.errors import StateContention
from tinsmith.state.redis_link import Command, RedisLink, Reply, Value
from tinsmith.state.store import SCHEMA_VERSION, Record, StoreInfo

_log = logging.getLogger(__name__)
_IDENTITY = "identity"  # "<epoch>:<secret>:<schema>": one key, so that it is written at once or not at all
_EPOCH_BYTES = 4
_SECRET_BYTES = 32


class RedisStore:
    """Implements `Store` over one Redis primary. `open` checks the server; other operations open an unopened store themselves."""

    def __init__(self, url: str) -> None:
        self._link = RedisLink(url)
        self._info: StoreInfo | None = None

    @property
    def link(self) -> RedisLink:
        return self._link

    async def open(self) -> StoreInfo:
        """Raises ConfigError for an unfit server or a newer schema; draws the identity as the first. Each call reads it anew."""
        await self._check_server()
        drawn = f"{secrets.token_hex(_EPOCH_BYTES)}:{secrets.token_hex(_SECRET_BYTES)}:{SCHEMA_VERSION}"
        _, held = await self._link.batch([("SET", _IDENTITY, drawn, "NX"), ("GET", _IDENTITY)])
        epoch, secret, schema = held.decode().split(":")
        if int(schema) > SCHEMA_VERSION:
            fault = f"the store holds schema {int(schema)} and this server knows {SCHEMA_VERSION}"
            raise ConfigError([f"store.url: {fault}; upgrade tinsmith or use another store"])
        self._info = StoreInfo(epoch, bytes.fromhex(secret), int(schema))
        return self._info

    async def info(self) -> StoreInfo:
        """What the last `open` read."""
        return self._info if self._info is not None else await self.open()

    async def is_emptied(self) -> bool:
        """Whether the store has another epoch than the last `open` read."""
        held = await self._link.command("GET", _IDENTITY)
        return held is None or held.decode().split(":")[0] != (await self.info()).epoch

    async def run(self, script: str, *args: Value, before: Sequence[Command] = (), after: Sequence[Command] = ()) -> list[Reply]:
        """Run a script under the known epoch, so that a process which remembers an emptied store writes nothing into the new one.

        Raises StateContention, also for a store of another epoch: open it anew.
        """
        info = await self.info()
        replies = await self._link.script(script, info.epoch, *args, before=before, after=after)
        if replies[0] == [b"epoch"]:
            raise StateContention("the store was emptied and has a new epoch; what this process remembers is gone")
        return replies

    async def now_ms(self) -> int:
        seconds, micros = await self._link.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def get(self, table: str, id: str) -> Record | None:
        held = await self._link.command("HGET", _key(table), id)
        return None if held is None else _record(held)

    async def put(self, table: str, id: str, value: bytes, *, expect: int | None = None) -> int:
        (version,) = await self.run("put", table, id, value, "" if expect is None else expect)
        if version < 0:
            raise StateContention(f"record {id!r} of {table!r} was changed by another; read it again")
        return int(version)

    async def delete(self, table: str, id: str) -> bool:
        return bool(await self._link.command("HDEL", _key(table), id))

    async def list(self, table: str) -> dict[str, Record]:
        held: dict[bytes, bytes] = await self._link.command("HGETALL", _key(table))
        return {name.decode(): _record(value) for name, value in held.items()}

    async def lease(self, name: str, holder: str, ttl_ms: int) -> bool:
        (taken,) = await self.run("lease", name, holder, ttl_ms)
        return bool(taken)

    async def unlease(self, name: str, holder: str) -> None:
        await self.run("unlease", name, holder)

    async def reserve(self, quota: str, holder: str, *, limit: int, ttl_ms: int) -> bool:
        (is_held,) = await self.run("reserve", quota, holder, limit, ttl_ms)
        return bool(is_held)

    async def unreserve(self, quota: str, holder: str) -> None:
        await self.run("unreserve", quota, holder)

    async def spend(self, budget: str, amount: float, *, per_s: float, burst: float) -> int:
        (wait_ms,) = await self.run("spend", budget, repr(float(amount)), repr(float(per_s)), repr(float(burst)))
        return int(wait_ms)

    async def close(self) -> None:
        await self._link.close()

    async def flush_all(self) -> None:
        """Empties the database that the URL names; the next `open` draws a new identity."""
        await self._link.command("FLUSHDB")
        self._info = None

    async def _check_server(self) -> None:
        info: dict[str, object] = await self._link.command("INFO")
        if info.get("redis_mode") == "cluster" or info.get("cluster_enabled") == 1:
            raise ConfigError(["store.url: Redis runs in cluster mode, which is not supported; name a single primary"])
        policy = info.get("maxmemory_policy")
        if policy != "noeviction":
            raise ConfigError([f"store.url: Redis may evict records (maxmemory-policy {policy}); set `maxmemory-policy noeviction`"])
        if info.get("aof_enabled") != 1 and self._info is None:
            _log.warning("Redis runs without an append-only file, so its crash loses accepted work: set `appendonly yes`")


def _key(table: str) -> str:
    return f"table:{table}"


def _record(held: bytes) -> Record:
    version, _, value = held.partition(b":")
    return Record(value, int(version))
