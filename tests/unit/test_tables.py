"""Columns line up; numbers stand to the right."""

from tinsmith.tables import table


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_stand_right() -> None:
    assert table(("NAME", "N", "AGE S"), [("a", 5, 1.25), ("longer", 100, "-")]).splitlines() == [
        "NAME      N  AGE S",
        "a         5    1.2",
        "longer  100  -",
    ]


def test_no_rows_leave_the_heads() -> None:
    assert table(("A", "B"), []) == "A  B"
