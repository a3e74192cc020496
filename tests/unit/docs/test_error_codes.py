"""The page of errors: complete, fresh, and true to the maps."""

from pathlib import Path

import pytest

from tests.docs_scripts import load_script
from tinsmith.client import errors as client_errors
from tinsmith.protocol.errors import LEAVES, ReasonCode

error_codes = load_script("error_codes")


def test_the_page_is_fresh() -> None:
    assert error_codes.render() == error_codes.PAGE.read_text(), f"run: {error_codes.REMEDY}"


def test_every_reason_has_a_row_with_its_statuses() -> None:
    page = error_codes.render()
    for leaf in LEAVES:
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{leaf.reason}` |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:3] == [leaf.category.value, str(leaf.status)]
        assert all(cells[5:7])
    assert "| `endpoint_unavailable` | user | 501 | 400 |" in page


def test_a_reason_without_a_sentence_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = error_codes.REASONS.read_text().replace("[cancelled]", "[called_off]")
    (tmp_path / "reasons.toml").write_text(lines)
    monkeypatch.setattr(error_codes, "REASONS", tmp_path / "reasons.toml")
    with pytest.raises(ValueError, match=r"differ in called_off, cancelled"):
        error_codes.read_sentences()
    assert len(ReasonCode) == len(LEAVES)


def test_every_exception_of_the_client_is_in_the_tree() -> None:
    page = error_codes.render()
    kinds = [kind for kind in vars(client_errors).values() if isinstance(kind, type) and issubclass(kind, client_errors.ClientError)]
    assert len(kinds) > 8
    assert [kind.__name__ for kind in kinds if kind.__name__ not in page] == []
