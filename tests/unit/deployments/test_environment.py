"""What the server's processes find in their environment."""

import pytest

from tinsmith.config import validate
from tinsmith.deployments.environment import serving_environment

CONFIG = validate({"models": [{"name": "org/model"}], "execution": {"threads": 3}})


@pytest.mark.proves("S6")
def test_token_auth_is_always_on_and_the_token_is_drawn_anew() -> None:
    first, second = (serving_environment(CONFIG, {"RAY_AUTH_MODE": "disabled"}) for _ in range(2))
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize("given", [{"RAY_AUTH_TOKEN": "t" * 40}, {"RAY_AUTH_TOKEN_PATH": "/token"}])
def test_a_token_that_is_given_is_kept(given: dict[str, str]) -> None:
    environment = serving_environment(CONFIG, given)
    assert {name: environment.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")} == {
        "RAY_AUTH_TOKEN": None,
        "RAY_AUTH_TOKEN_PATH": None,
        **given,
    }


def test_the_thread_count_reaches_the_numeric_libraries() -> None:
    environment = serving_environment(CONFIG, {"OMP_NUM_THREADS": "64"})
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"


def test_nothing_is_reported_home_and_the_callers_own_variables_stay() -> None:
    environment = serving_environment(CONFIG, {"HOME": "/h", "RAY_DEDUP_LOGS": "1"})
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert (environment["HOME"], environment["RAY_DEDUP_LOGS"]) == ("/h", "1")
