"""Models that cannot be created as asked: a promise whose future failed at birth, as for every other refusal of training.

There is no lane that could hold the failed entry, so the refusal has a record of its own, under a control id that follows from the model's.
A number that was refused is spent, like every number of this wire: sent again for something else, it is rejected.
"""

from tinsmith.gateway.deps import Services
from tinsmith.protocol.errors import NotFound, RequestRejected, TinsmithError
from tinsmith.protocol.futures import Failure
from tinsmith.protocol.ids import WorkKind
from tinsmith.state.refusals import Refusals, RefusedCreation

_CREATE = "create"  # in the place of a seq in the request id


async def refuse_creation(services: Services, tenant: str, session_id: str, model_id: str, refusal: TinsmithError) -> dict[str, object]:
    """Answers the promise. Raises RequestRejected for a number that has been used otherwise, RateLimited, and the refusal itself where the
    tenant has left too many."""
    if await _exists(services, tenant, model_id):
        raise RequestRejected(f"model_seq_id: {model_id} was created with something else; count on")
    await services.budgets.admit(tenant, 0)
    rid = await _refusal_id(services, tenant, model_id)
    record = RefusedCreation(tenant=tenant, session_id=session_id, model_id=model_id, rid=rid, failure=Failure.of(refusal))
    if not await Refusals(services.store).add(record):
        raise refusal
    return {"request_id": rid, "model_id": model_id}


async def check_not_refused(services: Services, tenant: str, model_id: str) -> None:
    """Raises RequestRejected."""
    if await Refusals(services.store).find(tenant, await _refusal_id(services, tenant, model_id)) is not None:
        raise RequestRejected(f"model_seq_id: {model_id} was refused before; count on")


async def refusal_of(services: Services, tenant: str, rid: str) -> Failure | None:
    """Why the model whose creation has this request id was refused."""
    record = await Refusals(services.store).find(tenant, rid)
    return None if record is None else record.failure


async def _refusal_id(services: Services, tenant: str, model_id: str) -> str:
    return await services.request_id(WorkKind.CONTROL, tenant, model_id, _CREATE)


async def _exists(services: Services, tenant: str, model_id: str) -> bool:
    try:
        await services.catalog.model(tenant, model_id)
    except NotFound:
        return False
    return True
