"""Plants one fault at a time into a copy of the tree and runs the one test that must notice it.

Knows nothing of what the faults mean: `mutants.toml` lists them. The working tree is never touched: pytest runs in a copy in a temporary
directory, with the copy's src first on the path, and the planted file is restored after each run. Each run is a process of its own, forked
from a server that has imported what is large and not ours, which makes it a matter of a second.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "configs", "cookbook", "deploy", "docs", "pyproject.toml")
PRELOADED = ("pytest", "redis.asyncio", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
TEST_TIMEOUT_S = 60  # of one test: a fault that hangs it is noticed too
RUN_TIMEOUT_S = 600  # of all named tests together on the sound tree
PASSED, FAILED = 0, 1  # exit codes of pytest; every other one is an error of the run


class Verdict(StrEnum):
    """KILLED is the good one; every other verdict fails the run."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"  # the named test passes in spite of the fault
    STALE = "STALE"  # the old text does not occur exactly once
    UNSOUND = "UNSOUND"  # the named test does not pass without the fault
    BROKEN = "BROKEN"  # the test could not be run: no such test, or the planted text is no Python


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file`, `old` becomes `new`; `test` is the pytest id that must then fail.

    proves: the promises that the fault breaks, where they are not simply all that the test is marked with.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    proves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    mutant: Mutant
    verdict: Verdict
    seconds: float

    @property
    def row(self) -> str:
        return f"{self.verdict:<9} {self.seconds:5.1f} s  {self.mutant.name:<58.58}  {self.mutant.test}"


class Tree:
    """A disposable copy of the working tree."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._processes = multiprocessing.get_context("forkserver")

    @classmethod
    @contextmanager
    def copied_from(cls, root: Path) -> Iterator[Self]:
        with tempfile.TemporaryDirectory(prefix="tinsmith-mutants-") as scratch:
            for name in COPIED:
                _copy(root / name, Path(scratch) / name)
            yield cls(Path(scratch))

    def preload(self, modules: Sequence[str]) -> None:
        """Import these once, before the first run; no module of the tree itself."""
        self._processes.set_forkserver_preload(list(modules))

    def count(self, mutant: Mutant) -> int:
        """How often the old text occurs."""
        path = self._root / mutant.file
        return path.read_text().count(mutant.old) if path.is_file() else 0

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        path = self._root / mutant.file
        sound = path.read_text()
        path.write_text(sound.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            path.write_text(sound)

    def test(self, *ids: str) -> int:
        """Run tests in the copy; answers pytest's exit code. A run without end counts as failed."""
        process = self._processes.Process(target=_run_pytest, args=(self._root, ids))
        process.start()
        process.join(RUN_TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return FAILED
        return process.exitcode


def read_mutants(path: Path) -> list[Mutant]:
    """Raises ValueError for a name that is used twice, or a fault that changes nothing."""
    entries = tomllib.loads(path.read_text())["mutant"]
    mutants = [Mutant(**entry | {"proves": tuple(entry.get("proves", ()))}) for entry in entries]
    names = [mutant.name for mutant in mutants]
    doubled = {name for name in names if names.count(name) > 1}
    idle = {mutant.name for mutant in mutants if mutant.old == mutant.new or not mutant.old}
    if doubled or idle:
        raise ValueError(f"{path.name}: names used twice {sorted(doubled)}, faults that change nothing {sorted(idle)}")
    return mutants


def selected(mutants: Sequence[Mutant], words: Sequence[str]) -> list[Mutant]:
    """Those whose name, file or test contains one of the words; all without words."""
    return [m for m in mutants if not words or any(word in f"{m.name} {m.file} {m.test}" for word in words)]


def run(tree: Tree, mutants: Sequence[Mutant], show: Callable[[Trial], None]) -> list[Trial]:
    """Try each mutant; `show` sees every trial as it ends."""
    sound = _sound_tests(tree, sorted({mutant.test for mutant in mutants}))
    trials = []
    for mutant in mutants:
        start = time.monotonic()
        verdict = _try(tree, mutant, mutant.test in sound)
        trials.append(Trial(mutant, verdict, time.monotonic() - start))
        show(trials[-1])
    return trials


def summary(trials: Sequence[Trial]) -> str:
    counts = {verdict: sum(trial.verdict is verdict for trial in trials) for verdict in Verdict}
    told = ", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items() if count or verdict is Verdict.KILLED)
    return f"{len(trials)} mutants: {told} in {sum(trial.seconds for trial in trials):.0f} s"


def _sound_tests(tree: Tree, tests: Sequence[str]) -> set[str]:
    """The tests that pass on the unchanged tree: one run for all where all pass, else one by one."""
    if not tests or tree.test(*tests) == PASSED:
        return set(tests)
    return {test for test in tests if tree.test(test) == PASSED}


def _try(tree: Tree, mutant: Mutant, is_sound: bool) -> Verdict:
    if tree.count(mutant) != 1:
        return Verdict.STALE
    if not is_sound:
        return Verdict.UNSOUND
    with tree.planted(mutant):
        code = tree.test(mutant.test)
    return {PASSED: Verdict.SURVIVED, FAILED: Verdict.KILLED}.get(code, Verdict.BROKEN)


def _run_pytest(root: Path, ids: Sequence[str]) -> None:
    """In the forked process: see the copy and nothing of the working tree, say nothing, exit with pytest's code."""
    os.chdir(root)
    sys.path.insert(0, str(root / "src"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.environ |= {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    options = ["--quiet", "--exitfirst", f"--timeout={TEST_TIMEOUT_S}", "--hypothesis-seed=0", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was imported before the fork
    sys.dont_write_bytecode = True  # a planted file may have the age and the size of the sound one
    sys.exit(pytest.main([*options, *ids]))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    elif source.is_file():
        shutil.copy2(source, target)
