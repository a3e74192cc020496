"""The page of the fault matrix, from measured rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs_scripts import load_script


def measured(**changes: object) -> dict[str, Any]:
    """One row a group."""
    script = load_script("fault_matrix")
    row = {
        "fault": "hang",
        "where": "load",
        "saw": "execution_timeout",
        "seconds": 3.04,
        "bound_s": 8.0,
        "bound": "T + answer",
        "then": "ok",
    }
    rows = {group: {"group": group, **row, **changes} for group in script.HEADINGS}
    return {"num_cpus": 2, "rows": rows}


def test_a_row_tells_what_callers_saw_and_within_which_bound() -> None:
    page = load_script("fault_matrix").render(measured())
    assert "| hang | load | execution_timeout | 3.0 s | 8 s (T + answer) | ok |" in page.splitlines()
    assert "one run's on 2 cores" in page


def test_a_bound_of_its_own_stands_alone() -> None:
    assert "| 3.0 s | 8 s | ok |" in load_script("fault_matrix").render(measured(bound=""))


def test_a_part_of_a_run_makes_no_page() -> None:
    rows = measured()
    del rows["rows"]["store"]
    with pytest.raises(ValueError, match="no rows of store; run the whole of make chaos"):
        load_script("fault_matrix").render(rows)


def test_without_a_run_there_is_nothing_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("fault_matrix")
    monkeypatch.setattr(script, "MEASURED", tmp_path / "fault-matrix.json")
    assert script.main() == 1
    assert "run: make chaos" in capsys.readouterr().err


def test_the_page_is_written_from_the_measured_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("fault_matrix")
    (tmp_path / "fault-matrix.json").write_text(json.dumps(measured()))
    monkeypatch.setattr(script, "MEASURED", tmp_path / "fault-matrix.json")
    monkeypatch.setattr(script, "PAGE", tmp_path / "fault-matrix.md")
    monkeypatch.setattr("sys.argv", ["fault_matrix.py"])
    assert script.main() == 0
    assert (tmp_path / "fault-matrix.md").read_text() == script.render(measured())
