"""Idle costs nothing: without requests the store sees renewals, heartbeats, the janitor and re-armed blocking reads, and no more."""

import time
from collections import Counter

import pytest
import redis

from tests.e2e.conftest import Stack

IDLE_S = 10.0
PASS_S = 6.0  # above the time between two passes of the janitor
MAX_PASSES = 5
SCRIPTS_A_BEAT = 2


@pytest.mark.proves("I12")
def test_an_idle_server_leaves_redis_alone(stack: Stack) -> None:
    if stack.redis is None:
        pytest.skip("counts the commands of a Redis server")
    with redis.Redis.from_url(stack.redis.url) as client:
        before = settled_calls(client, stack)
        time.sleep(IDLE_S)  # the idleness itself
        spent = calls(client) - before
    num_processes = len([pid for role in ("gateway", "trainer", "sampler") for pid in stack.server.pids(role)])
    assert spent.pop("info", 0) >= 1
    assert spent.pop("xread", 0) <= (num_processes + 1) * (IDLE_S / 5 + 1)
    # Each of them renews about every three seconds and looks at its peers, with one script for either; the janitor's sweep and leader
    # lease are a handful more.
    assert spent["evalsha"] <= num_processes * SCRIPTS_A_BEAT * (IDLE_S / 3 + 1) + 12
    unexpected = {name: count for name, count in spent.items() if name not in INSIDE_SCRIPTS}
    assert not unexpected, unexpected
    # Measured: up to 62 calls of one command. A loop that looked ten times a second would add a hundred.
    assert max(spent.values()) <= 100, dict(spent)


# What the scripts of renewals, the leader lease and the sweep call on their own keys; counted by the server with the rest.
INSIDE_SCRIPTS = {
    "evalsha", "time", "get", "set", "exists", "pexpire", "zrangebyscore", "zrange", "smembers", "hget", "hgetall", "hmget", "del", "zrem",
    "sadd", "srem", "zadd", "hset", "srandmember",
}  # fmt: skip


def settled_calls(client: "redis.Redis", stack: Stack) -> Counter[str]:
    """The counts once the start is over: the janitor, which starts last, is there, and a pass of it went by without a new connection or
    script."""
    for _ in range(MAX_PASSES):
        is_whole, before = bool(stack.server.pids("janitor")), calls(client)
        time.sleep(PASS_S)  # the pass itself
        after = calls(client)
        if is_whole and all(after[name] == before[name] for name in ("script|load", "client|setinfo")):
            return after
    raise AssertionError(f"processes still start after {MAX_PASSES * PASS_S} s")


def calls(client: "redis.Redis") -> Counter[str]:
    stats = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): int(values["calls"]) for name, values in stats.items()})
