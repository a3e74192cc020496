"""The package as users import it: light, sorted, typed."""

import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

import tinsmith.client

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "tests" / "types"


def test_public_names_are_sorted_and_exist():
    assert tinsmith.client.__all__ == sorted(tinsmith.client.__all__)
    public = {name for name, value in vars(tinsmith.client).items() if not name.startswith("_") and not hasattr(value, "__path__")}
    modules = {path.stem for path in Path(tinsmith.client.__file__).parent.glob("*.py")}
    assert public - modules == set(tinsmith.client.__all__)


def test_importing_the_client_pulls_in_no_heavy_package():
    heavy = ["torch", "ray", "numpy", "fastapi", "redis", "google.protobuf", "transformers", "opentelemetry"]
    code = f"import sys, tinsmith.client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def verdict(tmp_path_factory) -> list[str]:
    """What mypy --strict says of both programs, a line each."""
    cache = tmp_path_factory.getbasetemp() / "mypy"
    config = tmp_path_factory.mktemp("types") / "mypy.ini"
    config.write_text(f"[mypy]\nmypy_path = {ROOT / 'src'}\n")
    files = [str(PROGRAMS / "good.py"), str(PROGRAMS / "misspelt.py")]
    report, faults, _ = api.run(["--strict", "--config-file", str(config), "--cache-dir", str(cache), *files])
    assert faults == ""
    return [line for line in report.splitlines() if "error" in line or "note" in line]


@pytest.mark.proves("R37")
def test_a_program_that_is_right_passes_mypy_strict(verdict):
    assert [line for line in verdict if "good.py" in line] == []


@pytest.mark.proves("R37")
def test_each_misspelt_argument_is_flagged_by_mypy_strict(verdict):
    marked = [number for number, line in enumerate((PROGRAMS / "misspelt.py").read_text().splitlines(), 1) if "# flagged" in line]
    flagged = {int(line.split(":")[1]) for line in verdict if "misspelt.py" in line and ": error: Unexpected keyword argument" in line}
    assert len(marked) >= 8
    assert flagged == set(marked)


@pytest.mark.proves("R37")
def test_the_same_misspellings_fail_at_run_time_before_any_request():
    done = subprocess.run([sys.executable, str(PROGRAMS / "misspelt.py")], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[-1] == "requests after the set-up: 0"
    assert len(lines) - 1 == (PROGRAMS / "misspelt.py").read_text().count("# flagged")
    assert all(line.startswith(("TypeError: ", "ValidationError: ")) for line in lines[:-1])
