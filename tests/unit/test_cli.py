"""The command line: what it prints where, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from tinsmith import cli
from tinsmith.config import ConfigError
from tinsmith.operations import OperationFailed
from tinsmith.protocol.native_answers import ProcessStatus, QueueStatus, ServerStatus, SessionInfo, SessionList
from tinsmith.protocol.sessions import BaseModelInfo

INFO = BaseModelInfo(name="org/model", path="/models/m", max_context=100, vocab_size=50, eos_token_ids=(2,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(f"models: [{{name: org/model}}]\ngateway: {{port: 0}}\ncheckpoints: {{dir: {tmp_path / 'checkpoints'}}}\n")
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == "tinsmith 0.1.0\n"


def test_check_accepts_and_warns(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(path)]) == 0
    captured = capsys.readouterr()
    *memory, total, last = captured.out.splitlines()
    assert last == f"{path}: ok"
    assert memory[0].split() == ["PROCESS", "WHAT", "COUNT", "EACH", "TOTAL", "PLACE"]
    assert [line.split() for line in memory if "unknown until fetched" in line]
    assert re.fullmatch(r"memory in MiB at its fullest: at least \d+ of this machine's \d+", total)
    assert all(line.startswith("warning: ") for line in captured.err.splitlines())
    assert "firewall" in captured.err


def test_check_warns_where_the_memory_does_not_suffice(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "machine_mib", lambda: 512.0)
    assert cli.main(["check", str(path)]) == 0
    assert "warning: memory: at its fullest this configuration needs 2." in capsys.readouterr().err


def test_check_names_every_fault_and_exits_with_2(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("models: [{name: 'a b'}]\ngateway: {port: -1, host: 10.0.0.1}\n")
    assert cli.main(["check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(":")[0] for line in captured.err.splitlines()] == ["models.0.name", "gateway.host", "gateway.port"]


def test_check_names_faults_of_this_machine(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(f"models: [{{name: org/model, source: {path.parent}/none}}]\ngateway: {{port: 0}}\ncheckpoints: {{dir: {path}}}\n")
    assert cli.main(["check", str(path)]) == 2
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["checkpoints.dir", "models.0.source"]


def test_a_port_on_the_command_line_wins(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(path), "--port", "70000"]) == 2
    assert "gateway.port: 70000 is too large" in capsys.readouterr().err


def test_serve_becomes_the_launcher_in_its_environment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str], Mapping[str, str]]] = []

    class Replaced(BaseException):
        pass

    def execve(program: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        seen.append((program, arguments, environment))
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("TINSMITH_CACHE", "/cache")
    for arguments in ([], ["--port", "0"]):
        with pytest.raises(Replaced):
            cli.main(["serve", str(path), *arguments])
    assert [arguments for _, arguments, _ in seen] == [
        [sys.executable, "-m", "tinsmith.launcher", str(path)],
        [sys.executable, "-m", "tinsmith.launcher", str(path), "--port", "0"],
    ]
    assert seen[0][2]["RAY_AUTH_MODE"] == "token"
    assert seen[0][2]["TINSMITH_CACHE"] == "/cache"


def test_bench_becomes_the_benchmarks_with_the_options_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(BaseException):
        pass

    def execv(program: str, arguments: list[str]) -> None:
        assert (program, arguments) == (sys.executable, [sys.executable, "-m", "tinsmith.bench", "--help", "wake"])
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Replaced):
        cli.main(["bench", "--help", "wake"])


def test_serve_reports_a_faulty_file_without_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path / "none.yaml")]) == 2
    assert "name an existing file" in capsys.readouterr().err


def test_fetch_prints_name_and_place(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str]] = []

    def fetch(name: str, source: str) -> BaseModelInfo:
        asked.append((name, source))
        return INFO

    monkeypatch.setattr(cli, "fetch", fetch)
    assert cli.main(["fetch", "smollm2"]) == 0
    assert asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2")]
    assert capsys.readouterr().out == "org/model /models/m\n"


def test_fetch_reports_a_source_that_is_away(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> BaseModelInfo:
        raise ConfigError(["source: away; try again"])

    monkeypatch.setattr(cli, "fetch", refuse)
    assert cli.main(["fetch", "smollm2"]) == 2
    assert capsys.readouterr().err == "source: away; try again\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["serve"], ["fetch", "everything"], ["check", "x", "--port", "many"], ["drain"], ["drain", "--all", "--process", "x"]],
)
def test_a_fault_in_the_command_line_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_help_documents_the_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(
        word in text for word in ("serve", "check", "version", "fetch", "status", "sessions", "lanes", "drain", "exit codes", "SIGTERM")
    )


PROCESS = ProcessStatus(
    process_id="t1", role="trainer", base_model="m", node="n" * 56, pid=7, is_healthy=True, is_draining=False, num_used=1, num_slots=4
)
GATEWAY = PROCESS.model_copy(update={"process_id": "g1", "role": "gateway", "base_model": None, "is_healthy": False, "num_slots": 0})
QUEUE = QueueStatus(lane="s:train:0", base_model="m", role="trainer", owner=None, num_pending=3, age_s=1.5)


class StubServer:
    """Operations of a server that is not there."""

    asked: ClassVar[list[tuple[str, str | None]]] = []
    drained: ClassVar[list[str]] = []

    def __init__(self, url: str, api_key: str | None) -> None:
        self.asked.append((url, api_key))

    def __enter__(self) -> "StubServer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> ServerStatus:
        leaving = PROCESS.model_copy(update={"process_id": "t2", "is_draining": True})
        return ServerStatus(server_version="0.1.0", store="redis", processes=(PROCESS, leaving, GATEWAY), queues=(QUEUE,))

    def sessions(self) -> SessionList:
        ended = SessionInfo(session_id="b", created_ms=0, ended_ms=1000, end_reason="success", display_name="mine")
        return SessionList(sessions=(SessionInfo(session_id="a", created_ms=0), ended))

    def drain(self, process_id: str) -> None:
        if process_id == "none":
            raise OperationFailed("--process: 'none' is not there; look")
        self.drained.append(process_id)

    def drain_all(self) -> Iterator[ProcessStatus]:
        for process in (PROCESS, GATEWAY):
            yield process
            self.drained.append(process.process_id)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubServer]:
    monkeypatch.setattr(cli, "Operations", StubServer)
    monkeypatch.delenv("TINSMITH_API_KEY", raising=False)
    StubServer.asked.clear()
    StubServer.drained.clear()
    return StubServer


def test_status_shows_every_process(stub: type[StubServer], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["tinsmith", "0.1.0,", "store:", "redis"],
        ["PROCESS", "ROLE", "BASE", "MODEL", "NODE", "PID", "STATE", "USED", "SLOTS"],
        ["t1", "trainer", "m", "n" * 12, "7", "healthy", "1", "4"],
        ["t2", "trainer", "m", "n" * 12, "7", "draining", "1", "4"],
        ["g1", "gateway", "-", "n" * 12, "7", "unhealthy", "1", "-"],
    ]
    assert stub.asked == [("http://127.0.0.1:8700", None)]


def test_lanes_and_sessions_are_tables(stub: type[StubServer], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lanes", "--url", "http://h:1"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1:] == [["s:train:0", "trainer", "m", "-", "3", "1.5"]]
    assert cli.main(["sessions"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1:] == [
        ["a", "1970-01-01T00:00:00+00:00", "open", "-"],
        ["b", "1970-01-01T00:00:00+00:00", "ended", "1970-01-01T00:00:01+00:00", "(success)", "mine"],
    ]
    assert [url for url, _ in stub.asked] == ["http://h:1", "http://127.0.0.1:8700"]


@pytest.mark.parametrize(("command", "key"), [("status", "processes"), ("lanes", "queues"), ("sessions", "sessions")])
def test_what_is_shown_can_be_had_as_the_server_says_it(
    command: str, key: str, stub: type[StubServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--json"]) == 0
    assert key in json.loads(capsys.readouterr().out)


def test_drain_replaces_one_process_or_all(stub: type[StubServer], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "--process", "t1"]) == 0
    assert capsys.readouterr().out == "t1 replaced\n"
    assert cli.main(["drain", "--all"]) == 0
    assert capsys.readouterr().out == "trainer t1 (pid 7)\ngateway g1 (pid 7)\nevery process was replaced\n"
    assert stub.drained == ["t1", "t1", "g1"]


def test_a_key_comes_from_the_command_line_or_the_environment(stub: type[StubServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_API_KEY", "from the environment")
    cli.main(["status"])
    cli.main(["status", "--api-key", "given"])
    assert [key for _, key in stub.asked] == ["from the environment", "given"]


@pytest.mark.parametrize("key", ["clé", "a\nb", "\udcff"])
def test_a_key_that_no_header_can_hold_is_a_fault_of_one_line(
    key: str, stub: type[StubServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["status", "--api-key", key]) == 2
    assert capsys.readouterr().err == "--api-key: must be printable ASCII; pass the key as it was issued\n"
    monkeypatch.setattr(cli, "operator_key", lambda: key)
    assert cli.main(["drain", "--all"]) == 2
    assert capsys.readouterr().err == "TINSMITH_API_KEY: must be printable ASCII; pass the key as it was issued\n"
    assert stub.asked == []


def test_a_server_that_refuses_exits_with_1(stub: type[StubServer], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "--process", "none"]) == 1
    assert capsys.readouterr().err == "--process: 'none' is not there; look\n"


def test_a_server_that_is_not_there_exits_with_1_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("http://127.0.0.1:1 cannot be reached")
    assert line.endswith("start the server, or name its address with --url")


def test_the_command_line_imports_neither_ray_nor_pytorch() -> None:
    code = "import sys, tinsmith.cli; print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_without_the_server_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['redis'] = None; import tinsmith.cli"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.startswith("tinsmith: redis")
    assert answer.stderr.endswith("pip install 'tinsmith[server]'\n")
