"""Probes. The cheap one says that this process answers; the deep one that requests can be served: the store is there, and every base model
has a living and healthy trainer and sampler."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from tinsmith.gateway.deps import Services, ServicesDep
from tinsmith.protocol.errors import StateContention
from tinsmith.state.lanes import Role

router = APIRouter(include_in_schema=False)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/healthz/deep")
async def healthz_deep(services: ServicesDep) -> JSONResponse:
    """503 names what is bad."""
    faults = await _faults(services)
    if faults:
        return JSONResponse({"status": "failing", "faults": faults}, status_code=503, headers={"Retry-After": "1"})
    return JSONResponse({"status": "ok", "faults": []})


async def _faults(services: Services) -> list[str]:
    try:
        await services.store.now_ms()
        return [fault for base in sorted(services.base_models) for fault in await _faults_of(services, base)]
    except StateContention as error:
        return [f"store: {error.message}"]


async def _faults_of(services: Services, base: str) -> list[str]:
    healthy = {replica.role for replica in await services.lanes.replicas(base) if replica.is_healthy}
    return [f"{base}: no healthy {role}" for role in (Role.TRAINER, Role.SAMPLER) if role not in healthy]
