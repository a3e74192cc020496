"""The sync face: the same calls, on a loop of the client's own."""

import asyncio
import gc
import inspect
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.fakes.native_server import URL, NativeServer, envelope, failed, refused
from tests.unit.client.test_streams import DELTA, DONE, ERROR, START, Body, streamed
from tinsmith.client import (
    AsyncClient,
    AsyncFuture,
    AsyncSamplingClient,
    AsyncTrainingClient,
    Client,
    ClientClosed,
    ClientValidationError,
    Future,
    HttpError,
    SamplingClient,
    StepResult,
    Stream,
    TaskFailed,
    TrainingClient,
    WaitTimedOut,
)
from tinsmith.client.loop import Loop
from tinsmith.protocol.errors import InternalError, ValidationFailed

THREAD = "tinsmith-client"


@pytest.fixture
def client(server: NativeServer) -> Iterator[Client]:
    with Client(URL, "tml-secret", transport=server.transport) as client:
        yield client


async def hang(_: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_a_program_without_an_event_loop(client, server):
    training = client.training(base_model="org/tiny", rank=4)
    assert training.forward_backward(texts=["a"]).result().metrics == {"loss:sum": 1.0}
    assert training.optim_step().result().metrics == {"unclipped_grad_l2:mean": 2.0}
    assert training.save_weights(name="a").result().checkpoint == "tinker://model-1/weights/a"
    sampler = training.publish_sampler_weights().result()
    assert sampler.sample(text="a").result().sequences[0].tokens == (5,)
    server.script("/publish_sampler_weights", envelope("completed", result={"checkpoint": "c"}))
    assert training.publish_sampler_weights(name="b").result().checkpoint == "c"
    assert client.sampling(base_model="org/tiny").sampler_id == "sampler-1"
    training.unload()
    assert [call.seq_id for call in server.calls if call.path in ("/forward_backward", "/optim_step", "/save_weights")] == [1, 2, 3]
    assert [repr(client), repr(training), repr(sampler)] == [f"Client('{URL}')", "TrainingClient('model-1')", "SamplingClient('sampler-2')"]


def test_only_named_sampler_weights_have_a_lifetime(client):
    with pytest.raises(ClientValidationError, match="name: is missing"):
        client.training(base_model="b").publish_sampler_weights(ttl_s=7200)


def test_futures_tell_their_state_and_can_be_cancelled(client, server):
    server.script("/optim_step", envelope("pending"))
    server.script("/retrieve_future", envelope("running"), failed(InternalError("oops")))
    future = client.training(base_model="b").optim_step()
    assert (future.request_id, repr(future)) == ("request-1", "Future('request-1', pending)")
    assert future.status().status == "running"
    assert future.cancel() is True
    with pytest.raises(TaskFailed, match="oops"):
        future.result()
    server.script("/retrieve_future", envelope("completed", result={"metrics": {}}), envelope("completed", result=3))
    assert client.future("request-1", StepResult).result().metrics == {}
    assert client.future("request-1").result() == 3


def test_a_wait_has_a_timeout_and_tells_its_progress(client, server):
    told = []
    server.script("/retrieve_future", envelope("running"), hang)
    with pytest.raises(WaitTimedOut):
        client.future("request-1").result(timeout=0.1, on_progress=told.append)
    assert [task.status for task in told] == ["pending", "running"]


def test_errors_are_those_of_the_async_face(client, server):
    server.script("/create_sampler", refused(ValidationFailed("no")))
    with pytest.raises(HttpError, match="422"):
        client.sampling(base_model="b")
    num_calls = len(server.calls)
    with pytest.raises(ClientValidationError):
        client.training()
    with pytest.raises(TypeError, match="base_modle"):
        client.training(base_modle="b")
    assert len(server.calls) == num_calls


@pytest.mark.proves("R32")
def test_ctrl_c_while_waiting_sends_a_cancel_and_is_raised(client, server):
    async def interrupted(request: httpx.Request) -> httpx.Response:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return await hang(request)

    server.script("/retrieve_future", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.future("request-1").result()
    assert [call.request.request_id for call in server.of("/cancel")] == ["request-1"]


def test_streams_are_iterators(client, server):
    sampler = client.sampling(base_model="b")
    whole, left, broken = Body(START, DELTA, DONE), Body(START, hangs=True), Body(START, ERROR)
    server.script("/sample_stream", streamed(whole), streamed(left), streamed(broken))
    assert [frame.type for frame in sampler.stream(text="a")] == ["start", "delta", "done"]
    with sampler.stream(text="a") as stream:
        assert next(stream).type == "start"
    assert left.is_closed
    with pytest.raises(TaskFailed):
        list(sampler.stream(text="a"))


def test_a_stream_that_nobody_refers_to_closes_its_request(client, server):
    body = Body(START, hangs=True)
    server.script("/sample_stream", streamed(body))
    next(client.sampling(base_model="b").stream(text="a"))
    gc.collect()
    until(lambda: body.is_closed)


def until(is_so) -> None:
    """Other threads need a moment."""
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_any_thread_may_call_and_seq_ids_stay_in_step(client, server):
    training = client.training(base_model="b")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: training.optim_step().result(), range(40)))
    assert [call.seq_id for call in server.of("/optim_step")] == list(range(1, 41))


async def test_it_works_under_a_running_loop_as_in_a_notebook(server):
    with Client(URL, transport=server.transport) as client:
        assert client.training(base_model="b").optim_step().result().metrics == {"unclipped_grad_l2:mean": 2.0}


def test_closing_ends_the_session_and_the_thread(server):
    client = Client(URL, transport=server.transport)
    training = client.training(base_model="b")
    assert len(loop_threads()) == 1
    client.close()
    client.close()
    assert loop_threads() == []
    assert server.paths()[-1] == "/end_session"
    with pytest.raises(ClientClosed):
        training.optim_step()
    with pytest.raises(ClientClosed):
        training.forward(texts=["a"])


def test_leaving_with_an_error_is_told_to_the_server(server):
    def work() -> None:
        with Client(URL, transport=server.transport) as client:
            client.sampling(base_model="b")
            raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        work()
    assert server.calls[-1].request.reason == "errored"


def test_what_still_waits_when_the_client_closes_is_told_so(client, server):
    asked = threading.Event()

    async def ask(request: httpx.Request) -> httpx.Response:
        asked.set()
        return await hang(request)

    server.script("/retrieve_future", ask)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.future("request-1").result)
        asked.wait(10)
        client.close()
        with pytest.raises(ClientClosed):
            waiting.result(10)


def test_a_client_that_nobody_refers_to_ends_by_itself(server):
    client = Client(URL, transport=server.transport)
    training = client.training(base_model="b")
    kept = weakref.ref(client)
    del client
    gc.collect()
    training.optim_step()  # what it made keeps it alive
    del training
    gc.collect()
    assert kept() is None
    until(lambda: loop_threads() == [])
    assert server.paths()[-1] == "/end_session"


def test_a_process_that_ends_without_closing_ends_its_session():
    code = (
        "from tests.fakes.native_server import NativeServer, URL\n"
        "import atexit\n"
        "from tinsmith.client import Client\n"
        "server = NativeServer()\n"
        "atexit.register(lambda: print(server.paths()[-1]))\n"
        "client = Client(URL, transport=server.transport)\n"
        "client.sampling(base_model='b')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("/end_session\n", "")


def test_a_loop_that_has_ended_runs_nothing_more():
    loop = Loop()

    async def nothing() -> None:
        pass

    loop.stop_after(nothing())
    loop.join(10)
    loop.stop_after(nothing())
    with pytest.raises(ClientClosed):
        loop.run(nothing())


def test_work_that_a_loop_leaves_behind_is_cancelled():
    loop = Loop()
    started, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def nothing() -> None:
        pass

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(loop.run, work())
        started.wait(10)
        loop.stop_after(nothing())
        loop.join(10)
        assert cancelled.is_set()
        with pytest.raises(ClientClosed):
            running.result(10)


def test_an_interrupt_before_the_call_has_begun_leaves_nothing_behind(monkeypatch):
    loop = Loop()
    ran = threading.Event()

    async def work() -> None:
        ran.set()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_schedule", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    monkeypatch.undo()
    loop.stop_after(asyncio.sleep(0))
    loop.join(10)
    assert not ran.is_set()


def test_a_call_that_comes_as_the_loop_ends_is_told_so():
    scheduled = threading.Event()

    class Watched(Loop):
        def _schedule(self, call) -> None:
            super()._schedule(call)
            scheduled.set()

    loop = Watched()
    calling = []

    async def last() -> None:
        calling.append(pool.submit(loop.run, asyncio.Event().wait()))
        scheduled.wait(10)

    with ThreadPoolExecutor(1) as pool:
        loop.stop_after(last())
        loop.join(10)
        with pytest.raises(ClientClosed):
            calling[0].result(10)


FACES = [(AsyncClient, Client), (AsyncTrainingClient, TrainingClient), (AsyncSamplingClient, SamplingClient), (AsyncFuture, Future)]


@pytest.mark.parametrize(("core", "face"), FACES)
def test_the_two_faces_have_the_same_methods_with_the_same_parameters(core, face, client):
    def methods(kind: type) -> dict[str, list[str]]:
        names = [name for name in vars(kind) if not name.startswith("_") and name not in ("mapped", "client", "run", "core")]
        found = {}
        for name in names:
            member = getattr(kind, name)
            call = getattr(member, "_call", member)
            found[name] = [] if isinstance(member, property) else list(inspect.signature(call).parameters)
        return found

    ours = methods(face)
    theirs = methods(core)
    assert {name: ours[name] for name in theirs} == theirs
    assert set(ours) - set(theirs) <= {"model_id", "sampler_id"}  # attributes there
    assert list(inspect.signature(core).parameters) == list(inspect.signature(face).parameters) or core is not AsyncClient


def test_a_method_of_the_sync_face_shows_its_parameters_and_its_text(client):
    training = client.training(base_model="b")
    assert "input_ids" in inspect.signature(training.forward).parameters
    assert training.forward.__doc__ == AsyncTrainingClient.forward.__doc__ == TrainingClient.forward.__doc__
    assert isinstance(client.sampling(base_model="b").stream(text="a"), Stream)
