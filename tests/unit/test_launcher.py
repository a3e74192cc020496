"""The launcher's own decisions, without Ray: what ends a run, with which exit code, and that the end is always tidied up."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.serve.schema import ApplicationStatus

from tinsmith import launcher
from tinsmith.config import ConfigError, validate
from tinsmith.deployments.cluster import ClusterError
from tinsmith.deployments.ports import PortUnavailable
from tinsmith.deployments.wiring import Blueprint
from tinsmith.launcher import Server, StartFailed, _Interrupted, _Signals, main, run

URL = "http://127.0.0.1:1"


class StubServer:
    """Starts and watches as it is told, and notes that it was stopped."""

    def __init__(
        self, start: Callable[[], str] = lambda: URL, watch: Callable[[], str] = lambda: "Ray has ended", *, is_clean: bool = True
    ) -> None:
        self._start = start
        self._watch = watch
        self._is_clean = is_clean
        self.num_stops = 0

    def start(self) -> str:
        return self._start()

    def watch(self) -> str:
        return self._watch()

    def stop(self) -> bool:
        self.num_stops += 1
        os.kill(os.getpid(), signal.SIGTERM)  # impatience does not cut the end short
        return self._is_clean


def raising(error: BaseException) -> Callable[[], str]:
    def raise_it() -> str:
        raise error

    return raise_it


def signalled(number: int) -> Callable[[], str]:
    def signal_self() -> str:
        os.kill(os.getpid(), number)
        signal.pause()
        raise AssertionError("the signal did not interrupt")

    return signal_self


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, action in before.items():
        signal.signal(number, action)


def outcome(server: StubServer) -> tuple[int, list[str]]:
    announced: list[str] = []
    code = run(server, _Signals(), announced.append)  # type: ignore[arg-type]
    assert server.num_stops == 1
    return code, announced


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_serving_server_with_0(number: int) -> None:
    assert outcome(StubServer(watch=signalled(number))) == (0, [URL])


def test_a_signal_during_the_start_ends_it_with_0_and_no_ready_line() -> None:
    assert outcome(StubServer(start=signalled(signal.SIGTERM))) == (0, [])


def test_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _Signals().listen()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_more_gpus_than_there_are_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = validate({"models": [{"name": "org/model", "trainer": {"num_gpus": 0.5, "replicas": 2}, "sampler": {"num_gpus": 0.5}}]})
    monkeypatch.setattr(launcher.ray, "cluster_resources", lambda: {"CPU": 3.0, "GPU": 1.0})
    launcher._check_gpus(1)
    with pytest.raises(StartFailed, match=r"the workers want 1\.5 GPUs and Ray finds 1 here"):
        launcher._check_gpus(config.num_gpus)
    monkeypatch.setattr(launcher.ray, "cluster_resources", lambda: {"CPU": 3.0})
    launcher._check_gpus(0)
    with pytest.raises(StartFailed, match="finds 0 here"):
        launcher._check_gpus(0.5)


def test_a_signal_that_meets_rays_own_action_ends_the_start_with_0() -> None:
    assert outcome(StubServer(start=raising(SystemExit(signal.SIGTERM)))) == (0, [])


def distorted(number: int) -> Callable[[], str]:
    def signal_self() -> str:
        try:
            return signalled(number)()
        except BaseException as error:
            raise SystemError("returned a result with an exception set") from error

    return signal_self


def test_a_signal_whose_exception_is_turned_into_another_ends_with_0() -> None:
    assert outcome(StubServer(start=distorted(signal.SIGINT))) == (0, [])
    server = StubServer(start=raising(SystemError("a defect of its own")))
    with pytest.raises(SystemError):
        run(server, _Signals(), print)  # type: ignore[arg-type]
    assert server.num_stops == 1


def test_a_signal_whose_exception_is_lost_ends_the_watch() -> None:
    signals = _Signals()
    signals.listen()
    with contextlib.suppress(_Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    server = Server(validate({"models": [{"name": "org/model"}]}), signals)
    with pytest.raises(_Interrupted):
        server.watch()


def test_an_interrupted_start_does_not_wait_for_a_model_that_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = threading.Event()
    began = time.monotonic()

    def interrupted(_: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "_check", lambda _: None)
    monkeypatch.setattr(Server, "_open_cluster", interrupted)
    monkeypatch.setattr(launcher, "resolve_models", lambda _: fetched.wait(60) and {})
    try:
        with pytest.raises(KeyboardInterrupt):
            Server(validate({"models": [{"name": "org/model"}]}), _Signals()).start()
        assert time.monotonic() - began < 30
    finally:
        fetched.set()


def test_the_loss_of_something_vital_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(StubServer()) == (1, [URL])
    assert capsys.readouterr().err == "Ray has ended\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["a: b; do c", "d: e; do f"]), 2),
        (PortUnavailable("gateway.port: taken; choose another"), 2),
        (ClusterError("ray: cannot start; look there"), 1),
        (StartFailed("trainer cannot start"), 1),
    ],
)
def test_a_start_that_fails_says_why_on_stderr(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(StubServer(start=raising(error))) == (code, [])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{error}\n"


def test_a_defect_is_not_hidden_and_still_tidied_up() -> None:
    server = StubServer(start=raising(KeyError("defect")))
    with pytest.raises(KeyError):
        run(server, _Signals(), print)  # type: ignore[arg-type]
    assert server.num_stops == 1


def test_an_end_that_needed_force_does_not_wait_for_exit_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    assert outcome(StubServer(watch=signalled(signal.SIGTERM), is_clean=False))[0] == 0
    assert codes == [0]


def test_main_reports_a_faulty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("models: []\n")
    assert main([str(path), "--port", "0"]) == 2
    assert capsys.readouterr().err == "models: empty; add at least 1 entry\n"


def test_main_prints_the_ready_line_alone_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(_: Server) -> str:
        print("a worker's line")
        return URL

    path = tmp_path / "server.yaml"
    path.write_text("models: [{name: org/model}]\n")
    monkeypatch.setattr(Server, "start", start)
    monkeypatch.setattr(Server, "watch", lambda _: "over")
    monkeypatch.setattr(Server, "stop", lambda _: True)
    assert main([str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"ready {URL}\n"
    assert "a worker's line" in captured.err
    logging.getLogger("tinsmith").handlers.clear()


def statuses(monkeypatch: pytest.MonkeyPatch, **applications: tuple[ApplicationStatus, str]) -> None:
    shown = {
        name: SimpleNamespace(status=status, message="", deployments={"d": SimpleNamespace(message=message)})
        for name, (status, message) in applications.items()
    }
    monkeypatch.setattr(launcher.serve, "status", lambda: SimpleNamespace(applications=shown))


def test_ready_means_that_every_application_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    running, deploying = (ApplicationStatus.RUNNING, ""), (ApplicationStatus.DEPLOYING, "")
    statuses(monkeypatch, a=running)
    assert not launcher._all_running(["a", "b"])
    statuses(monkeypatch, a=running, b=deploying)
    assert not launcher._all_running(["a", "b"])
    statuses(monkeypatch, a=running, b=running, other=deploying)
    assert launcher._all_running(["a", "b"])


def test_an_application_that_cannot_start_names_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses(monkeypatch, trainer=(ApplicationStatus.DEPLOY_FAILED, "Traceback:\n  File x\nValueError: no weights\n\n"))
    with pytest.raises(StartFailed, match="trainer cannot start: ValueError: no weights; the log above has the details"):
        launcher._all_running(["trainer"])


@pytest.mark.parametrize("is_on", [True, False])
def test_metrics_have_a_directory_of_this_user_alone_while_the_server_runs(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed: list[Blueprint] = []
    monkeypatch.setattr(launcher, "applications_of", lambda blueprint, _: deployed.append(blueprint) or [])
    monkeypatch.setattr(launcher, "close_cluster", lambda *_: True)
    server = Server(validate({"models": [{"name": "org/model"}], "telemetry": {"metrics": is_on}}), _Signals())
    monkeypatch.setattr(server, "_run", lambda _: None)
    server._deploy({})
    [blueprint] = deployed
    assert (blueprint.metrics_dir is not None) is is_on
    if blueprint.metrics_dir is not None:
        assert Path(blueprint.metrics_dir).stat().st_mode & 0o777 == 0o700
    assert server.stop()
    assert blueprint.metrics_dir is None or not Path(blueprint.metrics_dir).exists()
