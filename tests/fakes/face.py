"""The HTTP face over a memory store, without a network, and a trainer and a sampler that a test moves by hand.

Time of the store is a number that tests move.
"""

from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from tinsmith import config
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.protocol import native, wire
from tinsmith.protocol.futures import Outcome, Write
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.training import TrainingCommand
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, Entry, LaneLimits, Replica, Settlement
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore

BASE = "org/tiny"
INFO = BaseModelInfo(name=BASE, path="/nowhere", max_context=64, vocab_size=100, eos_token_ids=(2,))
WORKER = Replica(id="w", base=BASE, node="n", pid=1, started="0")
PREFIX = "/api/v1"
NATIVE_PREFIX = native.PREFIX


@dataclass
class Face:
    """`http` calls the app. `advance` moves the store's clock."""

    http: httpx.AsyncClient
    app: FastAPI
    services: Services
    store: MemoryStore
    lanes: MemoryLanes
    clock: list[int] = field(default_factory=lambda: [1_000_000])

    def advance(self, ms: int) -> None:
        self.clock[0] += ms

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return await self.http.post(PREFIX + path, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})

    async def ok(self, path: str, body: object, **headers: str) -> dict[str, Any]:
        response = await self.post(path, body, **headers)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def session(self) -> str:
        return str((await self.ok("/create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}))["session_id"])

    async def model(self, session_id: str | None = None, **changes: object) -> str:
        """A model that exists for the gateway; its creation is pending."""
        body = {"session_id": session_id or await self.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 8}}
        return str((await self.ok("/create_model", body | changes))["model_id"])

    async def retrieve(self, rid: str, accept: str = "application/json", **body: object) -> httpx.Response:
        return await self.http.post(f"{PREFIX}/retrieve_future", json={"request_id": rid, **body}, headers={"accept": accept})

    async def native(self, path: str, body: object) -> httpx.Response:
        """A request of the native protocol."""
        return await self.http.post(NATIVE_PREFIX + path, json=body)

    async def native_ok(self, path: str, body: object) -> dict[str, Any]:
        response = await self.native(path, body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def native_get(self, path: str) -> dict[str, Any]:
        response = await self.http.get(NATIVE_PREFIX + path)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def native_model(self, **changes: object) -> str:
        """A model of the native face in a session of its own; its creation is pending."""
        session_id = (await self.native_ok("/create_session", {}))["session_id"]
        body = {"session_id": session_id, "model_seq": 0, "base_model": BASE, "lora": {"rank": 8}}
        await self.native_ok("/create_model", body | changes)
        return f"{session_id}:train:0"

    def num_kept(self) -> int:
        """How many values store and lanes hold together: what a refusal must leave as it was."""
        return _num_values([self.store, self.lanes], set())

    async def take(self, lane: str, from_seq: int = 0) -> list[tuple[Entry, TrainingCommand | Sample]]:
        """What a trainer would be handed out now, decoded."""
        await self.lanes.renew(WORKER)
        acquired = await self.lanes.acquire(lane, WORKER.id)
        assert acquired is not None
        taken = await self.lanes.take(lane, WORKER.id, acquired.token, from_seq, 100, 1_000_000)
        bodies = await self.lanes.bodies([(entry.rid, entry.digest) for entry in taken.entries])
        return [
            (entry, wire.decode_command(entry.kind, body)) for entry, body in zip(taken.entries, bodies, strict=True) if body is not None
        ]

    async def settle(self, lane: str, seq: int, outcome: Outcome) -> None:
        """Settle an entry that was taken."""
        acquired = await self.lanes.acquire(lane, WORKER.id)
        assert acquired is not None
        await self.lanes.settle(lane, WORKER.id, acquired.token, [Settlement(seq, outcome)])

    async def run(self, lane: str, seq: int, result: bytes = b"{}", writes: tuple[Write, ...] = ()) -> None:
        """Take the entries from `seq` on and complete the first."""
        await self.take(lane, seq)
        await self.settle(lane, seq, Outcome(result=result, writes=writes))

    async def take_samples(self) -> list[Sample]:
        await self.lanes.renew(WORKER)
        entries = await self.lanes.pool_take(BASE, WORKER.id, 100, 1_000_000)
        bodies = await self.lanes.bodies([(entry.rid, entry.digest) for entry in entries])
        return [sample for body in bodies if body is not None and isinstance(sample := wire.decode_command(Sample.kind, body), Sample)]

    async def run_samples(self, outcome: Outcome) -> None:
        """Settle every queued sample."""
        await self.lanes.renew(WORKER)
        entries = await self.lanes.pool_take(BASE, WORKER.id, 100, 1_000_000)
        await self.lanes.pool_settle(WORKER.id, [(entry, outcome) for entry in entries])


def _num_values(tree: object, seen: set[int]) -> int:
    """Leaves of nested containers and of the memory store's own objects."""
    if id(tree) in seen:
        return 0
    is_ours = type(tree).__module__.startswith("tinsmith.state")
    if isinstance(tree, Mapping):
        parts: Iterable[object] = tree.values()
    elif isinstance(tree, list | tuple | set | frozenset | deque):
        parts = tree
    elif is_ours and hasattr(tree, "__dict__"):
        parts = vars(tree).values()
    elif is_ours and hasattr(tree, "__slots__"):
        parts = [getattr(tree, name) for name in tree.__slots__]
    else:
        return 1
    seen.add(id(tree))
    return 1 + sum(_num_values(part, seen) for part in parts)


@asynccontextmanager
async def open_face(lane_limits: LaneLimits | None = None, base: BaseModelInfo = INFO, **tree: object) -> AsyncIterator[Face]:
    """A face whose long poll lasts a second, of one base model under the name `BASE`. `tree` overrides sections of the configuration."""
    clock = [1_000_000]
    store = MemoryStore(lambda: clock[0])
    await store.open()
    lanes = MemoryLanes(store, lane_limits or LaneLimits())
    defaults: dict[str, object] = {"models": [{"name": BASE}], "execution": {"long_poll_s": 1}}
    services = Services(
        config=config.validate(defaults | tree),
        store=store,
        lanes=lanes,
        events=EventReader(lanes, [SETTLED]),
        base_models={BASE: base},
    )
    app = create_app(services)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as http:
        yield Face(http, app, services, store, lanes, clock)
