"""Rolling restarts and a change of servers for longer than the integration tests: more models, round after round, there and back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.switch import Switch
from tests.load import Load, assert_undisturbed
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess, fake_config, tinsmith

NUM_MODELS = 4
NUM_ROUNDS = 3

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as redis:
        yield redis


@pytest.mark.proves("R7", "R53")
def test_rolling_restarts_one_after_another_fail_no_call_and_change_no_weight(redis: RedisServer, tmp_path: Path) -> None:
    config = fake_config(tmp_path, redis.url, gateway={"replicas": 3})
    config["models"] = [{**model, "trainer": {"engine": "fake", "replicas": 2}} for model in config["models"]]  # type: ignore[attr-defined]
    with ServerProcess.start(config) as server:
        with Load(server.url, NUM_MODELS) as load:
            for _ in range(NUM_ROUNDS):
                load.wait_for(3)
                assert tinsmith("drain", "--all", "--url", server.url).count("(pid ") == 6
            load.wait_for(3)
        assert_undisturbed(load.courses, server.url, tmp_path)


def test_servers_that_take_over_from_each_other_again_and_again_fail_no_call(redis: RedisServer, tmp_path: Path) -> None:
    current = ServerProcess.start(fake_config(tmp_path, redis.url))
    switch = Switch(current.url)
    try:
        with Load(switch.url, NUM_MODELS) as load:
            for _ in range(NUM_ROUNDS):
                load.wait_for(3)
                successor = ServerProcess.start(fake_config(tmp_path, redis.url))
                switch.target = successor.url
                former, current = current, successor
                assert former.stop() == 0
            load.wait_for(3)
        assert_undisturbed(load.courses, current.url, tmp_path)
    finally:
        switch.close()
        current.stop()
