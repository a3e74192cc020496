"""`tinsmith keys add | list | revoke`: an operator's hand on the API keys, where a server's configuration keeps them.

Goes to the store itself (Redis), or to the file of the keys, and so needs no running server and no key: whoever may read the
configuration and reach the store is trusted with both. The text of a key is shown once, alone on standard output. What happens to a key in
the store is noted in the audit log of its tenant; a file of keys has no store beside it that could hold a log.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from tinsmith.config import ConfigError, ServerConfig, load
from tinsmith.config_checks import Faults, checked_tenant
from tinsmith.operations import OperationFailed
from tinsmith.protocol.errors import NotFound, StateContention
from tinsmith.protocol.sessions import MAX_TEXT
from tinsmith.state.audit import AuditEntry, key_added, key_revoked, note
from tinsmith.state.key_file import FileKeyring
from tinsmith.state.keyring import KeyRecord, Keyring, StoreKeyring, issue, split_key
from tinsmith.state.redis_store import RedisStore
from tinsmith.state.store import Store
from tinsmith.tables import table

_HEADS = ("KEY", "TENANT", "NAME", "CREATED", "STATE")
_UNUSED = "note: auth.mode is open, so the server asks nobody for a key"
_T = TypeVar("_T")
_Work = Callable[[Keyring, Store | None], Awaitable[_T]]  # the store: None where the keys lie in a file


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    keys = commands.add_parser(
        "keys",
        help="issue, list and revoke API keys",
        description="Issue, list and revoke the API keys of a server, whether it runs or not: they lie in its Redis, or in auth.keys_file.",
    )
    actions = keys.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser(
        "add",
        help="issue a key and print it",
        description="Issue a key. It is printed once and kept nowhere: the server has its hash alone.",
    )
    add.add_argument("--tenant", required=True, help="whom its holder is; tenants see nothing of each other")
    add.add_argument("--name", default="", help="for people, such as whose it is")
    show = actions.add_parser("list", help="show the keys", description="Show the keys, without their secrets, revoked ones included.")
    show.add_argument("--tenant", default=None, help="those of one tenant")
    show.add_argument("--json", action="store_true", help="as a list of objects")
    revoke = actions.add_parser(
        "revoke",
        help="end a key",
        description="End a key, and the tokens that stand for it: running servers refuse both within two seconds.",
    )
    revoke.add_argument("key", metavar="KEY", help="as `tinsmith keys list` shows it")
    for parser in (add, show, revoke):
        parser.add_argument("config", type=Path, metavar="CONFIG.yaml")


def run(asked: argparse.Namespace) -> int:
    """Raises ConfigError, OperationFailed."""
    config = load(asked.config)
    _ACTIONS[asked.action](config, asked)
    return 0


def _add(config: ServerConfig, asked: argparse.Namespace) -> None:
    tenant, name = _tenant(asked.tenant), _name(asked.name)

    async def add(keyring: Keyring, store: Store | None) -> tuple[str, KeyRecord]:
        text, record = await issue(keyring, tenant, name, _now_ms())
        await _noted(store, key_added(record))
        return text, record

    text, record = _with_keyring(config, add)
    print(f"key {record.key_id} of tenant {tenant}; it cannot be shown again:", file=sys.stderr)
    print(text)
    if config.auth.mode == "open":
        print(_UNUSED, file=sys.stderr)


def _list(config: ServerConfig, asked: argparse.Namespace) -> None:
    found = _with_keyring(config, lambda keyring, _: keyring.records())
    shown = [record for record in found if asked.tenant in (None, record.tenant)]
    shown.sort(key=lambda record: (record.tenant, record.created_ms, record.key_id))
    print(json.dumps([record.model_dump(exclude={"digest"}) for record in shown], indent=2) if asked.json else _table(shown))


def _revoke(config: ServerConfig, asked: argparse.Namespace) -> None:
    whole = split_key(asked.key)
    key_id = asked.key if whole is None else whole[0]

    async def revoke(keyring: Keyring, store: Store | None) -> KeyRecord:
        record = await keyring.revoke(key_id, _now_ms())
        await _noted(store, key_revoked(record))
        return record

    record = _with_keyring(config, revoke)
    print(f"key {record.key_id} of tenant {record.tenant} revoked")


_ACTIONS: Mapping[str, Callable[[ServerConfig, argparse.Namespace], None]] = {"add": _add, "list": _list, "revoke": _revoke}


async def _noted(store: Store | None, entry: AuditEntry) -> None:
    if store is not None:
        await note(store, entry)


def _with_keyring(config: ServerConfig, work: _Work[_T]) -> _T:
    """Raises ConfigError where the configuration keeps no keys, OperationFailed."""
    try:
        return asyncio.run(_worked(config, work))
    except (NotFound, StateContention) as error:
        raise OperationFailed(error.message) from error


async def _worked(config: ServerConfig, work: _Work[_T]) -> _T:
    if config.auth.keys_file is not None:
        return await work(FileKeyring(config.auth.keys_file), None)
    if config.store.kind == "memory":
        raise ConfigError(["auth.keys_file: missing, and the memory store is out of reach; set auth.mode: keys and name a file"])
    store = RedisStore(config.store.url)
    try:
        await store.open()
        return await work(StoreKeyring(store), store)
    finally:
        await store.close()


def _tenant(tenant: str) -> str:
    try:
        return checked_tenant(tenant)
    except Faults as error:
        raise ConfigError([f"--tenant: {error}"]) from error


def _name(name: str) -> str:
    if len(name) > MAX_TEXT or not name.isprintable():
        raise ConfigError([f"--name: must be printable, of {MAX_TEXT} characters or fewer; choose another"])
    return name


def _table(records: Sequence[KeyRecord]) -> str:
    return table(
        _HEADS, [(record.key_id, record.tenant, record.name or "-", _time(record.created_ms), _state(record)) for record in records]
    )


def _state(record: KeyRecord) -> str:
    return "valid" if record.revoked_ms is None else f"revoked {_time(record.revoked_ms)}"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
