"""The end of a model at its owner's wish, and the promise of it: the same on each face. An unload is done at once; its promise has an id
that is derived, so no record need be kept."""

from tinsmith.gateway.deps import Services
from tinsmith.lifecycle.sessions import close_model
from tinsmith.protocol.errors import Category, ReasonCode
from tinsmith.protocol.futures import Failure
from tinsmith.protocol.ids import WorkKind
from tinsmith.protocol.sessions import ModelRecord

_UNLOAD = "unload"  # in the place of a seq in the request id


async def unload(services: Services, tenant: str, model_id: str) -> ModelRecord:
    """Close the model; pending requests of it fail. Idempotent. Raises NotFound."""
    model = await services.catalog.model(tenant, model_id)
    failure = Failure(
        reason=ReasonCode.SESSION_ENDED, message=f"model {model.model_id} was unloaded; create a new one", category=Category.USER
    )
    await close_model(services.catalog, services.lanes, model, failure, now_ms=await services.store.now_ms())
    return model


async def unload_id(services: Services, tenant: str, model_id: str) -> str:
    """The request id of the model's unload."""
    return await services.request_id(WorkKind.CONTROL, tenant, model_id, _UNLOAD)


async def unloaded_model(services: Services, tenant: str, rid: str) -> str | None:
    """The model whose unload has this request id."""
    for model in await services.catalog.models(tenant):
        if model.ended_ms is not None and await unload_id(services, tenant, model.model_id) == rid:
            return model.model_id
    return None
