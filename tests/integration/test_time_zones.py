"""The tests in which times count, in processes whose local time is far from UTC on either side."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ZONES = {"America/Los_Angeles": (8, 7), "Asia/Tokyo": (-9, -9)}  # hours that UTC is ahead, in winter and in summer
TIMED = [
    "tests/contract/test_lanes_sweep.py",
    "tests/contract/test_store.py",
    "tests/unit/gateway/test_sessions.py",
    "tests/unit/gateway/test_weights.py",
    "tests/unit/lifecycle",
    "tests/unit/state/test_memory_lanes.py",
    "tests/unit/test_telemetry.py",
]


def run(zone: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"TZ": zone}, capture_output=True, text=True, check=False
    )


@pytest.mark.proves("R55")
@pytest.mark.parametrize("zone", ZONES)
def test_times_mean_the_same_in_every_time_zone(zone: str) -> None:
    offset = run(zone, "-c", "import time; print(time.timezone // 3600, time.altzone // 3600)")
    assert tuple(map(int, offset.stdout.split())) == ZONES[zone], "the zone is known here, or the test would say nothing"
    ended = run(zone, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TIMED)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
