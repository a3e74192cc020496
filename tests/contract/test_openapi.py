"""The committed route inventory of the native API is the app's: a change of the API is a change of this file, made on purpose."""

import json
from typing import Any

import pytest

from tests.docs_scripts import load_script
from tinsmith.protocol.native import PREFIX, REQUESTS, StrictRequest

baseline = load_script("openapi_baseline")


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(baseline.PAGE.read_text())
    return tree


@pytest.mark.proves("R49")
def test_the_apps_routes_are_the_committed_ones(committed: dict[str, Any]) -> None:
    inventory = baseline.inventory()
    remedy = f"the native API has changed; if that is meant, run: {baseline.REMEDY}"
    assert sorted(inventory["routes"]) == sorted(committed["routes"]), remedy
    assert inventory == committed, remedy
    assert baseline.render() == baseline.PAGE.read_text(), remedy


def schema_of(committed: dict[str, Any], request: type[StrictRequest]) -> dict[str, Any]:
    [reference] = committed["routes"][f"POST {PREFIX}{request.path}"]["request"].values()
    schema: dict[str, Any] = committed["schemas"][reference["$ref"].rpartition("/")[2]]
    return schema


def test_every_request_of_the_protocol_has_its_route(committed: dict[str, Any]) -> None:
    for request in REQUESTS:
        assert set(schema_of(committed, request)["properties"]) == set(request.model_fields)


@pytest.mark.proves("R38")
def test_the_document_says_that_unknown_fields_are_refused(committed: dict[str, Any]) -> None:
    for request in REQUESTS:
        assert schema_of(committed, request)["additionalProperties"] is False


def test_every_schema_that_is_referred_to_is_there(committed: dict[str, Any]) -> None:
    text = json.dumps(committed)
    referred = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert referred == set(committed["schemas"])


def test_texts_are_no_part_of_the_inventory() -> None:
    described = {"type": "object", "description": "a text", "properties": {"description": {"type": "string", "title": "Description"}}}
    assert baseline._bare(described) == {"type": "object", "properties": {"description": {"type": "string"}}}
