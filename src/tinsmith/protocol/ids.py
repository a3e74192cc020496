"""Identifiers: how they are built, what they tell, how they are checked. Pure functions; no store is asked.

A request id is derived and not drawn, so a repeated submit finds the first id without a claim table, for as long as the lane lives:

    kind letter (t training, s sampling, c control)
    + 8 hex of the store's epoch
    + 24 hex of HMAC(secret, lane, seq)
    + 8 hex of HMAC(secret, tenant, all of the above)

It cannot be guessed, it tells what kind of work was lost, and an id of another tenant fails its check without a look-up.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from enum import StrEnum

from tinsmith.protocol.errors import ValidationFailed

LOCAL_TENANT = "local"  # every caller in open mode
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REQUEST_ID = re.compile(r"([tsc])([0-9a-f]{8})([0-9a-f]{24})([0-9a-f]{8})")


class WorkKind(StrEnum):
    """What kind of work a request id stands for: its first letter."""

    TRAINING = "t"
    SAMPLING = "s"
    CONTROL = "c"


@dataclass(frozen=True, slots=True)
class RequestId:
    """A request id taken apart. `is_genuine` is meaningful only for an id of the running epoch."""

    text: str
    work: WorkKind
    epoch: str
    is_genuine: bool


def request_id(work: WorkKind, *, epoch: str, secret: bytes, tenant: str, lane: str, seq: int | str) -> str:
    """The id of the command with natural key (lane, seq). `epoch` is 8 hex digits."""
    body = work.value + epoch + _mac(secret, f"lane\0{lane}\0{seq}")[:24]
    return body + _mac(secret, f"tenant\0{tenant}\0{body}")[:8]


def parse_request_id(text: str, *, secret: bytes, tenant: str) -> RequestId | None:
    """Take an id apart and check that it was issued to `tenant`; None if it is malformed."""
    match = _REQUEST_ID.fullmatch(text)
    if match is None:
        return None
    work, epoch, _, check = match.groups()
    expected = _mac(secret, f"tenant\0{tenant}\0{text[:-8]}")[:8]
    return RequestId(text, WorkKind(work), epoch, hmac.compare_digest(check, expected))


def model_id(session_id: str, model_seq_id: int) -> str:
    """Clients compute this themselves, so the form is fixed by the wire."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


def check_name(name: str, field: str) -> str:
    """A name that a caller chose (checkpoint, project ...): safe as a path segment, or ValidationFailed."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValidationFailed(
            f"{field}: {name[:40]!r} is not a valid name; use 1-128 letters, digits, '.', '_' or '-', a letter or digit first, no '..'"
        )
    return name


def _mac(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
