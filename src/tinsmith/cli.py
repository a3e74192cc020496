"""The command line: `tinsmith serve | check | version | fetch | bench | status | sessions | lanes | drain | keys | checkpoints |
conformance`.

Parses, reports, sets exit codes; imports neither Ray nor PyTorch.

Exit codes: 0 success; 1 the server could not start or had to stop, or one that is asked cannot be reached or refuses; 2 a fault in the
command line or the configuration. What went wrong is a line of stderr that ends with its remedy.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tinsmith.config import ConfigError, ServerConfig, cache_dir, inherited_environment, load, operator_key
from tinsmith.operations import OperationFailed, Operations
from tinsmith.protocol.envelopes import Answer
from tinsmith.protocol.native_answers import ProcessStatus, QueueStatus, SessionInfo
from tinsmith.tables import table

try:
    from tinsmith import checkpoint_commands, conformance_command, key_commands
    from tinsmith.deployments.base_models import fetch
    from tinsmith.deployments.environment import serving_environment
    from tinsmith.deployments.preflight import faults_of, machine_mib, warnings_of
    from tinsmith.deployments.sizing import Estimate, Share, estimate, memory_warning
except ModuleNotFoundError as error:  # the base install holds the protocol alone
    sys.exit(f"tinsmith: {error.name} is not installed; install the server: pip install 'tinsmith[server]'")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
DEFAULT_URL = "http://127.0.0.1:8700"
_LAUNCHER = "tinsmith.launcher"
_BENCH = "bench"
_FETCHABLE = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; answers its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [_BENCH]:
        return _bench(given[1:])
    asked = _parser().parse_args(given)
    try:
        return _COMMANDS[asked.command](asked)
    except ConfigError as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        return EXIT_USAGE
    except OperationFailed as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED


def _serve(asked: argparse.Namespace) -> int:
    """Replace this process by the launcher, in the environment that Ray must find when it is imported."""
    config = _load(asked)
    arguments = [sys.executable, "-m", _LAUNCHER, str(asked.config), *([] if asked.port is None else ["--port", str(asked.port)])]
    sys.stdout.flush()
    os.execve(sys.executable, arguments, serving_environment(config, inherited_environment()))  # noqa: S606 - own module, no shell


def _bench(arguments: Sequence[str]) -> int:
    """Replace this process by the benchmarks, which have a command line of their own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tinsmith.bench", *arguments])  # noqa: S606 - own module, no shell


def _check(asked: argparse.Namespace) -> int:
    config = _load(asked)
    faults = faults_of(config)
    if faults:
        raise ConfigError(faults)
    needed, machine = estimate(config, cache_dir()), machine_mib()
    too_much = memory_warning(config, needed, machine)
    for warning in [*warnings_of(config), *([] if too_much is None else [too_much])]:
        print(f"warning: {warning}", file=sys.stderr)
    print(_memory_table(needed, machine))
    print(f"{asked.config}: ok")
    return EXIT_OK


def _memory_table(needed: Estimate, machine: float) -> str:
    """Memory in MiB at its fullest."""
    rows = [_memory_row(share) for share in needed.shares]
    bound = "" if needed.is_whole else "at least "
    total = f"memory in MiB at its fullest: {bound}{needed.host_mib:.0f} of this machine's {machine:.0f}"
    return f"{table(('PROCESS', 'WHAT', 'COUNT', 'EACH', 'TOTAL', 'PLACE'), rows)}\n{total}"


def _memory_row(share: Share) -> tuple[str, str, int, str | int, str | int, str]:
    if share.each_mib is None or share.total_mib is None:
        return share.where, share.what, share.count, "unknown until fetched", "", share.place
    return share.where, share.what, share.count, round(share.each_mib), round(share.total_mib), share.place


def _status(asked: argparse.Namespace) -> int:
    with _operations(asked) as server:
        status = server.status()
    _show(asked, status, lambda: f"tinsmith {status.server_version}, store: {status.store}\n{_processes(status.processes)}")
    return EXIT_OK


def _lanes(asked: argparse.Namespace) -> int:
    with _operations(asked) as server:
        status = server.status()
    _show(asked, status, lambda: _queues(status.queues))
    return EXIT_OK


def _sessions(asked: argparse.Namespace) -> int:
    with _operations(asked) as server:
        sessions = server.sessions()
    _show(asked, sessions, lambda: _session_table(sessions.sessions))
    return EXIT_OK


def _drain(asked: argparse.Namespace) -> int:
    with _operations(asked) as server:
        if asked.process is not None:
            server.drain(asked.process)
            print(f"{asked.process} replaced")
            return EXIT_OK
        for process in server.drain_all():
            print(f"{process.role} {process.process_id} (pid {process.pid})", flush=True)
    print("every process was replaced")
    return EXIT_OK


def _operations(asked: argparse.Namespace) -> Operations:
    """Raises ConfigError for a key that no header can hold."""
    source, key = ("TINSMITH_API_KEY", operator_key()) if asked.api_key is None else ("--api-key", asked.api_key)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError([f"{source}: must be printable ASCII; pass the key as it was issued"])
    return Operations(asked.url, key)


def _show(asked: argparse.Namespace, answer: Answer, text: Callable[[], str]) -> None:
    print(answer.model_dump_json(indent=2) if asked.json else text())


def _processes(processes: Sequence[ProcessStatus]) -> str:
    heads = ("PROCESS", "ROLE", "BASE MODEL", "NODE", "PID", "STATE", "USED", "SLOTS")
    rows = [
        (
            process.process_id,
            process.role,
            process.base_model or "-",
            process.node[:12],
            process.pid,
            "draining" if process.is_draining else "healthy" if process.is_healthy else "unhealthy",
            process.num_used,
            process.num_slots if process.num_slots > 0 else "-",
        )
        for process in processes
    ]
    return table(heads, rows)


def _queues(queues: Sequence[QueueStatus]) -> str:
    heads = ("LANE", "ROLE", "BASE MODEL", "OWNER", "PENDING", "AGE S")
    return table(
        heads, [(queue.lane, queue.role, queue.base_model, queue.owner or "-", queue.num_pending, queue.age_s) for queue in queues]
    )


def _session_table(sessions: Sequence[SessionInfo]) -> str:
    heads = ("SESSION", "CREATED", "STATE", "NAME")
    return table(
        heads, [(session.session_id, _time(session.created_ms), _end(session), session.display_name or "-") for session in sessions]
    )


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


def _end(session: SessionInfo) -> str:
    return "open" if session.ended_ms is None else f"ended {_time(session.ended_ms)} ({session.end_reason or 'no reason given'})"


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
        epilog="exit codes: 0 success; 1 the server could not start or had to stop, or cannot be reached or refuses; 2 a fault in the "
        "command line or the configuration",
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
        description="Name every fault of a configuration on this machine with its remedy (exit code 2), each port that will listen beyond "
        "loopback, and the memory that it needs at its fullest.",
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
    commands.add_parser(_BENCH, help="measure this machine (has options of its own: tinsmith bench --help)", add_help=False)
    _add_operations(commands)
    key_commands.add_parsers(commands)
    checkpoint_commands.add_parsers(commands)
    conformance_command.add_parsers(commands)
    return parser


def _add_operations(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Commands that ask a running server."""
    shown = {
        "status": "show the server's processes, and how much of each is taken",
        "sessions": "show the sessions of the caller's tenant",
        "lanes": "show the lanes that have work, and how long it has waited",
    }
    asking = [commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.") for name, text in shown.items()]
    for parser in asking:
        parser.add_argument("--json", action="store_true", help="as the server says it")
    drain = commands.add_parser(
        "drain",
        help="replace processes without loss",
        description="Tell a process to take nothing more, finish, save what it holds and hand it back, and return when its deployment has "
        "started another in its place. --all does so with every process, one at a time: a rolling restart.",
    )
    which = drain.add_mutually_exclusive_group(required=True)
    which.add_argument("--process", metavar="ID", help="as `tinsmith status` shows it")
    which.add_argument("--all", action="store_true", help="samplers, then trainers, then gateways")
    for parser in (*asking, drain):
        parser.add_argument("--url", default=DEFAULT_URL, help=f"of the server; default {DEFAULT_URL}")
        parser.add_argument("--api-key", default=None, help="default: $TINSMITH_API_KEY")


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "serve": _serve,
    "check": _check,
    "version": _version,
    "fetch": _fetch,
    "status": _status,
    "sessions": _sessions,
    "lanes": _lanes,
    "drain": _drain,
    "keys": key_commands.run,
    "checkpoints": checkpoint_commands.run,
    "conformance": conformance_command.run,
}

if __name__ == "__main__":
    sys.exit(main())
