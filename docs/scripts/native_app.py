"""The gateway's app without a server behind it: what can be read off its routes. Nothing is started and no request is made."""

from collections.abc import Iterator
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.routing import APIRoute

from tinsmith.config import validate
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.protocol.native import PREFIX
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, LaneLimits
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore

_CONFIG = {"models": [{"name": "org/model", "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}]}


@dataclass(frozen=True, order=True, slots=True)
class NativeRoute:
    """`path` is below PREFIX. `answer`: the name of the class that a 200 holds."""

    path: str
    method: str
    answer: str
    text: str


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
                yield NativeRoute(route.path.removeprefix(PREFIX), method, getattr(route.response_model, "__name__", ""), text)
