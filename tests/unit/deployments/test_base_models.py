"""Facts about models, from a process that stands in for the resolving one."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tinsmith.config import ConfigError, ModelConfig
from tinsmith.deployments import base_models, resolving
from tinsmith.deployments.base_models import ServedModel, device_of, fetch, resolve_models, weightless
from tinsmith.engines.models import ModelSourceError
from tinsmith.protocol.sessions import BaseModelInfo

INFO = BaseModelInfo(name="org/model", path="/models/m", max_context=100, vocab_size=50, eos_token_ids=(2,))
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of the processes that were asked for; each answers INFO in bf16, after a line of chatter."""
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        seen.append(command)
        return subprocess.CompletedProcess(command, 0, "chatter\n" + ServedModel(info=INFO, dtype="bf16").model_dump_json() + "\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def failing(monkeypatch: pytest.MonkeyPatch, code: int, stderr: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code, "", stderr))


def test_each_model_is_resolved_in_a_process(commands: list[list[str]]) -> None:
    found = resolve_models([ModelConfig(name="org/model", source="/models/m", dtype="bf16"), ModelConfig(name="org/other")])
    assert found["org/model"] == ServedModel(info=INFO, dtype="bf16")
    assert {tuple(command[3:]) for command in commands} == {
        ("--source", "/models/m", "--dtype", "bf16", "--device", "cpu", "--", "org/model"),
        ("--dtype", "auto", "--device", "cpu", "--", "org/other"),
    }
    assert all(command[:3] == [sys.executable, "-m", "tinsmith.deployments.resolving"] for command in commands)


def test_fake_engines_need_no_process_and_no_files(commands: list[list[str]]) -> None:
    fake = {"engine": "fake"}
    found = resolve_models([ModelConfig.model_validate({"name": "org/model", "trainer": fake, "sampler": fake})])
    assert found == {"org/model": weightless("org/model")}
    assert (found["org/model"].info.vocab_size, found["org/model"].info.path) == (49152, "")
    assert commands == []


def test_a_context_limit_can_be_lowered_and_not_raised(commands: list[list[str]]) -> None:
    assert resolve_models([ModelConfig(name="org/model", max_context=60)])["org/model"].info.max_context == 60
    with pytest.raises(ConfigError) as caught:
        resolve_models([ModelConfig(name="org/model", max_context=101)])
    assert caught.value.faults == ["models.0.max_context: 101 is above the model's own limit; use 100 or less"]


def test_every_model_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, base_models.EXIT_NO_SOURCE, "Traceback\nm: not to be had; name another\n")
    with pytest.raises(ConfigError) as caught:
        resolve_models([ModelConfig(name="a"), ModelConfig(name="b")])
    assert caught.value.faults == [f"models.{index}.source: m: not to be had; name another" for index in (0, 1)]


def test_a_resolving_process_that_dies_is_a_fault_too(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, -9, "")
    with pytest.raises(ConfigError, match=r"models\.0\.source: reading a failed \(no message\); mend the model"):
        resolve_models([ModelConfig(name="a")])


def test_fetching_resolves_and_no_more(commands: list[list[str]]) -> None:
    assert fetch("org/model", "smollm2") == INFO
    assert commands[0][3:] == ["--source", "smollm2", "--", "org/model"]


def test_a_gpu_is_used_only_where_one_is_asked_for() -> None:
    assert [device_of(0), device_of(0.5)] == ["cpu", "cuda"]


def test_the_resolving_process_prints_the_facts_and_fills_the_clients_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled: list[BaseModelInfo] = []
    monkeypatch.setattr(resolving, "resolve", lambda source, name, cache: INFO.model_copy(update={"name": f"{source}:{name}"}))
    monkeypatch.setattr(resolving, "fill_hub_cache", filled.append)
    monkeypatch.setattr(resolving, "fastest_dtype", lambda device: {"cpu": "bf16"}[device])
    assert resolving.main(["--source", "s", "--dtype", "auto", "--", "org/model"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["dtype"], printed["info"]["name"]) == ("bf16", "s:org/model")
    assert [info.name for info in filled] == ["s:org/model"], "clients on this machine find the tokenizer"
    assert resolving.main(["--", "org/model"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "fp32"


def test_the_resolving_process_names_what_cannot_be_had(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> BaseModelInfo:
        raise ModelSourceError("m: not there; name another")

    monkeypatch.setattr(resolving, "resolve", refuse)
    assert resolving.main(["org/model"]) == base_models.EXIT_NO_SOURCE
    assert capsys.readouterr().err == "m: not there; name another\n"


def test_a_hub_cache_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: BaseModelInfo) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(resolving, "resolve", lambda *_: INFO)
    monkeypatch.setattr(resolving, "fill_hub_cache", refuse)
    assert resolving.main(["org/model"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(base_models.WARNING)
    assert json.loads(said.out)["info"]["name"] == "org/model"


def test_a_warning_of_the_resolving_process_is_passed_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answer = ServedModel(info=INFO, dtype="fp32").model_dump_json()
    stderr = f"chatter\n{base_models.WARNING}no cache\n"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, answer, stderr))
    resolve_models([ModelConfig(name="org/model")])
    assert [record.message for record in caplog.records] == ["no cache"]
