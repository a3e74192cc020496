"""Thousands of mutated requests at a server as users start it, with fake engines over Redis: refused in the form of their face, within a
bound, without a key of the store left behind, and in memory that stays as it was.
"""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from tests.fuzz.odds import BROKEN
from tests.fuzz.seeds import furnished
from tests.fuzz.shots import Gun
from tests.fuzz.wire import Line, Shot, check
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess, fake_config
from tinsmith.protocol.wire_bounds import MIB

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NUM_CALLERS = 3
NUM_WARM, NUM_SHOTS = 1_500, 4_500  # of all callers together
NUM_REPLAYED = 300
MAX_GROWTH = 48 * MIB  # of the gateway's memory after its warm-up; a leak of 11 kB a request would be more
OWN_KEYS = (
    b"lease:",
    b"replica:",
    b"peers:",
    b"table:local/stored",
)  # leases, and the janitor's hourly measure: nobody's request writes them
QUIET_S = 60.0


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def server(store: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = fake_config(
        tmp_path_factory.mktemp("checkpoints"),
        store.url,
        execution={"long_poll_s": 1, "hole_grace_s": 1},
        gateway={"custom_losses": True, "replicas": 1},
    )
    with ServerProcess.start(config) as server:
        yield server


@dataclass
class Volley:
    """Shots of several callers at once; what was refused is kept."""

    line: Line
    ids: dict[str, str]
    seqs: Iterator[int] = field(default_factory=lambda: itertools.count(5))
    refused: list[Shot] = field(default_factory=list)
    num_answered: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fire(self, num: int, seed: int) -> None:
        with ThreadPoolExecutor(NUM_CALLERS) as callers:
            list(callers.map(self._fire, [num // NUM_CALLERS] * NUM_CALLERS, range(seed, seed + NUM_CALLERS)))

    def _fire(self, num: int, seed: int) -> None:
        line = Line(self.line.host, self.line.port)
        for shot in Gun(self.ids, random.Random(seed), self.seqs).shots(num):
            answer = line.fire(shot)
            check(shot, answer)
            with self._lock:
                self.num_answered += 1
                if answer.is_refusal:
                    self.refused.append(shot)
        line.close()


@pytest.mark.timeout(600)
def test_mutated_requests_over_redis(server: ServerProcess, store: RedisServer) -> None:
    url = urlsplit(server.url)
    assert url.hostname is not None
    assert url.port is not None
    line = Line(url.hostname, url.port)
    (pid,) = server.pids("gateway")
    gateway = psutil.Process(pid)
    volley = Volley(line, furnished(line.host, line.port, MODEL))
    volley.fire(NUM_WARM, seed=100)
    warm = gateway.memory_info().rss
    volley.fire(NUM_SHOTS, seed=200)
    for sent in BROKEN:
        assert b" 50" not in line.raw(sent)[:20], sent[:200]
    growth = gateway.memory_info().rss - warm
    assert volley.num_answered == NUM_WARM + NUM_SHOTS
    assert growth < MAX_GROWTH, f"{growth // MIB} MiB more than after the warm-up"
    with redis.Redis.from_url(store.url) as client:
        quiet(client)
        num_refused = sum(refused_again(client, line, shot) for shot in random.Random(7).sample(volley.refused, NUM_REPLAYED))
    assert num_refused > 0.9 * NUM_REPLAYED
    line.close()
    assert server.pids("gateway") == [pid]


def refused_again(client: "redis.Redis", line: Line, shot: Shot) -> bool:
    """Whether the shot is refused as before, which then has left no key."""
    before = keys(client)
    answer = line.fire(shot)
    check(shot, answer)
    if answer.is_refusal:
        written = keys(client) - before
        assert not written, f"{shot}\nwrote {written}"
    return answer.is_refusal


def quiet(client: "redis.Redis") -> None:
    """Return when what was accepted has been worked off: the store's keys stay the same for two graces of a missing number."""
    give_up_at, held, since = time.monotonic() + QUIET_S, keys(client), time.monotonic()
    while time.monotonic() - since < 2.5:
        assert time.monotonic() < give_up_at, "the server does not come to rest"
        now = keys(client)
        if now != held:
            held, since = now, time.monotonic()
        threading.Event().wait(0.2)


def keys(client: "redis.Redis") -> set[bytes]:
    return {key for key in client.scan_iter(count=10_000) if not key.startswith(OWN_KEYS)}
