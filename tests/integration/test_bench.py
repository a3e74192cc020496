"""The cases of `tinsmith bench` run, on few waiters."""

import json
from pathlib import Path

import pytest

from tinsmith.bench import wake
from tinsmith.bench.__main__ import main


def test_wake_prints_our_latencies_beside_the_floor_of_the_same_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(wake, "NUM_SETTLED", 3)
    assert main(["wake", "--waiters", "1", "4", "--rounds", "1", "--json", str(tmp_path / "wake.json")]) == 0
    printed = capsys.readouterr().out
    assert "wake, 1 waiting" in printed
    assert "wake, 4 waiting" in printed
    figures = json.loads((tmp_path / "wake.json").read_text())["comparisons"]
    assert all(turn["ours"]["num"] == turn["floor"]["num"] == 3 for line in figures for turn in line["rounds"])
    assert all(0 < line["p50_ms"] <= line["p99_ms"] for line in figures)
