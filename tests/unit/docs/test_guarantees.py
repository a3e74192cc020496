"""The page of guarantees: what counts as a proof, what is told as a gap, and that the committed page is fresh."""

from pathlib import Path

import pytest

from tests.docs_scripts import load_script

guarantees = load_script("guarantees")

TESTS = """
import pytest

@pytest.mark.proves("R1", "R2")
@pytest.mark.parametrize("x", [1])
def test_bounded(x): ...

class TestAll:
    @pytest.mark.proves("R3")
    async def test_inside(self): ...

    def test_without(self): ...

def helper(): ...
"""
MUTANTS = """
[[mutant]]
name = "derived"
test = "tests/test_a.py::test_bounded[1]"

[[mutant]]
name = "named"
test = "tests/test_a.py::test_bounded"
proves = ["R2"]

[[mutant]]
name = "unmarked"
test = "tests/test_a.py::test_of_nothing"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    (tmp_path / "mutants.toml").write_text(MUTANTS)
    return tmp_path


def test_marks_are_read_without_importing_the_tests(project: Path) -> None:
    proofs = guarantees.proofs_below(project / "tests")
    assert [(proof.id, proof.numbers) for proof in proofs] == [
        ("tests/test_a.py::test_bounded", ("R1", "R2")),
        ("tests/test_a.py::TestAll::test_inside", ("R3",)),
    ]


def test_a_module_marks_all_of_its_tests(tmp_path: Path) -> None:
    path = tmp_path / "test_b.py"
    path.write_text('import pytest\npytestmark = [pytest.mark.slow, pytest.mark.proves("I1")]\ndef test_one(): ...\ndef other(): ...\n')
    assert [(proof.name, proof.numbers) for proof in guarantees.proofs_of(path, "test_b.py")] == [("test_one", ("I1",))]


def test_a_fault_counts_for_what_its_test_proves_or_for_what_it_names(project: Path) -> None:
    faults = guarantees.faults_by_number(project / "mutants.toml", guarantees.proofs_below(project / "tests"))
    assert faults == {"R1": ["derived"], "R2": ["derived", "named"]}


def test_gaps_are_promises_without_a_proof_and_proofs_without_a_promise(project: Path) -> None:
    proofs = guarantees.proofs_below(project / "tests")
    promises = {"execution": {"R1": "a", "R2": "b", "R4": "c", "P2": "publication may wait"}}
    assert [gap.split()[0] for gap in guarantees.gaps(promises, proofs)] == ["R4", "R3"]


def test_a_row_shows_the_promise_its_proofs_and_its_faults(project: Path) -> None:
    page = guarantees.render({"execution": {"R3": "kept"}}, guarantees.proofs_below(project / "tests"), {"R3": ["x | y"]})
    assert "| **R3** | kept | `test_a.py::TestAll::test_inside` | x \\| y |" in page
    assert "1 of 1 promises have a proof, and 1 a planted fault" in page


def test_every_number_has_a_sentence() -> None:
    promises = guarantees.read_promises(guarantees.PROMISES)
    numbers = [number for section in promises.values() for number in section]
    execution = [f"R{number}" for number in range(1, 70) if number not in (18, 47)]
    assert sorted(number for number in numbers if number[0] == "R") == sorted(execution)
    assert [number for number in numbers if number[0] == "I"] == [f"I{number}" for number in range(1, 13)]
    assert set(promises) == set(guarantees.TITLES)
    assert [text for section in promises.values() for text in section.values() if not text.endswith(".") or len(text) > 160] == []


def test_every_promise_of_execution_has_a_proof() -> None:
    assert guarantees.gaps(guarantees.read_promises(guarantees.PROMISES), guarantees.proofs_below(guarantees.TESTS)) == []


def test_the_page_is_fresh() -> None:
    proofs = guarantees.proofs_below(guarantees.TESTS)
    faults = guarantees.faults_by_number(guarantees.MUTANTS, proofs)
    page = guarantees.render(guarantees.read_promises(guarantees.PROMISES), proofs, faults)
    assert page == guarantees.PAGE.read_text(), f"run: {guarantees.REMEDY}"
