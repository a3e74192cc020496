"""Numbers of the clients of a sampling session, over a `Store`. Each client counts its requests in a block of its own (`state.feeds`).

Who opened the session is client 0, and is not counted here.
"""

from tinsmith.state.store import Store


class SamplerClients:
    """Numbers are given out once, whoever asks and however many at once: a number is the version of a record that nothing else reads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def join(self, tenant: str, sampler_id: str) -> int:
        """The next client's number, from 1. A resend after a lost reply may pass one over. Raises StateContention."""
        return await self._store.put(_table(tenant), sampler_id, b"")

    async def forget(self, tenant: str, sampler_id: str) -> None:
        """Of a sampling session that nobody can join any more. Idempotent."""
        await self._store.delete(_table(tenant), sampler_id)


def _table(tenant: str) -> str:
    return f"{tenant}/sampler_clients"
