"""A server as users start it: `tinsmith serve` in a process of its own, on loopback and a free port."""

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import yaml

START_S = 120.0
STOP_S = 10.0  # what the server promises
_READY = re.compile(r"ready (http://\S+)")
_REPLICA = re.compile(r"ray::ServeReplica:[^:]*:(\w+)")


class ServerFailed(AssertionError):
    """The server ended, or took too long, before it was ready; the message holds its log."""


class ServerProcess:
    """A running server. `ServerProcess.start(config)` returns when requests are served."""

    def __init__(self, process: "subprocess.Popen[str]", directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.stdout_lines: list[str] = []
        self.url = ""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    def start(cls, config: Mapping[str, object], *, env: Mapping[str, str] | None = None, timeout_s: float = START_S) -> Self:
        """`config` is the tree of a configuration file; port 0 unless it names one. `env` is added to this process's environment."""
        directory = Path(tempfile.mkdtemp(prefix="tinsmith-server-"))
        path = directory / "server.yaml"
        path.write_text(yaml.safe_dump(_with_port(config)))
        with (directory / "stderr.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tinsmith.cli", "serve", str(path)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(env or {}),
            )
        server = cls(process, directory)
        server._await_ready(timeout_s)
        return server

    @property
    def log(self) -> str:
        """What it wrote to stderr so far, its workers' lines included."""
        return (self.directory / "stderr.log").read_text()

    @property
    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def pids(self, role: str) -> list[int]:
        """Process ids of the replicas of a role: gateway, trainer, sampler, janitor."""
        return [process.pid for process in self.descendants if _role_of(process) == role]

    def kill(self, role: str, index: int = 0) -> int:
        """SIGKILL one replica; answers its process id."""
        pid = sorted(self.pids(role))[index]
        os.kill(pid, signal.SIGKILL)
        return pid

    def stop(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM; answers the exit code. Raises TimeoutExpired after killing everything."""
        descendants = self.descendants if self.process.poll() is None else []
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for process in [psutil.Process(self.process.pid), *descendants]:
                if process.is_running():
                    process.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.stop()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.stdout_lines.append(line.rstrip("\n"))
            self._lines.put(line)
        self._lines.put(None)
        self.process.stdout.close()

    def _await_ready(self, timeout_s: float) -> None:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            line = None
        match = _READY.match(line or "")
        if match is None:
            code = self._code_after_failure()
            raise ServerFailed(f"no ready line (exit code {code}, first line {line!r}):\n{self.log[-8000:]}")
        self.url = match[1]

    def _code_after_failure(self) -> int:
        try:
            return self.stop()
        except subprocess.TimeoutExpired:
            return self.process.wait()


def fake_config(checkpoints: Path, redis_url: str, **sections: object) -> dict[str, object]:
    """Fake engines over Redis."""
    model = {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}
    return {"models": [model], "checkpoints": {"dir": str(checkpoints)}, "store": {"kind": "redis", "url": redis_url}, **sections}


def tinsmith(*arguments: str, timeout_s: float = 300.0) -> str:
    """Run a command line; answers its standard output."""
    done = subprocess.run([sys.executable, "-m", "tinsmith.cli", *arguments], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _with_port(config: Mapping[str, object]) -> dict[str, object]:
    gateway = config.get("gateway", {})
    assert isinstance(gateway, Mapping)
    return {**config, "gateway": {"port": 0, **gateway}}


def _role_of(process: psutil.Process) -> str | None:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return None
    match = _REPLICA.match(command[0]) if command else None
    return match[1] if match else None
