"""Executor, backend and the real engine over memory lanes: what a sampler replica does, in one process."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import pytest

from tinsmith.deployments.sampling_backend import SamplingBackend
from tinsmith.engines.base import Files
from tinsmith.engines.hf_sampler import HfSampler
from tinsmith.protocol.errors import NotFound, ReasonCode
from tinsmith.protocol.futures import State
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.training import Kind
from tinsmith.protocol.wire import decode_command, decode_sample_output, digest, encode_command, encode_sample_output
from tinsmith.queue.gate import Gate
from tinsmith.queue.pool import PoolExecutor
from tinsmith.state.lanes import LaneLimits, PoolSubmission, Replica, work_topic
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore

REPLICA = Replica(id="r1", base="base", node="n", pid=1, started="0")
MAX_ROWS = 4


@pytest.fixture
async def lanes() -> MemoryLanes:
    store = MemoryStore()
    await store.open()
    lanes = MemoryLanes(store, LaneLimits(lease_ms=120_000))
    await lanes.renew(REPLICA)
    return lanes


@pytest.fixture
async def executor(lanes: MemoryLanes, tiny_model: BaseModelInfo) -> AsyncIterator[PoolExecutor]:
    engine = HfSampler(tiny_model, "fp32", MAX_ROWS, 1)

    async def no_artifacts(artifact: str) -> Files:
        raise NotFound(f"checkpoint {artifact!r} is unknown")

    gate = Gate(bound_s=60, exclusive=False, ping=engine.ping)
    backend = SamplingBackend(engine, gate, no_artifacts, encode_sample_output, base="base")
    executor = PoolExecutor(lanes, "base", REPLICA.id, backend, decode, timeout_s=60)
    yield executor
    gate.close()


def decode(body: bytes) -> Sample:
    command = decode_command(Kind.SAMPLE, body)
    assert isinstance(command, Sample)
    return command


async def submit(lanes: MemoryLanes, tenant: str, number: int, adapter: str | None = None) -> str:
    rid = f"{tenant}-{number}"
    prompt = ModelInput((TextChunk(array("i", [5, 6, 7 + number]).tobytes()),))
    sample = Sample(prompt=prompt, params=SamplingParams(seed=number, max_tokens=4, stop=()), num_samples=1, adapter=adapter)
    body = encode_command(sample)
    submission = PoolSubmission(
        tenant=tenant, session="s", base="base", key=f"s:{number}", rid=rid, digest=digest(sample), body=body, tokens=len(prompt)
    )
    await lanes.pool_submit(submission)
    return rid


@pytest.mark.proves("R68")
async def test_one_tenants_backlog_does_not_hold_up_anothers_single_sample(lanes: MemoryLanes, executor: PoolExecutor) -> None:
    backlog = [await submit(lanes, "a", number) for number in range(60)]
    cursors = await lanes.tail([work_topic("base"), "settled"])
    task = asyncio.create_task(executor.run())
    order: list[str] = []
    single: str | None = None
    async with asyncio.timeout(60):
        while len(order) < 61:
            wake = await lanes.wait(cursors, 5)
            cursors = dict(wake.cursors)
            order += wake.events.get("settled", [])
            if work_topic("base") in wake.events:
                executor.wake()
            if single is None and order:
                behind = len(order)
                single = await submit(lanes, "b", 0)
    executor.stop()
    await task
    assert single is not None
    assert sorted(order) == sorted([*backlog, single])
    assert order.index(single) <= behind + 4 * MAX_ROWS, "one batch that runs, what waits inside, and its own"


async def test_answers_and_refusals_reach_the_store(lanes: MemoryLanes, executor: PoolExecutor) -> None:
    cursors = await lanes.tail(["settled"])
    good = await submit(lanes, "a", 1)
    bad = await submit(lanes, "a", 2, adapter="none such")
    task = asyncio.create_task(executor.run())
    await until_settled(lanes, cursors, 2)
    executor.stop()
    await task
    result = await lanes.result("a", good)
    assert result is not None
    assert len(decode_sample_output(result).sequences[0].tokens) == 4
    record = await lanes.look("a", bad)
    assert record is not None
    assert record.state is State.FAILED
    assert record.failure is not None
    assert record.failure.reason is ReasonCode.RESOURCE_NOT_FOUND


async def until_settled(lanes: MemoryLanes, cursors: dict[str, int], count: int) -> None:
    seen = 0
    async with asyncio.timeout(60):
        while seen < count:
            wake = await lanes.wait(cursors, 5)
            cursors = dict(wake.cursors)
            seen += len(wake.events.get("settled", []))
