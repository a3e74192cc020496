"""The typed client against a whole server: real HTTP, fake engines."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fakes.in_process import BASE, Cast, InProcessServer, serve
from tinsmith.client import (
    AdamWConfig,
    AsyncClient,
    Client,
    ClientValidationError,
    HttpError,
    LrSchedule,
    PassResult,
    ReasonCode,
    RecordLost,
    TaskCancelled,
    TaskFailed,
    TrainingClient,
    WaitTimedOut,
)
from tinsmith.engines.fake_faults import FAULT_TOKEN, Fault

KEY = "tml-a-very-secret-key"
DATA = {"input_ids": [[1, 2, 3], [4, 5]], "inputs": {"target_tokens": [[2, 3, 4], [5, 6]]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    with serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(server: InProcessServer) -> Iterator[Client]:
    with Client(server.url, KEY, tags=["test"]) as client:
        yield client


@pytest.fixture
def training(client: Client) -> TrainingClient:
    return client.training(base_model=BASE, rank=4, optimizer=AdamWConfig(learning_rate=0.1))


def faulty(fault: Fault, ms: int = 0) -> dict[str, object]:
    return {"input_ids": [FAULT_TOKEN, int(fault), ms], "inputs": {"target_tokens": [1, 2, 3]}}


def loss_of(training: TrainingClient) -> float:
    return training.evaluate(**DATA).result().metrics["loss:sum"]


def test_training_lowers_the_loss_and_weights_outlive_the_model(client, training):
    before = loss_of(training)
    computed = training.forward_backward(**DATA)
    stepped = training.optim_step()
    fused = training.train_step(**DATA)
    assert [array.shape for array in computed.result().logprobs] == [(3,), (2,)]
    assert -sum(sum(array.tolist()) for array in computed.result().logprobs) == pytest.approx(before, rel=1e-5)
    assert stepped.result().metrics["unclipped_grad_l2:mean"] > 0
    assert {"loss:sum", "unclipped_grad_l2:mean"} <= set(fused.result().metrics)
    after = loss_of(training)
    assert after < before
    saved = training.save_weights(name="a").result()
    training.train_step(**DATA).result()
    assert loss_of(training) != after
    training.load_weights(checkpoint=saved.checkpoint, load_optimizer=True).result()
    assert loss_of(training) == after
    heir = client.training(checkpoint=saved.checkpoint, load_optimizer=True)
    assert loss_of(heir) == after
    heir.unload()


def test_a_result_can_be_sent_as_an_input(training):
    old = training.forward(**DATA).result().logprobs
    inputs = DATA["inputs"] | {"logprobs": old, "advantages": [[1.0] * len(array) for array in old]}
    answer = training.forward_backward(input_ids=DATA["input_ids"], inputs=inputs, loss="importance_sampling").result()
    assert math.isfinite(answer.metrics["loss:sum"])


def test_optimizer_and_schedule_are_kept_with_the_model(client):
    schedule = LrSchedule(kind="linear", warmup_steps=1, total_steps=10)
    info = client.training(base_model=BASE, rank=4, optimizer=AdamWConfig(learning_rate=0.5), schedule=schedule).info()
    assert (info.optimizer.learning_rate, info.schedule, info.lora_rank, info.next_seq) == (0.5, schedule, 4, 1)


def test_published_weights_are_sampled_as_they_were(client, training):
    sampler = training.publish_sampler_weights().result()
    named = training.publish_sampler_weights(name="b").result()
    first = sampler.sample(prompt_ids=[1, 2], max_tokens=4, num_samples=2, seed=1)
    training.train_step(**DATA).result()
    again = client.sampling(checkpoint=named.checkpoint).sample(prompt_ids=[1, 2], max_tokens=4, num_samples=2, seed=1)
    assert first.result() == again.result()
    assert [len(sequence.tokens) for sequence in first.result().sequences] == [4, 4]


def test_a_stream_tells_the_tokens_of_the_result(client):
    sampler = client.sampling(base_model=BASE)
    with sampler.stream(prompt_ids=[1, 2], max_tokens=5, seed=3) as stream:
        frames = list(stream)
    assert (frames[0].type, frames[-1].type) == ("start", "done")
    told = [token for frame in frames if frame.type == "delta" for token in frame.tokens]
    assert told == list(frames[-1].result.sequences[0].tokens)


@pytest.mark.proves("R32")
def test_a_gateway_that_stops_costs_a_stream_no_token(tmp_path):
    """It ends its streams; the next try goes to the one that has taken its place, and follows the sample that has run on."""
    steps = threading.Semaphore(2)
    with serve(tmp_path, Cast(before_step=lambda _: steps.acquire(timeout=20))) as server, Client(server.url) as client:
        with client.sampling(base_model=BASE).stream(prompt_ids=[1, 2], max_tokens=8, stop=[]) as stream:
            frames = [next(stream), next(stream)]
            server.loop.call_soon_threadsafe(server.services.polls.end)
            while server.services.streams.num_open > 0:
                time.sleep(0.005)
            server.services.polls.are_ending = False
            steps.release(1000)
            frames += stream
    told = [token for frame in frames if frame.type == "delta" for token in frame.tokens]
    assert told == list(frames[-1].result.sequences[0].tokens)
    assert len(told) == 8
    assert server.samplers["sampler"].engine.calls["add"] == 1


@pytest.mark.proves("R32")
@pytest.mark.parametrize(("grace_s", "num_drawn"), [(10, 1), (0, 2)], ids=["in time", "too late"])
def test_a_stream_whose_first_answer_is_lost_is_had_all_the_same(tmp_path, grace_s, num_drawn):
    lost: list[httpx.Response] = []

    class Lossy(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            if request.url.path.endswith("/sample_stream") and not lost:
                lost.append(response)
                await response.aclose()
                raise httpx.ReadError("the connection broke")
            return response

    with serve(tmp_path, Cast(before_step=lambda _: time.sleep(0.05))) as server:
        server.services.streams.grace_s = grace_s
        with Client(server.url, transport=Lossy()) as client:
            stream = client.sampling(base_model=BASE).stream(prompt_ids=[1, 2], max_tokens=60, stop=[])
            frames = list(stream)
        told = [token for frame in frames if frame.type == "delta" for token in frame.tokens]
        assert told == list(frames[-1].result.sequences[0].tokens)
        assert len(told) == 60
        assert server.samplers["sampler"].engine.calls["add"] == num_drawn


def test_what_can_be_asked_of_the_server(client, training):
    assert [base.name for base in client.capabilities().base_models] == [BASE]
    assert {process.role for process in client.status().processes} >= {"trainer", "sampler"}
    assert client.capacity().base_models[BASE]["trainer"].num_processes == 1
    assert training.model_id in [model.model_id for model in client.models()]
    assert ("test",) in [session.tags for session in client.sessions()]


@pytest.mark.proves("R25")
def test_a_command_that_has_not_started_can_be_cancelled_and_the_order_goes_on(training):
    running = training.forward_backward(**faulty(Fault.SLEEP, 500))
    waiting = training.train_step(**DATA)
    assert waiting.cancel() is True
    assert running.cancel() is False
    with pytest.raises(TaskCancelled) as raised:
        waiting.result()
    assert raised.value.reason is ReasonCode.CANCELLED
    assert running.result().metrics
    assert training.optim_step().result().metrics


@pytest.mark.proves("R32")
async def test_an_interrupted_wait_drops_its_command_on_the_server(server):
    async with AsyncClient(server.url) as client:
        training = await client.training(base_model=BASE, rank=4)
        running = await training.forward_backward(**faulty(Fault.SLEEP, 500))
        future = await training.forward_backward(**DATA)
        waiting = asyncio.create_task(future.result())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(TaskCancelled):
            await future
        await running


@pytest.mark.proves("R33")
def test_a_failed_task_is_an_exception_and_the_model_goes_on(training):
    before = loss_of(training)
    with pytest.raises(TaskFailed) as raised:
        training.train_step(**faulty(Fault.RAISE)).result()
    assert (raised.value.reason, raised.value.error_code) == (ReasonCode.INTERNAL_ERROR, 500)
    assert "Traceback" not in str(raised.value)
    assert loss_of(training) == before


@pytest.mark.proves("R31")
def test_a_refused_call_leaves_its_seq_id_to_the_next(training):
    training.train_step(**DATA).result()
    for bad in ({"loss": "nonsense"}, {"loss_config": {"beta": 1.0}}):
        with pytest.raises(HttpError) as raised:
            training.train_step(**DATA, **bad)
        assert (raised.value.status, raised.value.category.value) == (422, "user")
    with pytest.raises(ClientValidationError):
        training.train_step(**DATA, micro_batch_tokens=0)
    assert training.info().next_seq == 2
    training.train_step(**DATA).result()
    assert training.info().next_seq == 3


def test_a_wait_that_timed_out_can_be_taken_up_by_another_client(server, training):
    future = training.forward_backward(**faulty(Fault.SLEEP, 500))
    with pytest.raises(WaitTimedOut):
        future.result(timeout=0.05)
    with Client(server.url) as other:
        assert other.future(future.request_id, PassResult).result() == future.result()
        with pytest.raises(RecordLost):
            other.future("t-unknown").result()


@pytest.mark.proves("R32")
def test_hundreds_of_waiters_share_their_polls_and_all_wake(client):
    sampler = client.sampling(base_model=BASE)

    async def all_samples() -> int:
        futures = await asyncio.gather(*(sampler.core.sample(prompt_ids=[1, number], max_tokens=2) for number in range(300)))
        return len(await asyncio.gather(*futures))

    began = time.monotonic()
    assert client.run(all_samples()) == 300
    assert time.monotonic() - began < 60


def test_any_thread_may_train(client):
    def train(_: int) -> float:
        mine = client.training(base_model=BASE, rank=4)
        return mine.train_step(**DATA).result().metrics["loss:sum"]

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(train, range(4)))) == 4


def test_two_clients_of_two_servers_never_mix(server, tmp_path: Path):
    with serve(tmp_path) as second, Client(server.url) as here, Client(second.url) as there:
        ours, theirs = here.training(base_model=BASE, rank=4), there.training(base_model=BASE, rank=4)
        ours.train_step(**DATA).result()
        theirs.train_step(**DATA).result()
        theirs.train_step(**DATA).result()
        assert (ours.info().next_seq, theirs.info().next_seq) == (2, 3)
        assert [model.model_id for model in there.models()] == [theirs.model_id]
        assert theirs.model_id not in [model.model_id for model in here.models()]


def test_the_session_ends_with_the_client(server):
    with Client(server.url, display_name="short") as client:
        client.sampling(base_model=BASE)
    with Client(server.url) as other:
        [ended] = [session for session in other.sessions() if session.display_name == "short"]
    assert (ended.end_reason, ended.ended_ms is not None) == ("success", True)


def test_no_log_line_of_a_real_exchange_holds_the_key(server, caplog):
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "httpx"), Client(server.url, KEY) as client:
        client.capabilities()
        with pytest.raises(HttpError):
            client.training(base_model="org/absent")
    assert "HTTP Request" in caplog.text
    assert KEY not in caplog.text
