"""The command around the list: what it starts, what it prints, how it ends."""

import json
from pathlib import Path

import pytest

from tinsmith import cli, config, conformance_command
from tinsmith.config import ConfigError
from tinsmith.conformance.verdicts import Verdict

PASSED = Verdict("1", "sessions", "passed")
FAILED = Verdict("14a", "too many", "failed", "3 s: expected, 1 s: got")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What runs in place of Python: it writes its words down, prints `verdicts` and ends with the code that `code` holds."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\ncat {tmp_path}/verdicts\nexit $(cat {tmp_path}/code)\n')
    script.chmod(0o755)
    (tmp_path / "code").write_text("0")
    monkeypatch.setattr(conformance_command.sys, "executable", str(script))
    return tmp_path


def prepare(program: Path, *verdicts: Verdict) -> None:
    (program / "verdicts").write_text("".join(f"{verdict.to_json()}\n" for verdict in verdicts))


def test_a_table_of_what_came(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(program, PASSED, FAILED)
    assert cli.main(["conformance", "--base-url", "http://h:1", "--api-key", "tml-k", "--model", "m", "--only", "1", "14a"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ITEM", "WHAT", "OUTCOME", "DETAIL"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "14a"]
    assert FAILED.detail in lines[2]
    words = " ".join((program / "words").read_text().split())
    assert words.endswith("-m tinsmith.conformance --base-url http://h:1 --api-key tml-k --model m --only 1 14a")


def test_verdicts_as_lines_of_json(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(program, PASSED)
    assert cli.main(["conformance", "--base-url", "http://h:1", "--json"]) == 0
    assert capsys.readouterr().out == f"{PASSED.to_json()}\n"


def test_a_run_that_breaks_off_is_told_with_its_last_words(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(program, PASSED)
    (program / "code").write_text("3")
    assert cli.main(["conformance", "--base-url", "http://h:1"]) == 1
    assert "ended with exit code 3" in capsys.readouterr().err


def test_numbers_that_name_no_item(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(program)
    assert cli.main(["conformance", "--base-url", "http://h:1", "--only", "99"]) == 1
    assert "--only: names no item" in capsys.readouterr().err


def test_an_sdk_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(conformance_command, "find_spec", lambda name: None if name == "tinker" else object())
    assert cli.main(["conformance", "--base-url", "http://h:1"]) == 1
    assert "tinker: not installed; pip install 'tinsmith[conformance]'" in capsys.readouterr().err


def test_the_server_of_the_list_has_keys_a_port_and_a_place_of_its_own(tmp_path: Path) -> None:
    given = config.validate({"models": [{"name": "m"}], "gateway": {"max_chunk_len": 7}, "checkpoints": {"dir": "/elsewhere"}})
    made = config.validate(conformance_command.changed(given, tmp_path, 1234))
    assert (made.auth.mode, made.auth.keys_file) == ("keys", tmp_path / "keys.json")
    assert (made.gateway.host, made.gateway.port, made.gateway.max_chunk_len) == ("127.0.0.1", 1234, 7)
    assert made.checkpoints.dir == tmp_path / "checkpoints"
    assert made.execution.session_timeout_s == conformance_command.SESSION_TIMEOUT_S


def test_a_durable_store_keeps_its_keys_and_checkpoints(tmp_path: Path) -> None:
    given = config.validate({"models": [{"name": "m"}], "store": {"kind": "redis"}, "checkpoints": {"dir": str(tmp_path / "kept")}})
    made = config.validate(conformance_command.changed(given, tmp_path, 1234))
    assert (made.auth.mode, made.auth.keys_file) == ("keys", None)
    assert made.checkpoints.dir == tmp_path / "kept"


def test_a_server_of_tls_is_refused(tmp_path: Path) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).touch()
    given = config.validate({"models": [{"name": "m"}], "gateway": {"tls_cert": str(tmp_path / "cert"), "tls_key": str(tmp_path / "key")}})
    with pytest.raises(ConfigError) as refused:
        conformance_command.changed(given, tmp_path, 1234)
    assert "gateway.tls_cert" in refused.value.faults[0]


def test_json_of_the_words_for_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys are made and revoked by our own commands, and both are ended when the run is."""
    calls: list[tuple[str, ...]] = []

    def tinsmith(*words: str) -> str:
        calls.append(words[:2])
        return f"tml-{len(calls)}"

    monkeypatch.setattr(conformance_command, "_tinsmith", tinsmith)
    with conformance_command._local(config.validate({"models": [{"name": "m"}]})) as words:
        assert calls == [("keys", "add"), ("keys", "add"), ("keys", "revoke")]
        assert words[0] == "--serve"
        assert json.loads(words[1])[1:4] == ["-m", "tinsmith.cli", "serve"]
        assert words[2:6] == ["--api-key", "tml-1", "--revoked-key", "tml-2"]
    assert calls[3:] == [("keys", "revoke")]
