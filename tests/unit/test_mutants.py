"""The mutation harness itself, on a project of three lines: it must tell a test that notices a fault from one that does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.harness import Mutant, Tree, Verdict, read_mutants, run, selected, summary

ADDS = "tests/test_sum.py::test_adds"
BLIND = "tests/test_sum.py::test_blind"
FALSE = "tests/test_sum.py::test_false"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "src/calculator.py": "def add(a, b):\n    return a + b\n",
        "tests/test_sum.py": (
            "from calculator import add\n\n"
            "def test_adds():\n    assert add(2, 3) == 5\n\n"
            "def test_blind():\n    assert add(0, 0) == 0\n\n"
            "def test_false():\n    assert add(2, 3) == 6\n"
        ),
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def tree(project: Path) -> Iterator[Tree]:
    with Tree.copied_from(project) as tree:
        yield tree


def mutant(*, old: str = "a + b", new: str = "a - b", test: str = ADDS, name: str = "swapped sign") -> Mutant:
    return Mutant(name=name, file="src/calculator.py", old=old, new=new, test=test)


def test_each_verdict(tree: Tree) -> None:
    expected = [
        (mutant(), Verdict.KILLED),
        (mutant(test=BLIND), Verdict.SURVIVED),
        (mutant(test=FALSE), Verdict.UNSOUND),
        (mutant(old="a * b"), Verdict.STALE),
        (mutant(old="a"), Verdict.STALE),  # occurs more than once
        (mutant(new="a +"), Verdict.BROKEN),  # no Python
        (mutant(test="tests/test_sum.py::test_absent"), Verdict.UNSOUND),
    ]
    shown: list[Verdict] = []
    trials = run(tree, [planted for planted, _ in expected], show=lambda trial: shown.append(trial.verdict))
    assert shown == [verdict for _, verdict in expected]
    assert summary(trials).startswith("7 mutants: 1 killed, 1 survived, 2 stale, 2 unsound, 1 broken in ")


def test_the_working_tree_is_never_touched_and_the_copy_is_restored(project: Path, tree: Tree) -> None:
    before = (project / "src/calculator.py").read_text()
    with tree.planted(mutant()):
        assert (project / "src/calculator.py").read_text() == before
        assert tree.count(mutant()) == 0
    assert tree.count(mutant()) == 1


def test_a_list_with_a_doubled_name_or_an_idle_fault_is_refused(tmp_path: Path) -> None:
    entry = '[[mutant]]\nname = "x"\nfile = "f"\nold = "a"\nnew = "{new}"\ntest = "t"\n'
    path = tmp_path / "mutants.toml"
    path.write_text(entry.format(new="b"))
    assert [found.name for found in read_mutants(path)] == ["x"]
    path.write_text(entry.format(new="b") * 2)
    with pytest.raises(ValueError, match="used twice"):
        read_mutants(path)
    path.write_text(entry.format(new="a"))
    with pytest.raises(ValueError, match="change nothing"):
        read_mutants(path)


def test_a_fault_may_name_the_promises_that_it_breaks(tmp_path: Path) -> None:
    entry = '[[mutant]]\nname = "{name}"\nfile = "f"\nold = "a"\nnew = "b"\ntest = "t"\n'
    path = tmp_path / "mutants.toml"
    path.write_text(entry.format(name="x") + 'proves = ["R31", "I3"]\n' + entry.format(name="y"))
    assert [found.proves for found in read_mutants(path)] == [("R31", "I3"), ()]


def test_words_select_by_name_file_or_test() -> None:
    first, second = mutant(name="lost event"), mutant(name="swapped sign", test=BLIND)
    assert selected([first, second], []) == [first, second]
    assert selected([first, second], ["event"]) == [first]
    assert selected([first, second], ["test_blind"]) == [second]
