"""The factory, and what can be asked of a server as a whole."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.fakes.native_server import URL, NativeServer, envelope
from tinsmith.client import (
    AsyncClient,
    AsyncSamplingClient,
    AsyncTrainingClient,
    ClientClosed,
    ClientValidationError,
    StepResult,
    WeightsSaved,
)
from tinsmith.protocol.native_answers import Capabilities, Capacity, ModelInfo, ServerStatus, SessionInfo

CAPABILITIES = {"protocol_version": "1", "server_version": "0", "features": [], "losses": {}, "base_models": [], "limits": {"w": 1}}
STATUS = {"server_version": "0", "store": "memory", "processes": [], "queues": []}
ROLE = {"num_processes": 1, "num_healthy": 1, "num_used": 0, "num_slots": 4, "num_pending": 0, "age_s": 0.0}
MODEL = {"model_id": "m", "session_id": "s", "base_model": "b", "lora_rank": 8, "created_ms": 1, "a_newer_field": 1}


async def test_what_can_be_asked_of_a_server_is_typed(client, server):
    server.script("/capabilities", httpx.Response(200, json=CAPABILITIES))
    server.script("/status", httpx.Response(200, json=STATUS))
    server.script("/capacity", httpx.Response(200, json={"base_models": {"b": {"trainer": ROLE}}}))
    server.script("/sessions", httpx.Response(200, json={"sessions": [{"session_id": "s", "created_ms": 1}]}))
    server.script("/models", httpx.Response(200, json={"models": [MODEL]}))
    assert (await client.capabilities()) == Capabilities.model_validate(CAPABILITIES)
    assert (await client.status()) == ServerStatus.model_validate(STATUS)
    assert (await client.capacity()) == Capacity.model_validate({"base_models": {"b": {"trainer": ROLE}}})
    assert (await client.sessions()) == (SessionInfo(session_id="s", created_ms=1),)
    assert (await client.models()) == (ModelInfo.model_validate(MODEL),)
    assert {call.method for call in server.calls} == {"GET"}


@pytest.mark.proves("R32")
async def test_a_wait_can_be_taken_up_again_by_request_id(client, server):
    saved = {"checkpoint": "c"}
    server.script("/retrieve_future", envelope("completed", result=saved), envelope("completed", result=saved))
    assert (await client.future("request-1", WeightsSaved)).checkpoint == "c"
    assert await client.future("request-1") == saved


async def test_two_clients_of_two_servers_never_mix():
    servers = [NativeServer(), NativeServer()]
    urls = ["http://one.test", "http://two.test"]
    keys = ["tml-one", "tml-two"]
    async with AsyncClient(urls[0], keys[0], transport=servers[0].transport) as first:
        async with AsyncClient(urls[1], keys[1], transport=servers[1].transport) as second:
            models = await asyncio.gather(first.training(base_model="b"), second.training(base_model="b"))
            for _ in range(3):
                await models[0].optim_step()
            await models[1].optim_step()
            await asyncio.gather(*(model.save_weights(name="a") for model in models))
    for server, url, key in zip(servers, urls, keys, strict=True):
        assert {call.headers["x-api-key"] for call in server.calls} == {key}
        assert {call.headers["host"] for call in server.calls} == {url.removeprefix("http://")}
        assert server.paths()[-1] == "/end_session"
    assert [[call.seq_id for call in server.of("/save_weights")] for server in servers] == [[4], [2]]


async def test_a_closed_client_sends_nothing(client, server):
    training = await client.training(base_model="b")
    await client.close()
    num_calls = len(server.calls)
    for call in (client.status, training.optim_step, lambda: client.training(base_model="b"), client.future("r", StepResult).result):
        with pytest.raises(ClientClosed):
            await call()
    assert len(server.calls) == num_calls


@pytest.mark.proves("R33")
@pytest.mark.parametrize("request_id", ["", "x" * 300, "r\ud800", None, 5])
async def test_a_request_id_that_can_be_none_is_refused_before_it_is_sent(client, server, request_id):
    with pytest.raises(ClientValidationError, match=r"^request_id: "):
        client.future(request_id)
    assert server.calls == []


@pytest.mark.proves("R33")
def test_every_call_in_another_event_loop_says_so():
    server = NativeServer()
    client = AsyncClient(URL, transport=server.transport)

    async def use() -> tuple[AsyncTrainingClient, AsyncSamplingClient]:
        return await client.training(base_model="b"), await client.sampling(base_model="b")

    training, sampling = asyncio.run(use())
    num_calls = len(server.calls)
    calls: list[Callable[[], Awaitable[object]]] = [
        client.status,
        lambda: client.training(base_model="b"),
        lambda: client.sampling(base_model="b"),
        client.future("r").result,
        training.optim_step,
        training.unload,
        lambda: sampling.sample(text="a"),
        lambda: anext(sampling.stream(text="a")),
        client.close,
    ]
    for call in calls:

        async def again(call: Callable[[], Awaitable[object]] = call) -> None:
            await call()

        with pytest.raises(ClientValidationError, match=r"^event loop: .*open a client in each, or use Client"):
            asyncio.run(again())
    assert len(server.calls) == num_calls
