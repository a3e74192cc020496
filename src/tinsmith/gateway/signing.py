"""Signed links: what lets a caller without a key read one file, or one archive, for an hour at most.

A signature binds the method, the tenant for which the link was made, the artifact, the file and the time at which it ends; whoever changes
any of them has no link. The keys are the cluster's (`state.signing_keys`), so each gateway accepts what another one signed. Knows nothing
of what lies under an artifact, nor of HTTP beyond the query of a link.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from tinsmith.protocol.errors import NotFound
from tinsmith.state.signing_keys import SigningKey, SigningKeys
from tinsmith.state.store import Store

PURPOSE = "downloads"
LINK_S = 3600  # how long a link may live
ARCHIVE = ""  # in the place of a file: all files of an adapter, as one archive
_SECONDS = re.compile(r"[0-9]{1,12}")
_NO_KEY = SigningKey("", b"")  # stands in for one that is unknown, so that both are refused in the same time


@dataclass(frozen=True, slots=True)
class Link:
    """`expires_s`: seconds since 1970 UTC."""

    method: str
    tenant: str
    artifact: str
    file: str
    expires_s: int

    def signed_text(self) -> bytes:
        """A list, since whatever joins its parts could also stand in one of them."""
        return json.dumps([self.method, self.tenant, self.artifact, self.file, self.expires_s]).encode()


class Links:
    """Signs links and checks them. Raises StateContention while the store is away."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = SigningKeys(store, PURPOSE)

    async def expiry_s(self) -> int:
        """Of a link that is made now."""
        return await self._store.now_ms() // 1000 + LINK_S

    async def query(self, link: Link) -> str:
        """What makes the link's URL valid, as the text after its question mark."""
        key = await self._keys.current()
        return urlencode({"tenant": link.tenant, "expires": link.expires_s, "key": key.key_id, "signature": _signature(key, link)})

    async def check(self, method: str, artifact: str, file: str, query: Mapping[str, str]) -> None:
        """Raises NotFound, always in the same words, for a link that is not signed so, or that has expired."""
        expires = query.get("expires", "")
        expires_s = int(expires) if _SECONDS.fullmatch(expires) else 0
        link = Link(method, query.get("tenant", ""), artifact, file, expires_s)
        key = await self._keys.find(query.get("key", ""))
        is_signed = hmac.compare_digest(_signature(key or _NO_KEY, link).encode(), query.get("signature", "").encode())
        remaining_s = expires_s - await self._store.now_ms() // 1000
        if key is None or not is_signed or not 0 < remaining_s <= LINK_S:
            raise NotFound("the link is not valid, or has expired; ask for a new one")


def _signature(key: SigningKey, link: Link) -> str:
    return hmac.new(key.secret, link.signed_text(), hashlib.sha256).hexdigest()
