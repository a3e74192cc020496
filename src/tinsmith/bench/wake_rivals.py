"""The two servers that `wake` compares, each in a process of its own over the same Redis: `python -m tinsmith.bench.wake_rivals ours URL`.

ours: the gateway as it is served. floor: a plain app with one reader of a Redis stream, which answers a waiting POST when an entry
that names it comes. Both print the address that they listen on, and tell at /waiting how many requests wait.
"""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
import uvicorn
from fastapi import FastAPI, Request
from starlette.types import ASGIApp

from tinsmith import config
from tinsmith.gateway.app import create_app
from tinsmith.gateway.deps import Services
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.state.events import EventReader
from tinsmith.state.lanes import SETTLED, LaneLimits
from tinsmith.state.redis_lanes import RedisLanes
from tinsmith.state.redis_store import RedisStore

BASE = "bench/model"
FLOOR_STREAM = "floor"
BACKLOG = 4096


def ours(url: str) -> FastAPI:
    """The gateway, with the longest of long polls."""
    store = RedisStore(url)
    lanes = RedisLanes(store, LaneLimits())
    services = Services(
        config=config.validate({"models": [{"name": BASE}], "execution": {"long_poll_s": 40}}),
        store=store,
        lanes=lanes,
        events=EventReader(lanes, [SETTLED], store=store),
        base_models={BASE: BaseModelInfo(name=BASE, path="", max_context=1024, vocab_size=1024, eos_token_ids=())},
    )
    app = create_app(services)
    app.add_api_route("/waiting", lambda: {"num": services.polls.num_waiting}, include_in_schema=False)
    return app


def floor(url: str) -> FastAPI:
    """Stream entry -> reader -> answer, and nothing else."""
    waiting: dict[str, asyncio.Event] = {}

    async def read() -> None:
        cursor: Any = "0"
        async with redis.asyncio.Redis.from_url(url) as client:
            while True:
                streams: Any = await client.xread({FLOOR_STREAM: cursor}, block=1000)
                for _, entries in streams:
                    cursor = entries[-1][0]
                    for _, fields in entries:
                        if (event := waiting.get(fields[b"id"].decode())) is not None:
                            event.set()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reading = asyncio.create_task(read())
        yield
        reading.cancel()

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.post("/wait")
    async def wait(request: Request) -> dict[str, str]:
        name = json.loads(await request.body())["id"]
        waiting[name] = asyncio.Event()
        await waiting[name].wait()
        del waiting[name]
        return {"id": name}

    app.add_api_route("/waiting", lambda: {"num": len(waiting)})
    return app


RIVALS: dict[str, Callable[[str], ASGIApp]] = {"ours": ours, "floor": floor}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tinsmith.bench.wake_rivals")
    parser.add_argument("rival", choices=sorted(RIVALS))
    parser.add_argument("redis_url")
    asked = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    app = RIVALS[asked.rival](asked.redis_url)
    uvicorn.Server(
        uvicorn.Config(app, log_config=None, log_level="critical", access_log=False, backlog=BACKLOG, timeout_graceful_shutdown=1)
    ).run([listener])


if __name__ == "__main__":
    main()
