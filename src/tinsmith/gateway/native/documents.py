"""What /openapi.json says of the native routes.

Bodies are read by hand, so their schemas come from the classes of the protocol and not from the framework; the schemas that they refer to
are added to the document when it is built.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tinsmith.gateway.auth import JSON
from tinsmith.gateway.ndjson import NDJSON
from tinsmith.protocol import native
from tinsmith.protocol.envelopes import Answer, ErrorPayload
from tinsmith.protocol.native import StrictRequest
from tinsmith.protocol.native_answers import StreamFrame

_SCHEMAS = "#/components/schemas/"
_REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorPayload, "description": "The request is refused; nothing was written."},
    "5XX": {"model": ErrorPayload, "description": "The server cannot take the request: now (503), here (501), or by its own fault."},
}


def answering(answer: type[Answer]) -> dict[str, Any]:
    """Options of a route without a body."""
    return {"response_model": answer, "responses": _REFUSALS}


def taking(request: type[StrictRequest], answer: type[Answer]) -> dict[str, Any]:
    """Options of a route that reads `request`."""
    return answering(answer) | _reading(request)


def streaming(request: type[StrictRequest]) -> dict[str, Any]:
    """Options of a route that reads `request` and answers lines, a `StreamFrame` each."""
    content = {NDJSON: {"schema": {"$ref": f"{_SCHEMAS}{StreamFrame.__name__}"}}}
    lines = {"description": "Lines of JSON, each a StreamFrame.", "content": content}
    return {"response_model": None, "responses": {200: lines, **_REFUSALS}} | _reading(request)


def install(app: FastAPI) -> None:
    """Let the app build its document with the bodies in it."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add_schemas(document)
            _leave_lines_alone(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]  # as FastAPI says to extend it


def _reading(request: type[StrictRequest]) -> dict[str, Any]:
    body = {"required": True, "content": {JSON: {"schema": {"$ref": f"{_SCHEMAS}{request.__name__}"}}}}
    return {"openapi_extra": {"requestBody": body}, "description": " ".join((request.__doc__ or "").split())}


def _add_schemas(document: dict[str, Any]) -> None:
    """Of all requests, of their parts, and of the lines of a stream. A part that an answer holds too has a second name here: what may be
    left out differs."""
    known = document["components"]["schemas"]
    kinds = [(request, "validation") for request in native.REQUESTS]
    _, schemas = models_json_schema([*kinds, (StreamFrame, "serialization")], ref_template=f"{_SCHEMAS}{{model}}")  # type: ignore[list-item]
    taken = {name: f"{name}Request" for name in schemas["$defs"] if name in known}
    for name, schema in schemas["$defs"].items():
        known[taken.get(name, name)] = _renamed(schema, taken)


def _renamed(tree: Any, taken: dict[str, str]) -> Any:
    """The schema with its references to taken names replaced."""
    match tree:
        case dict():
            return {key: _renamed(part, taken) for key, part in tree.items()}
        case list():
            return [_renamed(part, taken) for part in tree]
        case str() if tree.startswith(_SCHEMAS):
            name = tree.removeprefix(_SCHEMAS)
            return _SCHEMAS + taken.get(name, name)
        case _:
            return tree


def _leave_lines_alone(document: dict[str, Any]) -> None:
    """The framework adds a JSON answer to every route; one that answers lines has none."""
    for operations in document["paths"].values():
        for operation in operations.values():
            content = operation["responses"].get("200", {}).get("content", {})
            if NDJSON in content:
                content.pop(JSON, None)
