"""Routes of the caller's own account: its API key exchanged for a token, described, and revoked by whoever holds it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from tinsmith.gateway import bodies
from tinsmith.gateway.deps import CallerDep, ServicesDep
from tinsmith.protocol.errors import EndpointUnavailable, RequestRejected
from tinsmith.state.audit import key_revoked, note

router = APIRouter()


@router.post("/auth/token")
async def exchange(request: Request, services: ServicesDep, caller: CallerDep) -> dict[str, str]:
    """Who holds only a token gets it back as it is: an exchange prolongs none. Raises EndpointUnavailable where there are no tokens."""
    await bodies.receive(request)
    if services.tokens is None or caller.key is None:
        raise EndpointUnavailable("this server issues no tokens; send the API key itself, or set auth.mode: keys and auth.jwt: true")
    return {"jwt": await services.tokens.issue(caller.key) if caller.token is None else caller.token}


@router.get("/auth/apikey/me")
async def describe_own_key(caller: CallerDep) -> dict[str, object]:
    """The organization is the tenant. In open mode any key is as good as another."""
    key_id, name = (0, "open mode") if caller.key is None else (int(caller.key.key_id, 16), caller.key.name)
    details = {"org_details": {"name": caller.tenant}, "user_details": {"email": ""}}
    return {"key_id": key_id, "name": name, "note": "", "details": details}


@router.delete("/auth/apikey/me")
async def revoke_own_key(services: ServicesDep, caller: CallerDep) -> Response:
    """Of the key itself alone: a token, which other hands may hold, ends no key."""
    if caller.key is None:
        raise EndpointUnavailable("open mode has no keys to revoke; set auth.mode: keys")
    if caller.token is not None:
        raise RequestRejected("X-API-Key: a token cannot revoke its key; send the key itself")
    record = await services.keyring.revoke(caller.key.key_id, await services.store.now_ms())
    services.authenticator.forget(record.key_id)
    await note(services.store, key_revoked(record))
    return Response(status_code=204)
