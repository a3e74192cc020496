"""Plain tables for the terminal: columns that are as wide as their widest cell, numbers to the right. Knows nothing of what it shows."""

from collections.abc import Sequence

GAP = "  "


def table(heads: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> str:
    """Lines without a last newline; the heads alone where there are no rows."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(len(head), *(len(line[column]) for line in cells)) if cells else len(head) for column, head in enumerate(heads)]
    lines = [_line(heads, [any(_is_number(row[column]) for row in rows) for column in range(len(heads))], widths)]
    lines += [_line(line, [_is_number(value) for value in row], widths) for line, row in zip(cells, rows, strict=True)]
    return "\n".join(lines)


def _line(cells: Sequence[str], is_number: Sequence[bool], widths: Sequence[int]) -> str:
    aligned = [cell.rjust(width) if right else cell.ljust(width) for cell, right, width in zip(cells, is_number, widths, strict=True)]
    return GAP.join(aligned).rstrip()


def _is_number(value: str | int | float) -> bool:
    return not isinstance(value, str)


def _text(value: str | int | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
