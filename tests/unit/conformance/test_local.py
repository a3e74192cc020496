"""A server that the run starts: a small program in its place."""

import sys
import time
from pathlib import Path

import pytest

from tinsmith.conformance import local
from tinsmith.conformance.local import LocalServer, ServerFailed

READY = "import sys, time; print('started', file=sys.stderr); print('ready http://127.0.0.1:9', flush=True); time.sleep(600)"


def test_start_restart_and_stop() -> None:
    server = LocalServer([sys.executable, "-c", READY])
    server.start()
    try:
        assert server.url == "http://127.0.0.1:9"
        server.restart()
        assert server.log.count("started") == 2
        assert not Path("/proc").is_dir() or server.num_descriptors() >= 3
    finally:
        server.stop()
    assert server.num_descriptors() == 0


@pytest.mark.parametrize("program", ["print('no such thing')", "import sys; sys.exit('cannot listen')"])
def test_a_server_that_is_never_ready(program: str) -> None:
    with pytest.raises(ServerFailed, match="in place of `ready URL`"):
        LocalServer([sys.executable, "-c", program]).start()


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START_S", 0.2)
    started = time.monotonic()
    with pytest.raises(ServerFailed):
        LocalServer([sys.executable, "-c", "import time; time.sleep(600)"]).start()
    assert time.monotonic() - started < 60
