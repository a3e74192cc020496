"""Streams between the real replicas on one memory store, without Ray: tokens and orders go through their inboxes."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.fakes.local_actor import LocalHandle
from tinsmith.config import validate
from tinsmith.deployments import presence
from tinsmith.deployments.base_models import weightless
from tinsmith.deployments.gateway import DirectGateway
from tinsmith.deployments.memory_state import MemoryState
from tinsmith.deployments.ports import port_of, reserve, url_of
from tinsmith.deployments.sampler import Sampler
from tinsmith.deployments.wiring import Blueprint, connect, lane_limits
from tinsmith.protocol import native
from tinsmith.protocol.futures import FutureRecord
from tinsmith.protocol.ids import LOCAL_TENANT
from tinsmith.state.inbox import SampleAbort, encode
from tinsmith.state.lanes import SETTLED, Lanes, inbox_topic

MODEL = "org/model"
FAKE = {"engine": "fake"}
LONG = 100_000  # tokens that take far longer than a test


@dataclass
class World:
    gateway: DirectGateway
    sampler: Sampler
    lanes: Lanes
    http: httpx.AsyncClient

    async def ask(self, path: str, **body: object) -> Any:
        response = await self.http.post(path, json=body)
        assert response.status_code == httpx.codes.OK, response.text
        return response.json()

    async def request(self, max_tokens: int) -> dict[str, object]:
        session = (await self.ask("/create_session"))["session_id"]
        sampler = (await self.ask("/create_sampler", session_id=session, sampler_seq=0, base_model=MODEL))["sampler_id"]
        options = {"max_tokens": max_tokens, "seed": 1, "stop": []}
        return {"sampler_id": sampler, "seq_id": 0, "prompt_ids": [1, 2], "sampling": options}

    async def settled(self, rid: str) -> FutureRecord:
        cursors = {SETTLED: 0}
        while (record := await self.lanes.look(LOCAL_TENANT, rid)) is None or not record.state.is_terminal:
            wake = await self.lanes.wait(cursors, 10)
            assert wake.events, "it did not end"
            cursors = dict(wake.cursors)
        return record


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(presence.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    config = validate(
        {
            "models": [{"name": MODEL, "trainer": FAKE, "sampler": FAKE}],
            "checkpoints": {"dir": str(tmp_path)},
            "execution": {"lease_s": 2, "long_poll_s": 5},
        }
    )
    model = weightless(MODEL)
    roomy = model.model_copy(update={"info": model.info.model_copy(update={"max_context": 2 * LONG})})
    blueprint = Blueprint(config, {MODEL: roomy}, LocalHandle(MemoryState(lane_limits(config.execution, config.limits))))
    sampler = Sampler(blueprint, MODEL)
    with reserve("127.0.0.1", 0) as reservation:
        port = port_of(reservation)
        gateway = DirectGateway(blueprint, port)
        await sampler.reconfigure({})
        await gateway.reconfigure({})
        async with httpx.AsyncClient(base_url=url_of("127.0.0.1", port) + native.PREFIX, timeout=20) as http:
            yield World(gateway, sampler, connect(blueprint).lanes, http)
        await gateway.stop()
        await sampler.stop()


async def frames_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        yield json.loads(line)


async def test_a_stream_tells_what_a_sampler_draws(world: World) -> None:
    told: list[int] = []
    num_deltas = 0
    async with world.http.stream("POST", "/sample_stream", json=await world.request(max_tokens=200)) as response:
        async for frame in frames_of(response):
            if frame["type"] == "delta":
                assert frame["offset"] == len(told)
                told += frame["tokens"]
                num_deltas += 1
    assert frame["type"] == "done"
    assert frame["result"]["sequences"][0]["tokens"] == told
    assert num_deltas > 1, "tokens came before the result"


@pytest.mark.proves("R62")
async def test_a_caller_that_hangs_up_frees_the_sampler(world: World) -> None:
    async with world.http.stream("POST", "/sample_stream", json=await world.request(LONG)) as response:
        frames = frames_of(response)
        rid = (await anext(frames))["request_id"]
        assert (await anext(frames))["type"] == "delta"
    record = await world.settled(rid)
    assert record.failure is not None
    assert record.failure.reason == "cancelled"
    sampled = await world.ask("/sample", **await world.request(max_tokens=1))
    assert (await world.settled(sampled["request_id"])).failure is None, "the next request runs"


async def test_a_gateway_that_stops_tells_its_streams_so(world: World) -> None:
    async with world.http.stream("POST", "/sample_stream", json=await world.request(LONG)) as response:
        frames = frames_of(response)
        rid = (await anext(frames))["request_id"]
        stopping = asyncio.create_task(world.gateway.stop())
        last = [frame async for frame in frames][-1]
    await stopping
    assert (last["type"], last["error"]["error_code"]) == ("error", 503)
    record = await world.lanes.look(LOCAL_TENANT, rid)
    assert record is not None
    assert not record.state.is_terminal, "its caller may come back for it, at another gateway"
    (sampler,) = await world.lanes.replicas(MODEL)
    await world.lanes.post(inbox_topic(sampler.id), [encode(SampleAbort(rid=rid))])
    await world.settled(rid)
