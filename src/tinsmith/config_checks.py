"""What single values of the configuration must be: each check answers the value, or refuses it in a line that ends with the remedy.

Knows nothing of the tree: whose field a value is, the caller says.
"""

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

import yaml

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*"
_MAX_NAME = 200  # characters: it is part of keys, events and log lines
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_REDIS_DATABASE = re.compile(r"/?|/\d+")
_REDIS_OPTIONS = frozenset({"db", "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"})
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_MAX_PORT = 65535
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OWN_TABLES = "system"
_STORAGE_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9][A-Za-z0-9._=-]*)*/?")


class Faults(ValueError):
    """Faults of a section that its fields do not show one by one."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


def refuse(*faults: str | Literal[False]) -> None:
    """Raise the faults that are there."""
    found = [fault for fault in faults if fault]
    if found:
        raise Faults(found)


def checked_name(name: str) -> str:
    refuse(
        not re.fullmatch(_NAME, name) and f"{name[:_MAX_NAME]!r} cannot be used on the wire; use a hub id such as org/model-name",
        len(name) > _MAX_NAME and f"{len(name)} characters are too many; use {_MAX_NAME} or fewer",
    )
    return name


def checked_redis_url(url: str) -> str:
    shown = _without_password(url)
    refuse(not url.startswith(_REDIS_SCHEMES) and f"{shown!r} names no Redis; begin it with redis://, rediss:// or unix://")
    try:
        parts = urlsplit(url)
        is_sound = parts.port != 0
    except ValueError:
        is_sound = False
    refuse(not is_sound and f"{shown!r} names no port from 1 to 65535 of a host; write redis://HOST:PORT/0")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    database = options.get("db", "0")
    refuse(
        *(f"{name[:40]!r} is no option of a Redis URL here; leave it out" for name in options if name not in _REDIS_OPTIONS),
        not (database.isdecimal() and (parts.scheme == "unix" or _REDIS_DATABASE.fullmatch(parts.path)))
        and f"{shown!r} names no database; end it with a number, as in redis://HOST:PORT/0",
    )
    return url


def checked_directory(directory: Path) -> Path:
    """As a path, whether it exists or not."""
    try:
        directory.expanduser()
    except RuntimeError:
        refuse(f"{str(directory)!r} names an unknown user; write the path out")
    refuse("\0" in str(directory) and f"{str(directory)!r} is no path; remove the null character")
    return directory


def checked_source(source: str) -> str:
    refuse(not source and "empty; name one, or leave it out")
    checked_directory(Path(source))
    return source


def checked_gpus(num_gpus: float) -> float:
    """Ray shares a GPU in parts of 1/10,000, and gives more than one as a whole."""
    refuse(
        num_gpus > 1 and num_gpus != int(num_gpus) and f"{num_gpus:g} is no whole number; above 1 use one",
        num_gpus < 1 and num_gpus != round(num_gpus, 4) and f"{num_gpus:g} is too fine; use 4 decimals or fewer",
    )
    return num_gpus


def checked_host(host: str, *, has_keys: bool) -> str:
    """Beyond loopback only where callers need keys."""
    refuse(
        not has_keys
        and not is_loopback(host)
        and f"{host[:100]!r} is no loopback address, and a server without keys may not listen beyond it; use 127.0.0.1, or set "
        "auth.mode: keys",
        has_keys and not _is_address(host) and f"{host[:100]!r} is no address to listen on; write an IP address, such as 0.0.0.0",
    )
    return host


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def checked_tenant(tenant: str) -> str:
    """A tenant's name is the beginning of its tables', one of which is the store's own."""
    refuse(
        not _TENANT.fullmatch(tenant)
        and f"{tenant[:80]!r} is no tenant; use 1-64 letters, digits, '.', '_' or '-', a letter or digit first",
        tenant == _OWN_TABLES and f"{tenant!r} is taken by the server itself; choose another name",
    )
    return tenant


def checked_file(path: Path) -> Path:
    """As a path, whether it exists or not."""
    checked_directory(path)
    refuse(not path.name and f"{str(path)!r} names no file; name one")
    return path


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", url)
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def checked_path_text(path: object) -> object:
    """Before it is a path: an empty text would be the current directory."""
    refuse(isinstance(path, str) and not path.strip() and "empty; name a directory, or leave it out")
    return path


def checked_endpoint(url: str) -> str:
    refuse(not _is_http(url) and f"{_without_password(url)!r} names no collector; write http://HOST:PORT or https://HOST:PORT")
    return url


def checked_store_endpoint(url: str) -> str:
    """Keys have their own place: a URL is shown in messages."""
    refuse(
        (not _is_http(url) or "@" in url)
        and f"{_without_password(url)!r} names no object store; write http://HOST:PORT or https://HOST:PORT, keys into the environment"
    )
    return url


def checked_storage_url(url: str) -> str:
    refuse(
        not _STORAGE_URL.fullmatch(url)
        and f"{_without_password(url)[:200]!r} names no place in an object store; write s3://BUCKET/PREFIX, keys into the environment"
    )
    return url


def checked_address(address: str) -> str:
    """Of a Ray cluster."""
    found = _ADDRESS.fullmatch(address)
    is_sound = address == "auto" or (found is not None and 1 <= int(found[2]) <= _MAX_PORT)
    refuse(not is_sound and f"{address[:100]!r} names no cluster; write auto, or HOST:PORT")
    return address


def repeated_keys(root: yaml.Node | None) -> list[str]:
    """A line for every key that its mapping has had before, at any level. Aliases are looked into once."""
    waiting, seen = [root], set()
    found: list[tuple[int, str]] = []
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            waiting.extend(value for _, value in node.value)
            found.extend(_repeats(node))
    return [line for _, line in sorted(found)]


def _repeats(mapping: yaml.MappingNode) -> Iterator[tuple[int, str]]:
    """Each with the number of its line."""
    lines: dict[tuple[str, str], int] = {}
    for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in lines:
            yield line, f"line {line}: {key.value[:100]!r} is there already, on line {lines[name]}; keep one of the two"
        lines.setdefault(name, line)


def _without_password(url: str) -> str:
    return re.sub(r"//.*@", "//***@", url, flags=re.DOTALL)
