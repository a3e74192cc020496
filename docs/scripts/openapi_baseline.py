"""Writes tests/contract/openapi.json: every native route with its method and the schemas that it takes and answers, as the app says now.

The file is committed. A test compares it with the app, so a change of the API shows up as a change of the file, made on purpose with
`make openapi`. Texts are left out: a better sentence is no change of the API.
"""

import json
import sys
from pathlib import Path
from typing import Any

from native_app import build_app
from pages import publish

from tinsmith.protocol.native import PREFIX

PAGE = Path(__file__).resolve().parents[2] / "tests" / "contract" / "openapi.json"
REMEDY = "make openapi"
_TEXTS = frozenset({"description", "summary", "title", "operationId", "tags"})


def inventory() -> dict[str, Any]:
    """{"routes": {"POST /native/v1/...": {request, responses, parameters}}, "schemas": {name: schema}}: only what the routes refer to."""
    document = build_app().openapi()
    routes = {
        f"{method.upper()} {path}": _route(operation)
        for path, operations in document["paths"].items()
        if path.startswith(PREFIX)
        for method, operation in operations.items()
    }
    schemas = document["components"]["schemas"]
    used: dict[str, Any] = {}
    _collect(routes, schemas, used)
    return {"routes": routes, "schemas": used}


def render() -> str:
    return json.dumps(inventory(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _route(operation: dict[str, Any]) -> dict[str, Any]:
    body = operation.get("requestBody")
    return {
        "request": None if body is None else _contents(body),
        "responses": {status: _contents(response) for status, response in operation["responses"].items()},
        "parameters": _bare(operation.get("parameters", [])),
    }


def _contents(holder: dict[str, Any]) -> dict[str, Any]:
    """Media type -> schema."""
    return {media: _bare(content.get("schema", {})) for media, content in holder.get("content", {}).items()}


def _bare(tree: Any, *, names_are_ours: bool = False) -> Any:
    """Without texts. Below `properties` the keys are names of fields, of which one may be called like a text."""
    if isinstance(tree, dict):
        kept = {key: value for key, value in tree.items() if names_are_ours or key not in _TEXTS}
        return {key: _bare(value, names_are_ours=key == "properties" and not names_are_ours) for key, value in kept.items()}
    return [_bare(part) for part in tree] if isinstance(tree, list) else tree


def _collect(tree: Any, schemas: dict[str, Any], used: dict[str, Any]) -> None:
    """Put every schema that the tree refers to, and those that these refer to, into `used`."""
    if isinstance(tree, list):
        for part in tree:
            _collect(part, schemas, used)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            name = value.rpartition("/")[2] if key == "$ref" and isinstance(value, str) else None
            if name is not None and name not in used:
                used[name] = _bare(schemas[name])
                _collect(used[name], schemas, used)
            _collect(value, schemas, used)


if __name__ == "__main__":
    sys.exit(publish(PAGE, render(), REMEDY))
