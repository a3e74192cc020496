"""Routes of models: the base models and the sampler checkpoints that the caller may sample, its own and what others have published."""

from fastapi import APIRouter
from starlette.responses import Response

from tinsmith.gateway.deps import Services, ServicesDep, TenantDep
from tinsmith.gateway.openai.answers import Model, ModelList
from tinsmith.gateway.openai.served import ServedModel, find
from tinsmith.gateway.openai.writing import written
from tinsmith.protocol.sessions import CheckpointKind

OWNER = "tinsmith"  # of the base models
SELF, OTHERS = "you", "another tenant"  # of checkpoints; no tenant is named to another

router = APIRouter()


@router.get("/models")
async def list_models(services: ServicesDep, tenant: TenantDep) -> Response:
    """Base models first, then checkpoints, the newest last."""
    served = [ServedModel(name, services.base_models[name], None) for name in sorted(services.base_models)]
    served += await _checkpoints(services, tenant)
    return await written(ModelList(data=[_model(one, tenant) for one in served]), is_large=len(served) > 256)


@router.get("/models/{model:path}")
async def get_model(model: str, services: ServicesDep, tenant: TenantDep) -> Response:
    return await written(_model(await find(services, tenant, model), tenant), is_large=False)


async def _checkpoints(services: Services, tenant: str) -> list[ServedModel]:
    now_ms = await services.store.now_ms()
    found = {record.path: record for record in await services.catalog.checkpoints(tenant)}
    published = await services.publications.all()
    for owner in {publication.tenant for publication in published.values()} - {tenant}:
        for record in await services.catalog.checkpoints(owner):
            if (publication := published.get(record.path)) is not None and publication.covers(record):
                found.setdefault(record.path, record)
    return [
        ServedModel(record.path, services.base_models[record.base_model], record)
        for record in sorted(found.values(), key=lambda record: (record.created_ms, record.path))
        if record.kind is CheckpointKind.SAMPLER
        and record.base_model in services.base_models
        and (record.expires_ms is None or record.expires_ms > now_ms)
    ]


def _model(served: ServedModel, tenant: str) -> Model:
    checkpoint = served.checkpoint
    if checkpoint is None:
        return Model(id=served.name, created=0, owned_by=OWNER, root=served.base.name, parent=None, max_model_len=served.base.max_context)
    return Model(
        id=served.name,
        created=checkpoint.created_ms // 1000,
        owned_by=SELF if checkpoint.tenant == tenant else OTHERS,
        root=served.name,
        parent=served.base.name,
        max_model_len=served.base.max_context,
    )
