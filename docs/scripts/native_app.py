"""The gateway's app without a server behind it: what can be read off its routes. Nothing is started and no request is made."""

from collections.abc import Iterator
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.routing import APIRoute

from tinsmith.config import validate
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.gateway.ndjson import NDJSON
from tinsmith.protocol.native import PREFIX
from tinsmith.protocol.native_answers import StreamFrame
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, LaneLimits
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore

_CONFIG = {"models": [{"name": "org/model", "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}]}


@dataclass(frozen=True, order=True, slots=True)
class NativeRoute:
    """`path` is below PREFIX. `answer`: the name of the class that a 200 holds. is_stream: in each of its lines."""

    path: str
    method: str
    answer: str
    text: str
    is_stream: bool = False


def build_app() -> FastAPI:
    store = MemoryStore(lambda: 0)
    lanes = MemoryLanes(store, LaneLimits())
    return create_app(
        Services(config=validate(_CONFIG), store=store, lanes=lanes, events=EventReader(lanes, [SETTLED], store=store), base_models={})
    )


def native_routes(app: FastAPI) -> Iterator[NativeRoute]:
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path.startswith(PREFIX):
            for method in sorted(route.methods):
                text = " ".join((route.endpoint.__doc__ or "").split())
                is_stream = NDJSON in route.responses.get(200, {}).get("content", {})
                answer = StreamFrame if is_stream else route.response_model
                yield NativeRoute(route.path.removeprefix(PREFIX), method, getattr(answer, "__name__", ""), text, is_stream)
