"""Waiters share long polls."""

import asyncio
import json

import httpx
import pytest

from tests.fakes.native_server import envelope, refused
from tinsmith.client import ClientClosed, ConnectionFailed, HttpError, RecordLost
from tinsmith.client.polls import MAX_POLLS, Polls
from tinsmith.protocol.errors import NotFound, Unauthenticated
from tinsmith.protocol.native import MAX_RETRIEVED

ALONE, TOGETHER = "/retrieve_future", "/retrieve_futures"


def tasks(*request_ids: str, status: str = "completed") -> httpx.Response:
    return httpx.Response(200, json={"tasks": [{"request_id": request_id, "status": status} for request_id in request_ids]})


async def all_completed(request: httpx.Request) -> httpx.Response:
    return tasks(*json.loads(request.content)["request_ids"])


async def test_waiters_of_one_moment_share_a_request(client, server):
    server.script(TOGETHER, *[all_completed] * 3)
    await asyncio.gather(*(client.future(f"request-{number}") for number in range(150)))
    assert [len(call.request.request_ids) for call in server.of(TOGETHER)] == [MAX_RETRIEVED, MAX_RETRIEVED, 22]
    assert server.of(ALONE) == []


async def test_two_waiters_of_one_task_are_one_id(client, server):
    server.script(ALONE, envelope("completed"))
    future = client.future("request-1")
    await asyncio.gather(future.result(), future.result())
    assert len(server.calls) == 1


async def test_who_has_not_ended_asks_again_with_the_others(client, server):
    server.script(
        TOGETHER,
        httpx.Response(200, json={"tasks": [{"request_id": "a", "status": "completed"}, *_running("b", "c")]}),
        tasks("b", "c"),
    )
    await asyncio.gather(*(client.future(name) for name in "abc"))
    assert [call.request.request_ids for call in server.of(TOGETHER)] == [("a", "b", "c"), ("b", "c")]


def _running(*request_ids: str) -> list[dict[str, str]]:
    return [{"request_id": request_id, "status": "running"} for request_id in request_ids]


@pytest.mark.parametrize(
    "reply",
    [refused(NotFound("b is unknown")), httpx.Response(200, json={"tasks": [{"request_id": "a", "status": "completed"}, {"error": "b"}]})],
)
async def test_one_lost_task_does_not_cost_the_others_their_answer(client, server, reply):
    async def answer(request: httpx.Request) -> httpx.Response:
        request_id = json.loads(request.content)["request_id"]
        return refused(NotFound("unknown")) if request_id == "b" else envelope("completed", request_id)

    server.script(TOGETHER, reply)
    server.script(ALONE, answer, answer)
    good, bad = await asyncio.gather(client.future("a").status(), client.future("b"), return_exceptions=True)
    assert good.status == "completed"
    assert isinstance(bad, RecordLost)


@pytest.mark.parametrize(
    ("reply", "kind"), [(refused(Unauthenticated("no")), HttpError), (httpx.ConnectError("refused"), ConnectionFailed)]
)
async def test_each_waiter_of_a_failed_poll_gets_an_error_of_its_own(client, server, reply, kind):
    server.script(TOGETHER, *[reply] * 6)
    first, second = await asyncio.gather(client.future("a"), client.future("b"), return_exceptions=True)
    assert isinstance(first, kind)
    assert str(first) == str(second)
    assert first is not second


async def test_no_more_polls_run_than_the_bound_and_the_rest_share_the_next(client, server):
    release = asyncio.Event()

    async def held(request: httpx.Request) -> httpx.Response:
        await release.wait()
        return envelope("completed", json.loads(request.content)["request_id"])

    server.script(ALONE, *[held] * MAX_POLLS)
    server.script(TOGETHER, all_completed)
    waiting = []
    for number in range(MAX_POLLS + 2):
        waiting.append(asyncio.create_task(client.future(f"request-{number}").result()))
        for _ in range(20):
            await asyncio.sleep(0)
    assert (len(server.of(ALONE)), len(server.of(TOGETHER))) == (MAX_POLLS, 0)
    release.set()
    await asyncio.gather(*waiting)
    assert [call.request.request_ids for call in server.of(TOGETHER)] == [(f"request-{MAX_POLLS}", f"request-{MAX_POLLS + 1}")]


async def test_a_waiter_that_left_is_not_asked_for(client, server):
    polls: Polls = client._polls
    leaving = asyncio.create_task(polls.next("left"))
    await asyncio.sleep(0)
    leaving.cancel()
    server.script(ALONE, envelope("completed", "stays"))
    assert (await polls.next("stays")).request_id == "stays"
    assert [call.request.request_id for call in server.of(ALONE)] == ["stays"]


async def test_closing_the_client_ends_every_wait(client, server):
    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    server.script(ALONE, *[hang] * MAX_POLLS)
    waiting = []
    for number in range(MAX_POLLS + 1):
        waiting.append(asyncio.create_task(client.future(f"request-{number}").result()))
        for _ in range(5):
            await asyncio.sleep(0)
    await client.close()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(end) for end in ends} == {ClientClosed}
