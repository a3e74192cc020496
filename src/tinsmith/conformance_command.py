"""`tinsmith conformance`: the compatibility list against any server of the Tinker wire, as a table.

The list runs in a process of its own, since the SDK changes the process that it is imported into. With --local it is given a server of a
configuration, changed so that every item can run: keys, a free port, sessions that end soon.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import yaml

from tinsmith.config import ConfigError, ServerConfig, load
from tinsmith.conformance.verdicts import Verdict
from tinsmith.operations import OperationFailed
from tinsmith.tables import table

TENANT = "conformance"
SESSION_TIMEOUT_S = 25.0  # two beats of a client may be missed, and an item that waits for an end waits no longer than it must
_HEADS = ("ITEM", "WHAT", "OUTCOME", "DETAIL")
_NEEDED = ("tinker", "h11", "httpx")


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "conformance",
        help="run the compatibility list against a server of the Tinker wire",
        description="Run the compatibility list of docs/conformance.md with the installed SDK, faults included, and print a table. Exit "
        "code 1 where an item failed. The list trains small adapters and saves checkpoints under the given key.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="of a running server")
    where.add_argument(
        "--local",
        type=Path,
        metavar="CONFIG.yaml",
        help="start a server of this configuration, with keys, on a free port, so that no item lacks the server's process or keys",
    )
    parser.add_argument("--api-key", default="tml-conformance", help="of --base-url; default: one that open servers take")
    parser.add_argument("--revoked-key", default=None, help="one that --base-url no longer takes, for item 22b")
    parser.add_argument("--model", default=None, help="a base model; default: the first that can be trained and sampled")
    parser.add_argument("--vocab-size", type=int, default=None, help="bound of the token ids that are sent; default: 1,000")
    parser.add_argument("--only", nargs="+", default=(), metavar="N", help="numbers of items")
    parser.add_argument("--json", action="store_true", help="a verdict a line, in place of the table")


def run(asked: argparse.Namespace) -> int:
    """1 where an item failed. Raises ConfigError, OperationFailed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise OperationFailed(f"{', '.join(missing)}: not installed; pip install 'tinsmith[conformance]'")
    if asked.local is None:
        verdicts = _run(asked, ["--base-url", asked.base_url, "--api-key", asked.api_key, *_option("--revoked-key", asked.revoked_key)])
    else:
        with _local(load(asked.local)) as words:
            verdicts = _run(asked, words)
    if not asked.json:
        print(table(_HEADS, [(verdict.number, verdict.title, verdict.outcome, verdict.detail) for verdict in verdicts]))
    return int(any(verdict.outcome == "failed" for verdict in verdicts))


def _run(asked: argparse.Namespace, where: Sequence[str]) -> list[Verdict]:
    """Raises OperationFailed where the run ends before its last item."""
    words = [sys.executable, "-W", "ignore", "-m", "tinsmith.conformance", *where, *_option("--model", asked.model)]
    words += [*_option("--vocab-size", asked.vocab_size), *(["--only", *asked.only] if asked.only else [])]
    verdicts = []
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as process:  # noqa: S603 (own module)
        for line in process.stdout or ():
            verdicts.append(Verdict.from_json(line))
            print(line.strip() if asked.json else f"{verdicts[-1].number:4} {verdicts[-1].outcome}", file=_progress(asked), flush=True)
        if process.wait() != 0:
            log.seek(0)
            raise OperationFailed(f"the list ended with exit code {process.returncode}:\n{log.read()[-3000:]}")
    if not verdicts:
        raise OperationFailed("--only: names no item; see docs/conformance.md")
    return verdicts


def _progress(asked: argparse.Namespace) -> TextIO:
    return sys.stdout if asked.json else sys.stderr


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]


@contextmanager
def _local(config: ServerConfig) -> Iterator[list[str]]:
    """Where the list finds its server: how to start it, and the keys of it. Raises OperationFailed."""
    with tempfile.TemporaryDirectory(prefix="tinsmith-conformance-") as directory:
        path = Path(directory) / "server.yaml"
        path.write_text(yaml.safe_dump(changed(config, Path(directory), _free_port())))
        key, revoked = (_tinsmith("keys", "add", "--tenant", TENANT, str(path)) for _ in range(2))
        _tinsmith("keys", "revoke", revoked, str(path))
        serve = [sys.executable, "-m", "tinsmith.cli", "serve", str(path)]
        words = ["--serve", json.dumps(serve), "--api-key", key, "--revoked-key", revoked]
        try:
            yield [*words, "--session-timeout-s", str(SESSION_TIMEOUT_S)]
        finally:
            _tinsmith("keys", "revoke", key, str(path))


def changed(config: ServerConfig, directory: Path, port: int) -> dict[str, dict[str, object]]:
    """The configuration of a server for the list. What a memory store forgets, checkpoints and keys, lies in `directory`.

    Raises ConfigError where the server could not be reached as the list must reach it.
    """
    if config.gateway.tls_cert is not None:
        raise ConfigError(["gateway.tls_cert: the list's proxy speaks no TLS; remove it from the configuration that --local names"])
    tree: dict[str, dict[str, object]] = config.model_dump(mode="json", exclude_unset=True)
    keeps_nothing = config.store.kind == "memory"
    own_keys = {"keys_file": str(directory / "keys.json")} if keeps_nothing and config.auth.keys_file is None else {}
    return tree | {
        "auth": tree.get("auth", {}) | {"mode": "keys"} | own_keys,
        "gateway": tree.get("gateway", {}) | {"host": "127.0.0.1", "port": port},
        "execution": tree.get("execution", {}) | {"session_timeout_s": SESSION_TIMEOUT_S},
        "checkpoints": tree.get("checkpoints", {}) | ({"dir": str(directory / "checkpoints")} if keeps_nothing else {}),
    }


def _free_port() -> int:
    """The same one must serve before and after a restart, so the server cannot pick it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _tinsmith(*words: str) -> str:
    """Standard output of one of our commands. Raises OperationFailed."""
    done = subprocess.run([sys.executable, "-m", "tinsmith.cli", *words], capture_output=True, text=True, check=False)  # noqa: S603 (own module)
    if done.returncode != 0:
        raise OperationFailed(f"tinsmith {words[0]} {words[1]}: {done.stderr.strip()}")
    return done.stdout.strip()
