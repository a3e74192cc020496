"""A fake server, and an async client of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.fakes.native_server import URL, NativeServer
from tinsmith.client import AsyncClient, AsyncSamplingClient, AsyncTrainingClient
from tinsmith.client.session import HEARTBEAT_S
from tinsmith.client.transport import Sleep


@pytest.fixture
def server() -> NativeServer:
    return NativeServer()


@pytest.fixture
async def client(server: NativeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(URL, "tml-secret", transport=server.transport, sleep=_sleep_of(server)) as client:
        yield client


@pytest.fixture
async def training(client: AsyncClient) -> AsyncTrainingClient:
    return await client.training(base_model="org/tiny")


@pytest.fixture
async def sampling(client: AsyncClient) -> AsyncSamplingClient:
    return await client.sampling(base_model="org/tiny")


def _sleep_of(server: NativeServer) -> Sleep:
    """Pauses between tries cost nothing and are noted; a heartbeat is not due within a test."""

    async def sleep(pause_s: float) -> None:
        if pause_s == HEARTBEAT_S:
            await asyncio.Event().wait()
        await server.sleep(pause_s)

    return sleep
