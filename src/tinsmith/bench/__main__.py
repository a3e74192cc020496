"""python -m tinsmith.bench CASE: run a case, print its table, write its figures as JSON. `tinsmith bench` comes here."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tinsmith.bench import wake
from tinsmith.bench.figures import as_json, table
from tinsmith.state.redis_process import RedisUnavailable


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the exit code: 0, or 1 where the case cannot be run here."""
    asked = _parser().parse_args(arguments)
    try:
        comparisons = wake.run(tuple(asked.waiters), asked.rounds)
    except RedisUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(table(comparisons))
    if asked.json is not None:
        asked.json.write_text(as_json(comparisons) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinsmith bench", description="Measure this machine: each case beside a floor without the product, interleaved."
    )
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    waking = cases.add_parser("wake", help="settle of a command -> answer of its long poll", description=wake.__doc__)
    waking.add_argument("--waiters", type=int, nargs="+", default=[1, 100, 2000], metavar="N", help="long polls that wait at once")
    waking.add_argument("--rounds", type=int, default=5, help="of each rival, interleaved")
    waking.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
