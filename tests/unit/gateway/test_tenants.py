"""An id of another tenant is an unknown id, on every route of the app: the same status, headers and body after the same operations of the
store, and nothing is written. The routes are the app's own, so a new one fails here until it is told which ids it takes.
"""

import itertools
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from tests.fakes.face import BASE, INFO, Face, open_face
from tests.fakes.key_holders import client_of, key_of, with_keys
from tests.unit.gateway.test_sampling import body_of
from tests.unit.gateway.test_weights import keep
from tinsmith import config
from tinsmith.gateway import deps
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.protocol.custom_losses import CustomLoss, LossGraph, LossNode, LossParameter
from tinsmith.protocol.sessions import CheckpointKind
from tinsmith.state.custom_losses import CustomLosses, CustomLossRecord
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, LaneLimits, Lanes
from tinsmith.state.memory_lanes import MemoryLanes
from tinsmith.state.memory_store import MemoryStore
from tinsmith.state.store import Store

MINE, THEIRS = "mine", "theirs"
NAME = "kept"  # of each checkpoint

# What stands in a path for an id, by the name of the parameter.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "session_id": ("<session>",),
    "model_id": ("<run>",),
    "run_id": ("<run>",),
    "sampler_id": ("<sampler>",),
    "kind": ("weights", "sampler_weights", "external_weights"),
    "name": (NAME,),
    "model": ("<sampler_path>",),
    "artifact": ("<artifact>",),
    "file": ("adapter_model.safetensors",),
}

# Routes that take no id of a tenant's, or the caller's own alone. Those that list are looked at as a whole below.
WITHOUT_IDS = {
    "GET /healthz",
    "GET /healthz/deep",
    "GET /metrics",
    "GET /openapi.json",
    "GET /api/v1/healthz",
    "GET /api/v1/get_server_capabilities",
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/create_session",
    "POST /api/v1/telemetry",
    "POST /api/v1/auth/token",
    "GET /api/v1/auth/apikey/me",
    "DELETE /api/v1/auth/apikey/me",
    "GET /native/v1/capabilities",
    "GET /native/v1/status",
    "GET /native/v1/capacity",
    "POST /native/v1/create_session",
    "POST /native/v1/drain",  # of processes, which belong to no tenant; for operators alone
    # Lists of the caller's own.
    "GET /api/v1/sessions",
    "GET /api/v1/checkpoints",
    "GET /api/v1/training_runs",
    "GET /api/v1/audit",
    "GET /api/v1/billing/usage/events",
    "GET /api/v1/billing/usage/checkpoints/current",
    "GET /native/v1/sessions",
    "GET /native/v1/models",
    "GET /v1/models",
}

# Below these a link's signature lets a caller in, and no tenant is asked for: without one even the owner knows nothing.
SIGNED = "/api/v1/downloads/"

PATH, SAMPLER_PATH = "<path>", "<sampler_path>"
DATUM = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}}}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}
CUSTOM = {"data": [DATUM], "loss_fn": "custom", "loss_fn_config": {"loss_id": "<loss>"}}
GRAPH = {"format": 1, "nodes": [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]}
TURN = {"model_id": "<run>", "seq_id": 1}
MY_TURN = {"model_id": "<my_run>", "seq_id": 1}
BATCH = {"batch": {"input_ids": [1, 2], "inputs": {"target_tokens": [2, 3]}}}
SAMPLE = {"sampler_id": "<sampler>", "seq_id": 0, "prompt_ids": [1, 2], "sampling": {"max_tokens": 2}}
POLLED = {"type": "sampling_session", "sampling_session_id": "<sampler>"}
CHAT = {"model": SAMPLER_PATH, "messages": [{"role": "user", "content": "hello"}]}
FUTURES = ("<future>", "<sample>", "<unload>")

BODIES: Mapping[str, tuple[dict[str, object], ...]] = {
    "POST /api/v1/session_heartbeat": ({"session_id": "<session>"},),
    "POST /api/v1/sessions/{session_id}/finish": ({},),
    "PUT /api/v1/sessions/{session_id}/project": ({"project_id": "p"},),
    "POST /api/v1/sessions/search": ({"session_id": "<session>"}, {"owner": {"type": "user", "owner_urns": ["tml:organization:theirs"]}}),
    "POST /api/v1/create_model": ({"session_id": "<session>", "model_seq_id": 9, "base_model": BASE},),
    "POST /api/v1/get_info": ({"model_id": "<run>"},),
    "POST /api/v1/unload_model": ({"model_id": "<run>"},),
    "POST /api/v1/forward": (TURN | {"forward_input": PASS}, MY_TURN | {"forward_input": CUSTOM}),
    "POST /api/v1/forward_backward": (TURN | {"forward_backward_input": PASS}, MY_TURN | {"forward_backward_input": CUSTOM}),
    "POST /api/v1/optim_step": (TURN,),
    "POST /api/v1/create_custom_loss": (
        {"session_id": "<session>", "custom_loss_seq_id": 9, "name": "x", "inputs": [{"name": "logprobs", "rank": 1}], "graph": GRAPH},
    ),
    "POST /api/v1/save_weights": (TURN | {"path": "n"},),
    "POST /api/v1/save_weights_for_sampler": (TURN | {"path": "n"}, TURN | {"sampling_session_seq_id": 9}),
    "POST /api/v1/save_weights_external": (TURN | {"path": "n"},),
    "POST /api/v1/load_weights": (
        TURN | {"path": "<my_path>"},
        MY_TURN | {"path": PATH},
        {"session_id": "<session>", "model_seq_id": 9, "path": "<my_path>"},
        {"session_id": "<my_session>", "model_seq_id": 9, "path": PATH},
    ),
    "POST /api/v1/weights_info": ({"tinker_path": PATH}, {"tinker_path": SAMPLER_PATH}),
    "POST /api/v1/copy_weights": (
        {"source_path": PATH, "destination_project_id": "p"},
        {"source_path": PATH, "session_id": "<my_session>", "model_seq_id": 9},
        {"source_path": "<my_path>", "session_id": "<session>", "model_seq_id": 9},
    ),
    "POST /api/v1/create_sampling_session": (
        {"session_id": "<session>", "sampling_session_seq_id": 9, "base_model": BASE},
        {"session_id": "<my_session>", "sampling_session_seq_id": 9, "model_path": SAMPLER_PATH},
    ),
    "POST /api/v1/join_sampling_session": ({"sampling_session_id": "<sampler>"},),
    "POST /api/v1/asample": (body_of("<sampler>"),),
    "POST /api/v1/retrieve_future": tuple({"request_id": future} for future in FUTURES),
    "POST /api/v1/retrieve_futures": (
        {"target": POLLED, "timeout": 0},
        {"target": POLLED, "timeout": 0, "retrieved_request_ids": ["<sample>"]},
    ),
    "POST /api/v1/cancel_future": tuple({"request_id": future} for future in FUTURES[:2]),
    "PUT /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl": ({"ttl_seconds": 3600}, {"ttl_seconds": None}),
    "POST /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish": ({},),
    "POST /native/v1/heartbeat": ({"session_id": "<session>"},),
    "POST /native/v1/end_session": ({"session_id": "<session>"},),
    "POST /native/v1/create_model": (
        {"session_id": "<session>", "model_seq": 9, "base_model": BASE},
        {"session_id": "<my_session>", "model_seq": 9, "checkpoint": PATH},
    ),
    "POST /native/v1/unload_model": ({"model_id": "<run>"},),
    "POST /native/v1/forward": (TURN | BATCH,),
    "POST /native/v1/forward_backward": (TURN | BATCH,),
    "POST /native/v1/evaluate": (TURN | BATCH,),
    "POST /native/v1/train_step": (TURN | BATCH,),
    "POST /native/v1/optim_step": (TURN,),
    "POST /native/v1/save_weights": (TURN | {"name": "n"},),
    "POST /native/v1/load_weights": (TURN | {"checkpoint": "<my_path>"}, MY_TURN | {"checkpoint": PATH}),
    "POST /native/v1/publish_sampler_weights": (TURN | {"name": "n"}, TURN | {"sampler_seq": 9}),
    "POST /native/v1/create_sampler": (
        {"session_id": "<session>", "sampler_seq": 9, "base_model": BASE},
        {"session_id": "<my_session>", "sampler_seq": 9, "checkpoint": SAMPLER_PATH},
    ),
    "POST /native/v1/sample": (SAMPLE,),
    "POST /native/v1/sample_stream": (SAMPLE,),
    "POST /native/v1/retrieve_future": tuple({"request_id": future} for future in FUTURES[:2]),
    "POST /native/v1/retrieve_futures": ({"request_ids": ["<future>", "<sample>"]},),
    "POST /native/v1/cancel": tuple({"request_id": future} for future in FUTURES[:2]),
    "POST /v1/completions": ({"model": SAMPLER_PATH, "prompt": [1, 2]},),
    "POST /v1/chat/completions": (CHAT,),
}

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REQUEST = re.compile(r"[tsc][0-9a-f]{40}")
_NOBODY = "00000000-0000-4000-8000-000000000000"


@dataclass(frozen=True)
class Probe:
    """One request; `<...>` in its path and body stand for ids."""

    route: str
    path: str
    body: dict[str, object] | None

    @property
    def method(self) -> str:
        return self.route.split()[0]

    def filled(self, ids: Mapping[str, str]) -> tuple[str, dict[str, Any] | None]:
        """Path and body with the ids in them."""
        return _filled(self.path, ids), None if self.body is None else json.loads(_filled(json.dumps(self.body), ids))


@dataclass(frozen=True)
class Neighbours:
    """Two tenants of one server, the second with one of everything. `ids`: what a probe's marks stand for."""

    face: Face
    mine: httpx.AsyncClient
    theirs: httpx.AsyncClient
    ids: Mapping[str, str]

    @property
    def unknown_ids(self) -> dict[str, str]:
        """The same, of nobody; each as long as the one that exists, since answers quote them."""
        return {mark: text if mark.startswith("<my_") else _of_nobody(text) for mark, text in self.ids.items()}

    @property
    def owner_ids(self) -> dict[str, str]:
        """For the second tenant, all are its own."""
        own = {"<my_session>": "<session>", "<my_run>": "<run>", "<my_path>": "<path>"}
        return {mark: self.ids[own.get(mark, mark)] for mark in self.ids}


@asynccontextmanager
async def neighbours(directory: Path) -> Any:
    tree = {
        "auth": with_keys(directory),
        "gateway": {"custom_losses": True},
        "checkpoints": {"dir": str(directory / "checkpoints")},
    }
    async with open_face(**tree) as face:
        mine, theirs = [(await key_of(face, tenant))[0] for tenant in (MINE, THEIRS)]
        async with client_of(face, mine) as my_client, client_of(face, theirs) as their_client:
            yield Neighbours(face, my_client, their_client, await furnished(face, my_client, their_client))


async def furnished(face: Face, mine: httpx.AsyncClient, theirs: httpx.AsyncClient) -> dict[str, str]:
    """One of everything for the second tenant, and what the first needs of its own."""
    my_session, my_run, _ = await session_and_run(face, mine)
    session, run, future = await session_and_run(face, theirs)
    unloaded = (await ok(theirs, "create_model", session_id=session, model_seq_id=1, base_model=BASE))["model_id"]
    sampler = await ok(theirs, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=BASE)
    sample = await ok(theirs, "asample", **body_of(sampler["sampling_session_id"]))
    mine_kept = await keep(face, tenant=MINE, session_id=my_session, run_id=my_run, name=NAME, artifact="mine/a")
    for kind in CheckpointKind:
        await keep(face, tenant=THEIRS, session_id=session, run_id=run, kind=kind, name=NAME, artifact=f"theirs/{_UUID_PART}-{kind}")
    parameter = LossParameter(name="logprobs", rank=1)
    graph = LossGraph(format=1, nodes=[LossNode(op="placeholder", name="logprobs", target="logprobs")])
    loss = CustomLoss(name="x", inputs=(parameter,), graph=graph)
    loss_id = "c" + "1" * 40
    await CustomLosses(face.store).add(CustomLossRecord(tenant=THEIRS, session_id=session, loss_id=loss_id, loss=loss, created_ms=0))
    return {
        "<session>": session,
        "<run>": run,
        "<sampler>": sampler["sampling_session_id"],
        "<sampler_path>": f"tinker://{run}/sampler_weights/{NAME}",
        "<path>": f"tinker://{run}/weights/{NAME}",
        "<artifact>": f"theirs/{_UUID_PART}-weights",
        "<future>": future,
        "<sample>": sample["request_id"],
        "<unload>": (await ok(theirs, "unload_model", model_id=unloaded))["request_id"],
        "<loss>": loss_id,
        "<my_session>": my_session,
        "<my_run>": my_run,
        "<my_path>": mine_kept.path,
    }


_UUID_PART = "11111111-1111-4111-8111-111111111111"


async def session_and_run(face: Face, http: httpx.AsyncClient) -> tuple[str, str, str]:
    """A session, a model in it that exists, and the request that created it."""
    session = (await ok(http, "create_session"))["session_id"]
    created = await ok(http, "create_model", session_id=session, model_seq_id=0, base_model=BASE, lora_config={"rank": 8})
    await face.run(created["model_id"], 0)
    return session, created["model_id"], created["request_id"]


async def ok(http: httpx.AsyncClient, path: str, **body: object) -> dict[str, Any]:
    answer = await http.post(f"/api/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


@dataclass(frozen=True)
class Told:
    """What a caller learns of one request: the answer without the ids in it, what its promise came to, and what it cost."""

    status: int
    headers: Mapping[str, str]
    body: str
    outcome: str
    operations: tuple[str, ...]


async def told(side: Neighbours, http: httpx.AsyncClient, probe: Probe, ids: Mapping[str, str]) -> Told:
    path, body = probe.filled(ids)
    operations: list[str] = []
    with pytest.MonkeyPatch.context() as patch, counting_into(operations):
        patch.setattr(deps, "IDENTITY_AGE_S", float("inf"))
        for part, protocol in ((side.face.store, Store), (side.face.lanes, Lanes)):
            for name in (name for name in vars(protocol) if not name.startswith("_")):
                patch.setattr(part, name, _counting(name, getattr(part, name)))
        answer = await http.request(probe.method, path, json=body, headers={"x-idempotency-key": "k"})
    headers = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "date")}
    outcome = await _outcome(http, answer)
    text = answer.text.replace(answer.headers["x-request-id"], "<this request>")
    return Told(answer.status_code, headers, _without_ids(text), outcome, tuple(operations))


async def _outcome(http: httpx.AsyncClient, answer: httpx.Response) -> str:
    """Of the promise, where the answer is one."""
    promised = answer.json() if answer.is_success and answer.headers.get("content-type") == "application/json" else None
    if not isinstance(promised, dict) or not isinstance(promised.get("request_id"), str):
        return ""
    fetched = await http.post("/api/v1/retrieve_future", json={"request_id": promised["request_id"]})
    return f"{fetched.status_code} {_without_ids(fetched.text)}"


_OPERATIONS: ContextVar[list[str] | None] = ContextVar("_OPERATIONS", default=None)


@contextmanager
def counting_into(operations: list[str]) -> Iterator[None]:
    """What is done meanwhile on behalf of the caller, and nothing of what the server does by itself."""
    token = _OPERATIONS.set(operations)
    yield
    _OPERATIONS.reset(token)


def _counting(name: str, run: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
    async def counted(*args: object, **options: object) -> object:
        operations = _OPERATIONS.get()
        if operations is not None:
            operations.append(name)
        return await run(*args, **options)

    return counted


def _without_ids(text: str) -> str:
    return _REQUEST.sub("<request>", _UUID.sub("<uuid>", text))


def _filled(text: str, ids: Mapping[str, str]) -> str:
    for mark, named in ids.items():
        text = text.replace(mark, named)
    return text


def _of_nobody(text: str) -> str:
    """An id of the same form that was never issued; a request's is of the running store."""
    request = _REQUEST.fullmatch(text)
    return text[:9] + "0" * 32 if request else _UUID.sub(_NOBODY, text)


def routes() -> dict[str, APIRoute]:
    """Every route of the app, by method and path."""
    store = MemoryStore()
    lanes = MemoryLanes(store, LaneLimits())
    configured = config.validate({"models": [{"name": BASE}]})
    services = Services(config=configured, store=store, lanes=lanes, events=EventReader(lanes, [SETTLED]), base_models={BASE: INFO})
    found = [route for route in create_app(services).routes if isinstance(route, APIRoute)]
    return {f"{method} {route.path}": route for route in found for method in sorted(route.methods)}


ROUTES = routes()


def probes() -> Iterator[Probe]:
    """Every route that takes an id, with each form of its body and each kind of what its path names."""
    for route, handler in ROUTES.items():
        if route in WITHOUT_IDS:
            continue
        names = list(handler.param_convertors)
        for values in itertools.product(*(PARAMETERS.get(name, ()) for name in names)):
            path = route.split()[1]
            for name, value in zip(names, values, strict=True):
                path = re.sub(rf"{{{name}(:path)?}}", value, path)
            for body in BODIES.get(route, (None,)):
                yield Probe(route, path, body)


PROBES = list(probes())


def test_every_route_says_which_ids_it_takes() -> None:
    """A route with parameters in its path or a body is in the tables above."""
    for route, handler in ROUTES.items():
        parameters = set(handler.param_convertors)
        assert parameters <= set(PARAMETERS), f"{route}: say in PARAMETERS what stands for {parameters - set(PARAMETERS)}"
        takes_body = route.split()[0] in ("POST", "PUT", "PATCH")
        assert route in WITHOUT_IDS or parameters or takes_body, f"{route}: say in WITHOUT_IDS that it takes no id"
        assert route in WITHOUT_IDS or not takes_body or route in BODIES, f"{route}: say in BODIES where its ids stand"
        assert route not in WITHOUT_IDS or not parameters, f"{route}: it takes an id"
    assert {probe.route for probe in PROBES} == set(ROUTES) - WITHOUT_IDS


def test_the_tables_name_routes_that_exist() -> None:
    assert WITHOUT_IDS | set(BODIES) <= {*ROUTES, "GET /openapi.json"}


@pytest.mark.parametrize("probe", PROBES, ids=[f"{probe.method} {probe.path} {json.dumps(probe.body)[:80]}" for probe in PROBES])
async def test_a_foreign_id_is_an_unknown_id(tmp_path: Path, probe: Probe) -> None:
    """A refusal leaves the server as it was, so the next question is asked there; a promise takes a turn, and the next one a new server."""
    async with neighbours(tmp_path / "foreign") as side:
        foreign = await untouched(side, probe, side.ids)
        assert foreign.status < 500
        if foreign.outcome:
            async with neighbours(tmp_path / "unknown") as other:
                await compared(other, probe, foreign)
        else:
            await compared(side, probe, foreign)


async def compared(side: Neighbours, probe: Probe, foreign: Told) -> None:
    unknown = await untouched(side, probe, side.unknown_ids)
    assert foreign == unknown
    if not probe.route.split()[1].startswith(SIGNED):
        owner = await told(side, side.theirs, probe, side.owner_ids)
        assert (owner.status, owner.body, owner.outcome) != (unknown.status, unknown.body, unknown.outcome), "its owner learns no more"


async def untouched(side: Neighbours, probe: Probe, ids: Mapping[str, str]) -> Told:
    """What the first tenant learns. A refusal writes nothing; one of a turn of the caller's own model is what the promise comes to."""
    held = side.face.num_kept()
    learned = await told(side, side.mine, probe, ids)
    if not learned.outcome:
        assert side.face.num_kept() == held
    return learned


LISTING = sorted(route.split()[1] for route in WITHOUT_IDS if route.startswith("GET ") and route in ROUTES)


@pytest.mark.parametrize("path", LISTING)
async def test_a_list_holds_nothing_of_others(tmp_path: Path, path: str) -> None:
    async with neighbours(tmp_path) as side:
        query = {"starting_on": "2020-01-01", "ending_before": "2020-01-02", "access_scope": "accessible"}
        answer = await side.mine.get(path, params=query)
        for mark, named in side.ids.items():
            assert mark.startswith("<my_") or named not in answer.text, mark
        assert THEIRS not in answer.text
