"""Who calls a server with keys: the caller of an API key, or of a token that stands for one.

A key may come in `X-API-Key` (the Tinker wire, our own client) or as `Authorization: Bearer` (OpenAI clients), on every face. What is
missing, malformed, unknown, wrong or revoked is refused in the same words. The record of a key is remembered for a moment
(`recent.KEPT_S`), so a key that is revoked ends everywhere within that time. A key's text is neither logged nor kept.
"""

import time
from collections.abc import Callable

from starlette.datastructures import Headers

from tinsmith.gateway.auth import Caller, TokenRefused, is_public
from tinsmith.gateway.recent import Recent
from tinsmith.gateway.tokens import MARK, Tokens
from tinsmith.protocol.errors import Unauthenticated
from tinsmith.state.keyring import KeyRecord, Keyring, is_proved, split_key

REFUSAL = "the API key is missing, unknown or revoked; send one that `tinsmith keys add` made, in X-API-Key or as Authorization: Bearer"
TOKEN_REFUSAL = "the token has expired, or its key is revoked; exchange the API key for another"  # noqa: S105 - says so to callers
_BEARER = "bearer "


class KeyAuthenticator:
    """Implements `auth.Authenticator`. `tokens`: None where none are issued."""

    def __init__(self, keyring: Keyring, tokens: Tokens | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._records: Recent[KeyRecord] = Recent(keyring.find, clock)

    async def caller(self, path: str, headers: Headers) -> Caller | None:
        """None on a path that needs no caller. Raises Unauthenticated, TokenRefused, StateContention."""
        return None if is_public(path) else await self.caller_of(_credential(headers))

    async def caller_of(self, text: str) -> Caller:
        """Raises as `caller` does."""
        if text.startswith(MARK):
            return await self._bearer_of(text)
        parts = split_key(text)
        if parts is None:
            raise Unauthenticated(REFUSAL)
        key_id, secret = parts
        record = await self._records.get(key_id)
        if not is_proved(record, key_id, secret) or record is None or record.revoked_ms is not None:
            raise Unauthenticated(REFUSAL)
        return Caller(record.tenant, record)

    def forget(self, key_id: str) -> None:
        """Look at the key's record again with its next use."""
        self._records.forget(key_id)

    async def _bearer_of(self, token: str) -> Caller:
        key_id = None if self._tokens is None else await self._tokens.key_id(token)
        record = None if key_id is None else await self._records.get(key_id)
        if record is None or record.revoked_ms is not None:
            raise TokenRefused(TOKEN_REFUSAL)
        return Caller(record.tenant, record, token)


def _credential(headers: Headers) -> str:
    """Empty where there is none."""
    key = headers.get("x-api-key")
    if key is not None:
        return key
    bearer = headers.get("authorization", "")
    return bearer[len(_BEARER) :].strip() if bearer.lower().startswith(_BEARER) else ""
