"""The command line: `tinsmith serve | check | version | fetch`. Parses, reports, sets exit codes; imports neither Ray nor PyTorch.

Exit codes: 0 success; 1 the server could not start or had to stop; 2 a fault in the command line or the configuration, each on a line of
stderr that ends with its remedy.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from tinsmith.config import ConfigError, ServerConfig, inherited_environment, load

try:
    from tinsmith.deployments.base_models import fetch
    from tinsmith.deployments.environment import serving_environment
    from tinsmith.deployments.preflight import faults_of, warnings_of
except ModuleNotFoundError as error:  # the base install holds the protocol alone
    sys.exit(f"tinsmith: {error.name} is not installed; install the server: pip install 'tinsmith[server]'")

EXIT_OK = 0
EXIT_USAGE = 2
_LAUNCHER = "tinsmith.launcher"
_FETCHABLE = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; answers its exit code."""
    asked = _parser().parse_args(arguments)
    try:
        return _COMMANDS[asked.command](asked)
    except ConfigError as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        return EXIT_USAGE


def _serve(asked: argparse.Namespace) -> int:
    """Replace this process by the launcher, in the environment that Ray must find when it is imported."""
    config = _load(asked)
    arguments = [sys.executable, "-m", _LAUNCHER, str(asked.config), *([] if asked.port is None else ["--port", str(asked.port)])]
    sys.stdout.flush()
    os.execve(sys.executable, arguments, serving_environment(config, inherited_environment()))  # noqa: S606 - own module, no shell


def _check(asked: argparse.Namespace) -> int:
    config = _load(asked)
    faults = faults_of(config)
    if faults:
        raise ConfigError(faults)
    for warning in warnings_of(config):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{asked.config}: ok")
    return EXIT_OK


def _version(_: argparse.Namespace) -> int:
    print(f"tinsmith {version('tinsmith')}")
    return EXIT_OK


def _fetch(asked: argparse.Namespace) -> int:
    info = fetch(_FETCHABLE[asked.model], asked.model)
    print(f"{info.name} {info.path}")
    return EXIT_OK


def _load(asked: argparse.Namespace) -> ServerConfig:
    return load(asked.config, overrides=None if asked.port is None else {"gateway.port": asked.port})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinsmith",
        description="Self-hosted training-as-a-service for LLMs.",
        epilog="exit codes: 0 success; 1 the server could not start or had to stop; 2 a fault in the command line or the configuration",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the server until SIGINT or SIGTERM",
        description="Run the server. Prints the one line 'ready http://HOST:PORT' on stdout when requests are served; logs go to stderr.",
    )
    check = commands.add_parser(
        "check",
        help="say whether a configuration can run here",
        description="Name every fault of a configuration on this machine with its remedy (exit code 2), and each port that will listen "
        "beyond loopback.",
    )
    for command in (serve, check):
        command.add_argument("config", type=Path, metavar="CONFIG.yaml")
        command.add_argument("--port", type=int, default=None, help="wins over gateway.port; 0 picks a free port")
    commands.add_parser("version", help="print the version", description="Print the version.")
    fetch_parser = commands.add_parser(
        "fetch",
        help="download and convert a base model into the cache",
        description="Download and convert a base model into the cache ($TINSMITH_CACHE, default ~/.cache/tinsmith), and put its tokenizer "
        "where clients on this machine look it up.",
    )
    fetch_parser.add_argument("model", choices=sorted(_FETCHABLE))
    return parser


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "serve": _serve,
    "check": _check,
    "version": _version,
    "fetch": _fetch,
}

if __name__ == "__main__":
    sys.exit(main())
