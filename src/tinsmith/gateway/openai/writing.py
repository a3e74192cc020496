"""Answers under /v1 as bytes."""

from pydantic import BaseModel
from starlette.responses import Response

from tinsmith.gateway.auth import JSON
from tinsmith.gateway.bodies import off_loop


async def written(answer: BaseModel, *, is_large: bool) -> Response:
    """`is_large`: writing it would hold the event loop."""
    return Response(await off_loop(lambda: encoded(answer), is_large=is_large), media_type=JSON)


def encoded(answer: BaseModel) -> bytes:
    return answer.model_dump_json().encode()
