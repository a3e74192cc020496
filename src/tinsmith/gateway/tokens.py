"""Short-lived tokens that stand for an API key: JWTs, signed with keys of the cluster's own (`state.signing_keys`).

A token names its key and says nothing that counts beside it: who the caller is, and whether the key still holds, is read from the key's
record with every use. So a token ends with its key. The clients of the Tinker wire read `sub`, `org_id` and `email` of the payload, and
renew by `iat` and `exp`. Knows no HTTP.
"""

import time
from collections.abc import Callable

import jwt

from tinsmith.gateway.recent import Recent
from tinsmith.state.keyring import KeyRecord
from tinsmith.state.signing_keys import SigningKey, SigningKeys

PURPOSE = "jwt"
MARK = "eyJ"  # what every JWT begins with: `{"` in base64
_ALGORITHM = "HS256"
_SUBJECT = "urn:tinsmith:key:"
_REQUIRED = ("exp", "iat", "sub")


class Tokens:
    """Issues and reads tokens. `life_s` is no longer than a signing key is accepted. Raises StateContention while the store is away."""

    def __init__(self, keys: SigningKeys, life_s: float, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._life_s = life_s
        self._clock = clock
        self._recent: Recent[SigningKey] = Recent(keys.find)

    async def issue(self, record: KeyRecord) -> str:
        """A token for the key. Its tenant is shown as the organization; a key has no mail address."""
        key, now_s = await self._keys.current(), int(self._clock())
        payload: dict[str, object] = {
            "iat": now_s,
            "exp": now_s + int(self._life_s),
            "sub": f"{_SUBJECT}{record.key_id}",
            "org_id": record.tenant,
            "email": "",
        }
        return jwt.encode(payload, key.secret, algorithm=_ALGORITHM, headers={"kid": key.key_id})

    async def key_id(self, token: str) -> str | None:
        """The key that the token stands for; None for one that is malformed, expired, or signed by no key that is accepted."""
        key = await self._signing_key(token)
        if key is None:
            return None
        try:
            # The clocks of two gateways differ a little: a token may seem to come from the future, but none lives longer for it.
            payload = jwt.decode(token, key.secret, algorithms=[_ALGORITHM], options={"require": list(_REQUIRED), "verify_iat": False})
        except jwt.InvalidTokenError:
            return None
        subject = payload["sub"]
        return subject.removeprefix(_SUBJECT) if isinstance(subject, str) and subject.startswith(_SUBJECT) else None

    async def _signing_key(self, token: str) -> SigningKey | None:
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
        except jwt.InvalidTokenError:
            return None
        return await self._recent.get(key_id) if isinstance(key_id, str) else None
