"""The weights that all inflight samplers of a model share, over a `Store`: one record a save, of which the highest seq counts.

A save writes its record in the step that settles it. Settles of one lane may come out of order, since a save that was being published when
its owner died is settled by the next owner, after later ones: hence a record for each, and no pointer that a late one could turn back.
What a later save has replaced is listed apart for a while: samples that were queued with it may still wait. Knows nothing of files.
"""

from collections.abc import Collection, Sequence

from tinsmith.protocol.futures import Write
from tinsmith.protocol.sessions import InflightTarget
from tinsmith.state.store import Store


def target_writes(target: InflightTarget, held: Sequence[InflightTarget]) -> tuple[Write, ...]:
    """What a save makes visible, where `held` are the model's targets so far."""
    table = _table(target.tenant, target.model_id)
    own = Write(table, str(target.seq), target.model_dump_json().encode())
    replaced = [other for other in held if other.seq < target.seq]
    gone = [Write(table, str(other.seq), None) for other in replaced]
    listed = [Write(_replaced(target.tenant), other.artifact, b"%d" % target.created_ms) for other in replaced]
    return (own, *gone, *listed)


class InflightTargets:
    """Look-ups, and the end of what nobody wants any more."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def of_model(self, tenant: str, model_id: str) -> list[InflightTarget]:
        """Ascending by seq: the last is the one that counts."""
        held = (await self._store.list(_table(tenant, model_id))).values()
        return sorted((InflightTarget.model_validate_json(record.value) for record in held), key=lambda target: target.seq)

    async def current(self, own: InflightTarget) -> InflightTarget:
        """What the sampler that was made with `own` samples from now: never anything older."""
        return max(own, *await self.of_model(own.tenant, own.model_id), key=lambda target: target.seq)

    async def replaced(self, tenant: str) -> dict[str, int]:
        """Artifacts that a later save has replaced, and when, in ms."""
        return {artifact: int(held.value) for artifact, held in (await self._store.list(_replaced(tenant))).items()}

    async def forget_replaced(self, tenant: str, artifacts: Collection[str]) -> None:
        """Idempotent."""
        for artifact in artifacts:
            await self._store.delete(_replaced(tenant), artifact)

    async def forget(self, own: InflightTarget) -> None:
        """All targets of that model, whose samplers are gone. Idempotent."""
        for target in await self.of_model(own.tenant, own.model_id):
            await self._store.delete(_table(own.tenant, own.model_id), str(target.seq))


def _table(tenant: str, model_id: str) -> str:
    return f"{tenant}/inflight/{model_id}"


def _replaced(tenant: str) -> str:
    return f"{tenant}/replaced_inflight"
