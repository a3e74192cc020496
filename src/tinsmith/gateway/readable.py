"""Which checkpoints a tenant may read: its own, and what others have published. Expired ones are seen by nobody."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tinsmith.gateway.deps import Services
from tinsmith.protocol.sessions import CheckpointRecord
from tinsmith.state.publications import Publication


async def own_checkpoints(services: Services, tenant: str) -> list[CheckpointRecord]:
    """In no order."""
    records = await services.catalog.checkpoints(tenant)
    return _unexpired(records, await services.store.now_ms())


async def published_checkpoints(
    services: Services, tenant: str, published: Mapping[str, Publication], run_id: str | None = None
) -> list[CheckpointRecord]:
    """Those of other tenants, of one run or of all, in no order. `published`: all publications by path."""
    by_owner: defaultdict[str, list[Publication]] = defaultdict(list)
    for publication in published.values():
        if publication.tenant != tenant and (run_id is None or publication.run_id == run_id):
            by_owner[publication.tenant].append(publication)
    found: list[CheckpointRecord] = []
    for owner, publications in by_owner.items():
        records = {record.path: record for record in await own_checkpoints(services, owner)}
        found += [records[held.path] for held in publications if held.path in records and held.covers(records[held.path])]
    return found


def _unexpired(records: Iterable[CheckpointRecord], now_ms: int) -> list[CheckpointRecord]:
    return [record for record in records if record.expires_ms is None or record.expires_ms > now_ms]
