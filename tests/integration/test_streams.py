"""Token streams through a real socket: callers that read, vanish and come back, samplers that die, gateways that stop."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.in_process import BASE, Cast, InProcessServer, serve
from tinsmith.protocol import native
from tinsmith.protocol.futures import FutureRecord, State

WAIT_S = 20
NUM_TOKENS = 12


class Steps:
    """Engines step as often as a test allows."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)

    def allow(self, count: int) -> None:
        self._allowed.release(count)

    def take(self, _: str) -> None:
        self._allowed.acquire(timeout=WAIT_S)


@pytest.fixture
def steps() -> Steps:
    return Steps()


class Caller:
    """A client of the native face with one sampler."""

    def __init__(self, server: InProcessServer) -> None:
        self._server = server
        self.http = httpx.Client(base_url=server.url + native.PREFIX, timeout=WAIT_S)
        session = self.ok("/create_session", {})["session_id"]
        self.sampler = self.ok("/create_sampler", {"session_id": session, "sampler_seq": 0, "base_model": BASE})["sampler_id"]

    def ok(self, path: str, body: dict[str, object]) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    @contextmanager
    def stream(self, seq_id: int = 1, **changes: object) -> Iterator[Iterator[dict[str, Any]]]:
        """The frames, while the connection is open."""
        body = {"sampler_id": self.sampler, "seq_id": seq_id, "prompt_ids": [5, 6]}
        options = {"sampling": {"max_tokens": NUM_TOKENS, "seed": 3, "stop": []}}
        with self.http.stream("POST", "/sample_stream", json=body | options | changes) as response:
            assert response.status_code == 200, response.read()
            yield map(json.loads, response.iter_lines())

    def all_of(self, **changes: object) -> list[dict[str, Any]]:
        with self.stream(**changes) as frames:  # type: ignore[arg-type]
            return list(frames)

    def record(self, rid: str) -> FutureRecord:
        record = self._server.call(self._server.services.lanes.look("local", rid))
        assert isinstance(record, FutureRecord)
        return record


@contextmanager
def scene(root: Path, steps: Steps, **changes: Any) -> Iterator[tuple[InProcessServer, Caller]]:
    with serve(root, Cast(before_step=steps.take, **changes)) as server:
        caller = Caller(server)
        with closing(caller.http):
            try:
                yield server, caller
            finally:
                steps.allow(10_000)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.005)


def read_tokens(frames: Iterator[dict[str, Any]], told: list[int], count: int) -> None:
    """Read until that many tokens are there, each told once and in order."""
    while len(told) < count:
        frame = next(frames)
        assert frame["type"] == "delta", frame
        assert frame["offset"] == len(told)
        told += frame["tokens"]


def read_to_end(frames: Iterator[dict[str, Any]], told: list[int]) -> dict[str, Any]:
    """The last frame."""
    for frame in frames:
        if frame["type"] != "delta":
            assert next(frames, None) is None, "nothing follows the last frame"
            return frame
        assert frame["offset"] == len(told)
        told += frame["tokens"]
    raise AssertionError("the connection ended without a last frame")


def test_tokens_are_told_while_they_are_drawn(tmp_path: Path, steps: Steps) -> None:
    with scene(tmp_path, steps) as (_, caller), caller.stream() as frames:
        told: list[int] = []
        assert next(frames)["type"] == "start"
        for count in range(1, 5):
            steps.allow(1)
            read_tokens(frames, told, count)
        steps.allow(NUM_TOKENS)
        last = read_to_end(frames, told)
        assert last["type"] == "done"
        assert last["result"]["sequences"][0]["tokens"] == told
        assert len(told) == NUM_TOKENS


def test_every_sequence_of_a_sample_is_told(tmp_path: Path, steps: Steps) -> None:
    steps.allow(10_000)
    with scene(tmp_path, steps) as (_, caller):
        frames = caller.all_of(num_samples=3)
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for frame in frames[1:-1]:
        assert frame["offset"] == len(told[frame["sequence"]])
        told[frame["sequence"]] += frame["tokens"]
    assert [told[index] for index in range(3)] == [sequence["tokens"] for sequence in frames[-1]["result"]["sequences"]]


@pytest.mark.proves("R62")
def test_a_caller_that_hangs_up_frees_the_engine_and_the_sample_is_cancelled(tmp_path: Path, steps: Steps) -> None:
    with scene(tmp_path, steps) as (server, caller):
        with caller.stream() as frames:
            rid = next(frames)["request_id"]
            steps.allow(2)
            read_tokens(frames, [], 2)
        until(lambda: server.services.streams.num_open == 0)
        steps.allow(3)
        until(lambda: caller.record(rid).state is State.CANCELLED)
        assert caller.all_of(seq_id=2, sampling={"max_tokens": 1})[-1]["type"] == "done", "the next request runs"
        assert server.samplers["sampler"].engine.num_live == 0
        last = caller.all_of()[-1]
        assert (last["type"], last["error"]["reason"]) == ("error", "cancelled")


@pytest.mark.proves("R61", "R62")
def test_a_sampler_that_hangs_costs_its_caller_one_item_and_the_sample_is_cancelled(tmp_path: Path, steps: Steps) -> None:
    with scene(tmp_path, steps, item_s=0.3) as (server, caller):
        frames = caller.all_of()
        assert [frame["type"] for frame in frames] == ["start", "error"]
        assert frames[-1]["error"]["error_code"] == 504
        steps.allow(3)
        until(lambda: caller.record(frames[0]["request_id"]).state is State.CANCELLED)
        steps.allow(3)
        until(lambda: server.services.streams.num_open == 0)


@pytest.mark.proves("R63")
def test_without_a_sampler_a_stream_is_one_error_frame(tmp_path: Path, steps: Steps) -> None:
    with scene(tmp_path, steps, num_samplers=0) as (_, caller):
        (frame,) = caller.all_of()
        assert (frame["type"], frame["error"]["error_code"], frame["error"]["reason"]) == ("error", 503, "backend_gate_unavailable")


@pytest.mark.proves("R62")
def test_a_sampler_that_is_killed_mid_stream_is_followed_by_another_and_no_token_is_told_twice(tmp_path: Path, steps: Steps) -> None:
    with scene(tmp_path, steps, num_samplers=2) as (server, caller), caller.stream() as frames:
        told: list[int] = []
        assert next(frames)["type"] == "start"
        steps.allow(4)
        read_tokens(frames, told, 4)
        (victim,) = [name for name, sampler in server.samplers.items() if sampler.engine.num_live > 0]
        server.kill(victim)
        steps.allow(10_000)
        last = read_to_end(frames, told)
        assert last["type"] == "done"
        assert last["result"]["sequences"][0]["tokens"] == told
        (survivor,) = server.samplers.keys() - {victim}
        assert server.samplers[survivor].engine.calls["add"] == 1, "it ran there again, from its first token"


def test_a_gateway_that_stops_ends_its_streams_with_an_error_frame(tmp_path: Path, steps: Steps) -> None:
    with scene(tmp_path, steps) as (server, caller), caller.stream() as frames:
        told: list[int] = []
        assert next(frames)["type"] == "start"
        steps.allow(2)
        read_tokens(frames, told, 2)
        server.loop.call_soon_threadsafe(server.services.polls.end)
        last = read_to_end(frames, told)
        assert (last["type"], last["error"]["error_code"]) == ("error", 503)


def test_temperature_zero_is_greedy_and_a_seed_repeats_whatever_way_it_is_asked(tmp_path: Path, steps: Steps) -> None:
    steps.allow(10_000)
    with scene(tmp_path, steps) as (_, caller):

        def drawn(seq_id: int, **sampling: object) -> list[int]:
            frames = caller.all_of(seq_id=seq_id, sampling={"max_tokens": NUM_TOKENS, "stop": [], **sampling})
            tokens = frames[-1]["result"]["sequences"][0]["tokens"]
            assert isinstance(tokens, list)
            return tokens

        assert drawn(1, temperature=0, seed=1) == drawn(2, temperature=0, seed=2) == drawn(3, temperature=0)
        assert drawn(4, seed=7) == drawn(5, seed=7) != drawn(6, seed=8)
        unseeded = drawn(7)
        assert drawn(7) == unseeded, "the seed was fixed at its submit"
        assert drawn(8) != unseeded
