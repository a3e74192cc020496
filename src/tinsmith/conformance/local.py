"""A server that the run starts itself, from a command: so it can be stopped and started again, and its log be read.

Knows of the server that it prints `ready URL` when it serves, that SIGTERM stops it, and that its log is its stderr.
"""

import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

START_S = 180.0
STOP_S = 60.0
_READY = re.compile(r"ready (http\S+)")


class ServerFailed(Exception):
    """It ended before it was ready, or took too long; the message holds the end of its log."""


class LocalServer:
    """Runs while `start` was called more often than `stop`. `command`: words; its port must be the same at each start."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._log = Path(tempfile.mkdtemp(prefix="conformance-server-")) / "stderr.log"
        self.url = ""

    @property
    def log(self) -> str:
        """What all its starts wrote."""
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Returns when requests are served. Raises ServerFailed."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)  # noqa: S603 (the caller's own words)
        watch = threading.Timer(START_S, self._process.kill)
        watch.start()
        try:
            line = "" if self._process.stdout is None else self._process.stdout.readline()
        finally:
            watch.cancel()
        found = _READY.match(line)
        if found is None:
            self.stop()
            raise ServerFailed(f"the server printed {line!r} in place of `ready URL`:\n{self.log[-4000:]}")
        self.url = found[1]

    def stop(self) -> None:
        """With SIGTERM, and SIGKILL where that is not enough."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def restart(self) -> None:
        """Raises ServerFailed."""
        self.stop()
        self.start()

    def num_descriptors(self) -> int:
        """Open files of the server and all processes below it. Raises OSError where there is no /proc."""
        return 0 if self._process is None else sum(_num_descriptors(pid) for pid in _tree(self._process.pid))


def _num_descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (FileNotFoundError, PermissionError):
        return 0  # it has just ended, or is a zombie


def _tree(root: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a process, in parentheses, may hold anything.
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
