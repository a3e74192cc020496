"""The page of the compatibility list: fresh and complete."""

from tests.docs_scripts import load_script
from tinsmith.conformance.runner import ITEMS

conformance = load_script("conformance")


def test_the_page_is_fresh() -> None:
    assert conformance.render() == conformance.PAGE.read_text(), f"run: {conformance.REMEDY}"


def test_every_item_has_a_row_in_the_order_of_its_number() -> None:
    rows = [line.split(" | ")[0].strip("| ") for line in conformance.render().splitlines() if line.startswith("| ")][1:]
    assert sorted(rows) == sorted(held.number for held in ITEMS)
    assert rows.index("9b") < rows.index("10a") < rows.index("19") < rows.index("27b")
