"""The page of the native protocol: complete, fresh, and its types spelt as a reader of JSON thinks of them."""

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.fields import FieldInfo

from tests.docs_scripts import load_script
from tinsmith.protocol.arrays import IntArray
from tinsmith.protocol.native import REQUESTS, FieldRole, LoraOptions, fields_of

reference = load_script("protocol_reference")


@pytest.fixture(scope="module")
def page() -> str:
    rendered: str = reference.render()
    return rendered


def test_the_page_is_fresh(page: str) -> None:
    assert page == reference.PAGE.read_text(), f"run: {reference.REMEDY}"


def test_every_request_has_its_route_its_fields_and_their_roles(page: str) -> None:
    for request in REQUESTS:
        section = page.split(f"### POST {request.path}\n")[1].split("\n### ")[0]
        listed = re.findall(r"^\| `(\w+)` \|.*\| (.*?) ?\|$", section, re.MULTILINE)
        control = fields_of(request, FieldRole.CONTROL)
        assert [name for name, _ in listed] == list(request.model_fields)
        assert [name for name, role in listed if role == "control"] == list(control)


def test_links_lead_to_sections_of_the_page(page: str) -> None:
    sections = {heading.lower() for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= sections


def test_a_stream_answers_lines(page: str) -> None:
    section = page.split("### POST /sample_stream\n")[1].split("\n### ")[0]
    assert "Answers lines of JSON, each a [StreamFrame](#streamframe)." in section
    assert "[](#)" not in page


@pytest.mark.parametrize(
    ("default", "spelt"),
    [(1, "`1`"), (0, "`0`"), (1.0, "`1.0`"), (0.0, "`0.0`"), (True, "true"), (False, "false"), (None, "null"), ((), "empty"), ("a", "`a`")],
)
def test_numbers_are_told_from_booleans(default: object, spelt: str) -> None:
    assert reference._default(FieldInfo(default=default)) == spelt


@pytest.mark.parametrize(
    ("annotation", "spelt"),
    [
        (int, "integer"),
        (Annotated[int, Field(ge=1, le=8)] | None, "integer (≥ 1, ≤ 8) or null"),
        (tuple[Annotated[str, Field(max_length=3)], ...], "list of text (at most 3)"),
        (tuple[tuple[int, float], ...], "list of [integer, number]"),
        (dict[str, float], "object of number"),
        (Literal["a", "b"], "`a` \\| `b`"),
        (LoraOptions, "[LoraOptions](#loraoptions)"),
        (IntArray, "array"),
        (FieldRole, "`control` \\| `engine` \\| `payload`"),
    ],
)
def test_types_are_spelt_for_readers_of_json(annotation: Any, spelt: str) -> None:
    assert reference._spell(annotation) == spelt
