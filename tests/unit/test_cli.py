"""The command line: what it prints where, and its exit codes."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tinsmith import cli
from tinsmith.config import ConfigError
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
    assert captured.out == f"{path}: ok\n"
    assert all(line.startswith("warning: ") for line in captured.err.splitlines())
    assert "firewall" in captured.err


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


@pytest.mark.parametrize("arguments", [[], ["fly"], ["serve"], ["fetch", "everything"], ["check", "x", "--port", "many"]])
def test_a_fault_in_the_command_line_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_help_documents_the_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("serve", "check", "version", "fetch", "exit codes", "SIGTERM"))


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
