"""Tenants with API keys at a face: keys that exist, and clients that send them."""

from pathlib import Path

import httpx

from tests.fakes.face import Face
from tinsmith.state.keyring import KeyRecord, issue


def with_keys(directory: Path, **auth: object) -> dict[str, object]:
    """The section `auth` of a server over the memory store."""
    return {"mode": "keys", "keys_file": str(directory / "keys.json"), **auth}


async def key_of(face: Face, tenant: str, name: str = "") -> tuple[str, KeyRecord]:
    """A new key of the tenant: its text and its record."""
    return await issue(face.services.keyring, tenant, name, await face.store.now_ms())


def client_of(face: Face, key: str) -> httpx.AsyncClient:
    """A client that sends the key with every request."""
    transport = httpx.ASGITransport(face.app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1:8700", headers={"X-API-Key": key})
