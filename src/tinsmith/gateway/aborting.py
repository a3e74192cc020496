"""The end of a sample that nobody waits for: dropped where it waits, freed where it runs."""

from tinsmith.gateway.deps import Services
from tinsmith.protocol.futures import State
from tinsmith.state.futures import base_of_pool
from tinsmith.state.inbox import SampleAbort, encode
from tinsmith.state.lanes import Replica, Role, inbox_topic


async def samplers_of(services: Services, base: str) -> list[Replica]:
    """Those whose lease runs, draining ones included: their successors serve what they leave."""
    return [replica for replica in await services.lanes.replicas(base) if replica.role is Role.SAMPLER]


async def abort(services: Services, tenant: str, base: str, rid: str) -> None:
    """Drop the sample, wherever it is. Raises StateContention."""
    if await services.lanes.cancel(tenant, rid) is State.RUNNING:
        await _order(services, base, rid)


async def stop_running(services: Services, tenant: str, rid: str) -> None:
    """Let whoever runs the sample end it; it becomes cancelled then, unless it ends before. Raises StateContention."""
    record = await services.lanes.look(tenant, rid)
    if record is not None and record.state is State.RUNNING:
        await _order(services, base_of_pool(record.lane, tenant), rid)


async def _order(services: Services, base: str, rid: str) -> None:
    order = encode(SampleAbort(rid=rid))
    for replica in await samplers_of(services, base):
        await services.lanes.post(inbox_topic(replica.id), [order])
