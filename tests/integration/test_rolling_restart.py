"""Servers that are replaced under the load of the stock SDK, on real Ray with fake engines: no call fails and no weight differs."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.switch import Switch
from tests.load import Load, assert_undisturbed
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess, fake_config, tinsmith

NUM_MODELS = 2

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as redis:
        yield redis


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def server(checkpoints: Path, redis: RedisServer) -> Iterator[ServerProcess]:
    with ServerProcess.start(fake_config(checkpoints, redis.url)) as server:
        yield server


def test_the_commands_of_an_operator_show_a_running_server(server: ServerProcess) -> None:
    shown = tinsmith("status", "--url", server.url).splitlines()
    assert shown[0] == "tinsmith 0.1.0, store: redis"
    assert sorted(line.split()[1] for line in shown[2:]) == ["gateway", "gateway", "sampler", "trainer"]
    pids = {pid for role in ("gateway", "sampler", "trainer") for pid in server.pids(role)}
    assert {int(pid) for line in shown[2:] for pid in line.split() if pid.isdecimal() and int(pid) in pids} == pids
    assert tinsmith("lanes", "--url", server.url).split()[:2] == ["LANE", "ROLE"]
    assert tinsmith("sessions", "--url", server.url).split()[:2] == ["SESSION", "CREATED"]


@pytest.mark.proves("R7", "R53")
def test_a_rolling_restart_under_load_fails_no_call_and_changes_no_weight(server: ServerProcess, checkpoints: Path) -> None:
    before = {role: set(server.pids(role)) for role in ("gateway", "sampler", "trainer")}
    with Load(server.url, NUM_MODELS) as load:
        load.wait_for(3)
        began = time.monotonic()
        said = tinsmith("drain", "--all", "--url", server.url)
        print(f"rolling restart: {time.monotonic() - began:.1f} s, {load.num_steps} steps")
        load.wait_for(3)
    assert said.count("(pid ") == 4
    for role, pids in before.items():
        assert not pids & set(server.pids(role)), f"a {role} was not replaced"
        assert len(server.pids(role)) == len(pids)
    assert_undisturbed(load.courses, server.url, checkpoints)


def test_a_second_server_takes_over_from_one_that_is_stopped_without_a_failed_call(
    server: ServerProcess, checkpoints: Path, redis: RedisServer
) -> None:
    """The way to a new version: both servers share Redis and the checkpoints, and what stands before them points new connections on."""
    switch = Switch(server.url)
    try:
        with Load(switch.url, NUM_MODELS) as load:
            load.wait_for(3)
            with ServerProcess.start(fake_config(checkpoints, redis.url)) as successor:
                switch.target = successor.url
                assert server.stop() == 0
                load.wait_for(5)
                load.finish()
                assert_undisturbed(load.courses, successor.url, checkpoints)
    finally:
        switch.close()
