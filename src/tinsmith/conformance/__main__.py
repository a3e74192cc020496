"""Runs the list with the SDK of this environment and prints a verdict a line, as JSON.

The server is one that runs at --base-url, or one that --serve starts and this process stops.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager

from tinsmith.conformance import runner
from tinsmith.conformance.items import Target
from tinsmith.conformance.local import LocalServer
from tinsmith.conformance.raw import first_model

VOCAB_SIZE = 1_000  # token ids below it are known to any model that is trained on text


def main() -> None:
    given = _parser().parse_args()
    items = [held for held in runner.ITEMS if not given.only or held.number in given.only]
    with _server(given.serve) as server:
        url = given.base_url if server is None else server.url
        model = first_model(url, given.api_key) if given.model is None else given.model
        target = Target(url, given.api_key, model, given.vocab_size, given.revoked_key, server, given.session_timeout_s)
        for verdict in runner.run(target, items):
            print(verdict.to_json(), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tinsmith.conformance", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url")
    where.add_argument("--serve", type=json.loads, help="words of a command that prints `ready URL`, as a JSON list")
    parser.add_argument("--api-key", default="tml-conformance")
    parser.add_argument("--revoked-key", help="one that is no longer accepted, for item 22")
    parser.add_argument("--model", help="a base model; default: the first that can be trained and sampled")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="bound of the token ids that are sent")
    parser.add_argument("--session-timeout-s", type=float, help="silence after which the started server ends a session, for item 19")
    parser.add_argument("--only", nargs="*", help="numbers of items")
    return parser


@contextmanager
def _server(command: list[str] | None) -> Iterator[LocalServer | None]:
    """Raises ServerFailed."""
    if command is None:
        yield None
        return
    server = LocalServer(command)
    try:
        server.start()
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    main()
