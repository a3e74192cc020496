"""python -m tests.mutants [WORD ...]: run the listed mutants, or those whose name or file contains a word. Exit 1 unless all die."""

import sys
from pathlib import Path

from tests.mutants.harness import PRELOADED, ROOT, Tree, Verdict, read_mutants, run, selected, summary

MUTANTS = Path(__file__).parent / "mutants.toml"


def main(words: list[str]) -> int:
    mutants = selected(read_mutants(MUTANTS), words)
    with Tree.copied_from(ROOT) as tree:
        tree.preload(PRELOADED)
        trials = run(tree, mutants, show=lambda trial: print(trial.row, flush=True))
    print(summary(trials))
    return 0 if trials and all(trial.verdict is Verdict.KILLED for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
