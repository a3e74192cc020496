"""What the REST routes of the Tinker wire read from a query string, and how they write times. Every fault names the parameter."""

from datetime import UTC, datetime, timedelta

from starlette.datastructures import QueryParams

from tinsmith.protocol import wire_json
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.wire_json import AnyBody

MAX_PAGE = 1000  # ids or records of one answer
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_SCOPES = ("owned", "accessible")


def number(query: QueryParams, name: str, default: int, *, least: int, most: int) -> int:
    """Raises ValidationFailed."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(most)) or not least <= int(text) <= most:
        raise ValidationFailed(f"{name}: {text[:40]!r} is out of bounds; send {least} to {most}")
    return int(text)


def check_scope(query: QueryParams) -> str:
    """The access_scope: owned, or accessible. Raises ValidationFailed for another."""
    scope = query.get("access_scope", _SCOPES[0])
    if scope not in _SCOPES:
        raise ValidationFailed(f"access_scope: {scope[:40]!r} is none; send {' or '.join(_SCOPES)}")
    return scope


def read_query(query: QueryParams, model: type[AnyBody]) -> AnyBody:
    """All parameters at once, as a message. Raises ValidationFailed."""
    return wire_json.validate(model, dict(query))


def text_of(ms: int) -> str:
    """ms since 1970 UTC as the wire has times: RFC 3339, UTC, to the ms."""
    return (_EPOCH + ms * _MS).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ms_of(moment: datetime) -> int:
    """Inverse of `text_of`, of an aware time; parts of a ms are dropped."""
    return (moment - _EPOCH) // _MS
