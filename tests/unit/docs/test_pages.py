"""A generated file is written, or found stale."""

from pathlib import Path

import pytest

from tests.docs_scripts import load_script

pages = load_script("pages")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.md"


def test_without_arguments_the_file_is_written(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script"])
    assert pages.publish(page, "new", "make it", ["a fault"]) == 0
    assert page.read_text() == "new"


def test_a_check_writes_nothing_and_tells_what_is_wrong(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["script", "--check"])
    assert pages.publish(page, "new", "make it") == 1
    page.write_text("old")
    assert pages.publish(page, "new", "make it", ["R1 has no proof"]) == 1
    assert page.read_text() == "old"
    assert capsys.readouterr().err.splitlines() == [
        "page.md is stale; run: make it",
        "R1 has no proof",
        "page.md is stale; run: make it",
    ]
    page.write_text("new")
    assert pages.publish(page, "new", "make it") == 0
    assert pages.publish(page, "new", "make it", ["R1 has no proof"]) == 1
