"""Waiting for a command: the one loop."""

import asyncio

import httpx
import pytest

from tests.fakes.native_server import URL, envelope, failed, refused
from tinsmith.client import (
    AsyncClient,
    ConnectionFailed,
    HttpError,
    PassResult,
    RecordLost,
    StepResult,
    TaskCancelled,
    TaskFailed,
    UnexpectedAnswer,
    WaitTimedOut,
)
from tinsmith.client.futures import CANCEL_S, WAIT_S
from tinsmith.protocol.errors import Cancelled, Category, InternalError, NotFound, ReasonCode, StateContention, Unauthenticated
from tinsmith.protocol.futures import State

POLL, CANCEL = "/retrieve_future", "/cancel"
DONE = {"metrics": {"loss:sum": 1.5}}


async def never(_: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.proves("R32")
async def test_polls_follow_each_other_without_a_pause_until_the_end(client, server):
    server.script(POLL, envelope("pending"), envelope("running"), envelope("running"), envelope("completed", result=DONE))
    result = await client.future("request-1", PassResult)
    assert result.metrics == {"loss:sum": 1.5}
    assert (len(server.of(POLL)), server.pauses) == (4, [])


async def test_a_task_that_ended_within_its_submit_is_not_polled(training, server):
    future = await training.forward(texts=["a"])
    assert (await future).metrics == {"loss:sum": 1.0}
    assert server.of(POLL) == []


async def test_a_result_is_read_once_and_told_to_all_who_wait(client, server):
    server.script(POLL, envelope("completed", result=DONE))
    future = client.future("request-1", PassResult)
    assert await future is await future
    assert len(server.of(POLL)) == 1


@pytest.mark.proves("R32")
async def test_each_poll_may_fail_five_times_and_a_success_counts_from_zero(client, server):
    away = [httpx.ConnectError("refused"), httpx.Response(408), httpx.Response(502), refused(StateContention("m")), httpx.ReadTimeout("m")]
    server.script(POLL, *away, envelope("running"), *away, envelope("completed", result=DONE))
    await client.future("request-1")
    assert (len(server.of(POLL)), len(server.pauses)) == (12, 10)


@pytest.mark.proves("R32")
async def test_the_sixth_failure_in_a_row_ends_the_wait(client, server):
    server.script(POLL, envelope("running"), *[httpx.ConnectError("refused")] * 6)
    with pytest.raises(ConnectionFailed):
        await client.future("request-1")


@pytest.mark.proves("R32")
async def test_the_whole_wait_is_bounded_and_the_command_goes_on(client, server):
    assert WAIT_S == 7200
    server.script(POLL, envelope("running"), never)
    with pytest.raises(WaitTimedOut, match=r"request-1 has not ended within 0\.05 s; it goes on") as raised:
        await client.future("request-1").result(timeout=0.05)
    assert (raised.value.request_id, raised.value.waited_s) == ("request-1", 0.05)
    assert server.of(CANCEL) == []


@pytest.mark.proves("R32")
async def test_the_bound_covers_the_pauses_between_retries(server):
    pausing = asyncio.Event()

    async def pause(_: float) -> None:
        pausing.set()
        await asyncio.Event().wait()

    async with AsyncClient(URL, transport=server.transport, sleep=pause, wait_s=0.05) as client:
        server.script(POLL, httpx.ConnectError("refused"))
        with pytest.raises(WaitTimedOut):
            await client.future("request-1")
        assert pausing.is_set()


@pytest.mark.proves("R32")
async def test_an_interrupted_wait_sends_a_cancel_and_re_raises(client, server):
    polled = asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        polled.set()
        return await never(request)

    server.script(POLL, hang)
    waiting = asyncio.create_task(client.future("request-1").result())
    await polled.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    [call] = server.of(CANCEL)
    assert call.request.request_id == "request-1"


@pytest.mark.proves("R32")
@pytest.mark.parametrize("reply", [httpx.ConnectError("refused"), refused(StateContention("away")), never])
async def test_a_cancel_that_fails_or_hangs_keeps_nobody(client, server, reply, monkeypatch):
    assert CANCEL_S == 2
    monkeypatch.setattr("tinsmith.client.futures.CANCEL_S", 0.05)
    server.script(POLL, never)
    server.script(CANCEL, reply)
    waiting = asyncio.create_task(client.future("request-1").result())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(server.of(CANCEL)) == 1


@pytest.mark.proves("R33")
async def test_a_failed_task_raises_what_the_server_said(client, server):
    server.script(POLL, failed(InternalError("the reason")))
    future = client.future("request-1")
    for _ in range(2):
        with pytest.raises(TaskFailed, match="500 internal_error: the reason") as raised:
            await future
    error = raised.value
    assert (error.error_code, error.reason, error.category) == (500, ReasonCode.INTERNAL_ERROR, Category.SERVER)
    assert error.request_id == "request-1"
    assert len(server.of(POLL)) == 1


@pytest.mark.proves("R33")
async def test_a_cancelled_task_is_told_from_a_failed_one(client, server):
    server.script(POLL, failed(Cancelled("by its caller"), status="cancelled"))
    with pytest.raises(TaskCancelled, match="499 cancelled"):
        await client.future("request-1")


@pytest.mark.proves("R33")
async def test_a_task_that_the_server_does_not_know_is_lost(client, server):
    future = client.future("request-9")
    server.script(POLL, refused(NotFound("unknown")), refused(NotFound("unknown")))
    server.script(CANCEL, refused(NotFound("unknown")))
    for call in (future.result, future.status, future.cancel):
        with pytest.raises(RecordLost, match="request-9 is unknown") as raised:
            await call()
        assert raised.value.request_id == "request-9"


async def test_another_refusal_of_a_poll_is_an_http_error(client, server):
    server.script(POLL, refused(Unauthenticated("no such key")))
    with pytest.raises(HttpError, match="401"):
        await client.future("request-1")


@pytest.mark.proves("R24")
async def test_null_is_a_result_too(client, server):
    server.script(POLL, envelope("completed", result=None))
    assert await client.future("request-1") is None


async def test_a_result_of_another_kind_is_named(client, server):
    server.script(POLL, envelope("completed", result={"checkpoint": "c"}))
    with pytest.raises(UnexpectedAnswer, match="the result of request-1"):
        await client.future("request-1", StepResult)


async def test_a_failure_without_a_word_is_named(client, server):
    server.script(POLL, envelope("failed"))
    with pytest.raises(UnexpectedAnswer, match="request-1 is failed"):
        await client.future("request-1")


async def test_progress_is_told_when_status_or_queue_state_changes(client, server):
    told = []
    server.script(
        POLL,
        envelope("pending", queue_state="paused_capacity"),
        envelope("pending", queue_state="paused_capacity"),
        envelope("pending", queue_state="active"),
        envelope("running", queue_state="active"),
        envelope("completed"),
    )
    await client.future("request-1").result(on_progress=told.append)
    assert [(task.status.value, task.queue_state) for task in told] == [
        ("pending", None),
        ("pending", "paused_capacity"),
        ("pending", "active"),
        ("running", "active"),
        ("completed", None),
    ]


async def test_a_client_may_have_one_progress_callback_for_all(server):
    told = []
    async with AsyncClient(URL, transport=server.transport, on_progress=told.append) as client:
        await (await client.training(base_model="b")).optim_step()
        assert [task.status for task in told] == [State.COMPLETED]


async def test_a_timeout_of_the_callback_is_not_taken_for_ours(client, server):
    def raise_timeout(_: object) -> None:
        raise TimeoutError("theirs")

    with pytest.raises(TimeoutError, match="theirs"):
        await client.future("request-1").result(on_progress=raise_timeout)


async def test_cancel_and_status_say_what_the_server_says(client, server):
    server.script(CANCEL, httpx.Response(200, json={"cancelled": False, "state": "running"}))
    server.script(POLL, envelope("running"), envelope("completed", result=DONE))
    future = client.future("request-1")
    assert await future.cancel() is False
    assert await future.cancel() is True
    assert (await future.status()).status is State.RUNNING
    assert repr(future) == "AsyncFuture('request-1', running)"
    assert (await future.status()).status is State.COMPLETED
    assert (await future.status()).result == DONE
    assert len(server.of(POLL)) == 2


async def test_futures_can_be_gathered(client, server):
    def task(request_id: str) -> dict[str, object]:
        return {"request_id": request_id, "status": "completed", "result": {"metrics": {request_id: 1.0}}}

    server.script("/retrieve_futures", httpx.Response(200, json={"tasks": [task("a"), task("b")]}))
    first, second = await asyncio.gather(client.future("a", StepResult), client.future("b", StepResult))
    assert (first.metrics, second.metrics) == ({"a": 1.0}, {"b": 1.0})


async def test_a_slow_waiter_does_not_undo_what_a_faster_one_learnt(client, server):
    asked, release = asyncio.Event(), asyncio.Event()

    async def late(_: httpx.Request) -> httpx.Response:
        asked.set()
        await release.wait()
        return envelope("running")

    server.script(POLL, late, envelope("completed", result=DONE))
    future = client.future("request-1")
    slow = asyncio.create_task(future.result())
    await asked.wait()
    assert await future == DONE
    release.set()
    assert await slow == DONE


async def test_an_interrupt_after_the_end_sends_no_cancel(client, server):
    def interrupt(task: object) -> None:
        if task.status.is_terminal:
            raise asyncio.CancelledError

    server.script(POLL, envelope("completed", result=DONE))
    with pytest.raises(asyncio.CancelledError):
        await client.future("request-1").result(on_progress=interrupt)
    assert server.of(CANCEL) == []
