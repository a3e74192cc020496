"""Processes whose local time is far from UTC on either side: what the server tells, and every unit and contract test."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from tests.chaos.matrix import Matrix, Row
from tests.chaos.scene import PROMPT_S, Caller, start
from tinsmith.protocol import native

ROOT = Path(__file__).resolve().parents[2]
ZONES = ("America/Los_Angeles", "Asia/Tokyo")
SUITE_S = 900.0  # 5 minutes were measured
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")  # of a line of the log


@pytest.mark.parametrize("zone", ZONES)
def test_a_server_in_another_time_zone_tells_utc(matrix: Matrix, tmp_path: Path, zone: str) -> None:
    """Its answers, its log, and a time to live that is shorter than the zone is far from UTC."""
    began = time.time()
    with start(tmp_path, env={"TZ": zone}) as server, Caller(server.url) as caller:
        model = caller.model()
        saved = model.submit(native.SaveWeights, name="kept", ttl_s=native.MIN_TTL_S).end(PROMPT_S)
        assert saved.saw == "completed"
        ended = caller.creating(base_model=None, lora=None, checkpoint=saved.result["checkpoint"])[1].end(PROMPT_S)
        assert ended.saw == "completed", "the checkpoint has not expired"
        assert caller.ask("/heartbeat", {"session_id": caller.session_id}) is not None
        then = f"forward: {model.forward().end(PROMPT_S).saw}"
        caller.end_session()
        sessions, models = caller.http.get("/sessions").json()["sessions"], caller.http.get("/models").json()["models"]
        told_s = [held[name] / 1000 for held in (*sessions, *models) for name in ("created_ms", "ended_ms")]
        told_s += [datetime.fromisoformat(stamp).timestamp() for stamp in STAMP.findall(server.log)]
        assert len(told_s) > 6
        assert all(began - 1 <= at <= time.time() + 1 for at in told_s), told_s
    matrix.note(Row("time zones", f"TZ={zone}", "the server", "UTC times", ended.seconds, PROMPT_S, "answer", then))


@pytest.mark.timeout(2 * SUITE_S)
def test_the_unit_and_contract_tests_pass_in_other_time_zones(matrix: Matrix) -> None:
    """One process a zone, side by side: each keeps one core busy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/unit", "tests/contract"]
    began = time.monotonic()
    with ThreadPoolExecutor(len(ZONES)) as threads:
        runs = list(threads.map(lambda zone: in_zone(zone, command), ZONES))
    for zone, ended in zip(ZONES, runs, strict=True):
        assert ended.returncode == 0, zone + ended.stdout[-6000:] + ended.stderr[-2000:]
        passed = ended.stdout.strip().splitlines()[-1].split(" in ")[0]
        seconds = time.monotonic() - began
        matrix.note(Row("time zones", f"TZ={zone}", "unit and contract tests", passed, seconds, SUITE_S, "", ""))


def in_zone(zone: str, command: list[str]) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"TZ": zone}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=SUITE_S)
