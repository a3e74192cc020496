"""Commands of one model: what is sent, and under which seq id."""

import asyncio

import httpx
import numpy as np
import pytest

from tests.fakes.native_server import envelope, refused
from tinsmith.client import (
    AdamWConfig,
    AsyncSamplingClient,
    ChatMessage,
    ClientValidationError,
    ConnectionFailed,
    Conversation,
    HttpError,
    LrSchedule,
    SgdConfig,
    TaskFailed,
    TokenBatch,
)
from tinsmith.client.arrays import int_array
from tinsmith.protocol import native
from tinsmith.protocol.errors import QuotaExceeded, RequestRejected, StateContention, ValidationFailed

STEP = "/optim_step"
INFO = {"model_id": "model-1", "session_id": "session-1", "base_model": "org/tiny", "lora_rank": 8, "created_ms": 1}


def info(next_seq: int | None) -> httpx.Response:
    return httpx.Response(200, json=INFO | {"next_seq": next_seq})


def seqs(server, path: str = STEP) -> list[int]:
    return [call.seq_id for call in server.of(path)]


# Order


@pytest.mark.proves("R31")
async def test_seq_ids_count_from_one_in_the_order_of_the_calls(training, server):
    async def slow(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.02)
        return envelope("completed", result={"metrics": {}})

    server.script("/forward_backward", slow)
    await asyncio.gather(training.forward_backward(texts=["a"]), training.optim_step(), training.save_weights(name="a"))
    assert [(call.path, call.seq_id) for call in server.calls[2:]] == [("/forward_backward", 1), (STEP, 2), ("/save_weights", 3)]


@pytest.mark.proves("R31")
async def test_a_refused_call_gives_its_seq_id_to_the_next_call(training, server):
    await training.optim_step()
    server.script(STEP, refused(ValidationFailed("no")), refused(QuotaExceeded("full")), *[refused(QuotaExceeded("full"))] * 5)
    for _ in range(2):
        with pytest.raises(HttpError):
            await training.optim_step()
    await training.optim_step()
    assert seqs(server) == [1, 2, *[2] * 6, 2]


@pytest.mark.proves("R31")
async def test_a_lost_reply_is_sent_again_under_the_same_seq_id(training, server):
    server.script(STEP, httpx.ReadError("cut"), refused(StateContention("away")))
    await training.optim_step()
    await training.optim_step()
    assert seqs(server) == [1, 1, 1, 2]


@pytest.mark.proves("R31")
@pytest.mark.parametrize(("next_seq", "used"), [(1, 1), (2, 2), (None, 1)])
async def test_after_a_call_of_unknown_end_the_server_says_which_seq_id_is_next(training, server, next_seq, used):
    server.script(STEP, *[httpx.ReadError("cut")] * 6)
    with pytest.raises(ConnectionFailed):
        await training.optim_step()
    server.script("/models/model-1", info(next_seq))
    await training.optim_step()
    await training.optim_step()
    assert seqs(server)[6:] == [used, used + 1]
    assert len(server.of("/models/model-1")) == 1


@pytest.mark.proves("R31")
@pytest.mark.parametrize(
    "replies", [[httpx.ReadError("cut"), refused(ValidationFailed("no"))], [refused(RequestRejected("another body is under it"))]]
)
async def test_a_refusal_that_leaves_the_seq_id_in_doubt_asks_the_server_too(training, server, replies):
    server.script(STEP, *replies)
    with pytest.raises(HttpError):
        await training.optim_step()
    server.script("/models/model-1", info(5))
    await training.optim_step()
    assert seqs(server)[-1] == 5


@pytest.mark.proves("R31")
async def test_a_call_that_was_cancelled_underway_leaves_no_hole(training, server):
    arrived = asyncio.Event()

    async def hang(_: httpx.Request) -> httpx.Response:
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError

    server.script(STEP, hang)
    submitting = asyncio.create_task(training.optim_step())
    await arrived.wait()
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    server.script("/models/model-1", info(2))
    await training.optim_step()
    assert seqs(server) == [1, 2]


@pytest.mark.proves("R37")
async def test_an_argument_that_is_wrong_costs_no_request_and_no_seq_id(training, server):
    num_calls = len(server.calls)
    with pytest.raises(ClientValidationError):
        await training.save_weights(name="")
    with pytest.raises(TypeError, match="input_idz"):
        await training.forward(input_idz=[1])
    assert len(server.calls) == num_calls
    await training.optim_step()
    assert seqs(server) == [1]


# What is sent


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("forward", native.Forward),
        ("forward_backward", native.ForwardBackward),
        ("evaluate", native.Evaluate),
        ("train_step", native.TrainStep),
    ],
)
async def test_each_pass_sends_its_own_request(training, server, method, kind):
    await getattr(training, method)(
        input_ids=[[1, 2], [3]],
        inputs={"target_tokens": [[2, 3], [4]], "weights": [[1.0, 1.0], [0.5]]},
        loss="importance_sampling",
        loss_config={"beta": 0.2},
        micro_batch_tokens=64,
    )
    sent = server.calls[-1].request
    assert type(sent) is kind
    assert sent.batch.input_ids.value == [[1, 2], [3]]
    assert {name: column.value for name, column in sent.batch.inputs.items()} == {
        "target_tokens": [[2, 3], [4]],
        "weights": [[1.0, 1.0], [0.5]],
    }
    assert (sent.loss, sent.loss_config, sent.micro_batch_tokens) == ("importance_sampling", {"beta": 0.2}, 64)
    assert (sent.model_id, sent.texts, sent.conversations) == ("model-1", None, None)


async def test_a_batch_can_be_made_beforehand(training, server):
    batch = TokenBatch(input_ids=int_array("input_ids", np.array([[1, 2]])))
    await training.forward(batch=batch)
    assert server.calls[-1].request.batch.input_ids.whole() == batch.input_ids.whole()


async def test_conversations_come_as_messages_or_as_plain_turns(training, server):
    turns = [{"role": "user", "content": "hi"}, ChatMessage(role="assistant", content="ho")]
    await training.train_step(conversations=[turns, Conversation(messages=(ChatMessage(role="user", content="x"),))])
    first, second = server.calls[-1].request.conversations
    assert [(message.role, message.content) for message in first.messages] == [("user", "hi"), ("assistant", "ho")]
    assert len(second.messages) == 1


async def test_texts_are_sent_as_they_are(training, server):
    await training.evaluate(texts=["a", "b"])
    assert server.calls[-1].request.texts == ("a", "b")


async def test_a_step_may_name_its_optimizer(training, server):
    await training.optim_step(optimizer=AdamWConfig(learning_rate=0.5))
    await training.optim_step(optimizer=SgdConfig(momentum=0.5))
    await training.train_step(texts=["a"], optimizer=AdamWConfig(max_grad_norm=1.0))
    await training.train_step(texts=["a"])
    adamw, sgd, fused, plain = [call.request.optimizer for call in server.calls[-4:]]
    assert (adamw.learning_rate, sgd.momentum, fused.max_grad_norm, plain) == (0.5, 0.5, 1.0, None)


async def test_checkpoints_are_saved_and_loaded(training, server):
    saved = await (await training.save_weights(name="a", overwrite=True, ttl_s=7200, metadata={"k": "v"}))
    loaded = await (await training.load_weights(checkpoint=saved.checkpoint, load_optimizer=True))
    save, load = (call.request for call in server.calls[-2:])
    assert (save.name, save.overwrite, save.ttl_s, save.metadata) == ("a", True, 7200, {"k": "v"})
    assert (load.checkpoint, load.load_optimizer) == (saved.checkpoint, True) == (loaded.checkpoint, True)


async def test_sampler_weights_are_published_under_a_name(training, server):
    server.script("/publish_sampler_weights", envelope("completed", result={"checkpoint": "tinker://m/sampler_weights/a"}))
    published = await (await training.publish_sampler_weights(name="a", ttl_s=7200, metadata={"k": "v"}))
    sent = server.calls[-1].request
    assert (sent.name, sent.sampler_seq, sent.ttl_s, sent.metadata) == ("a", None, 7200, {"k": "v"})
    assert published.checkpoint == "tinker://m/sampler_weights/a"


async def test_sampler_weights_without_a_name_give_a_ready_sampling_client(client, training, server):
    await client.sampling(base_model="org/tiny")
    future = await training.publish_sampler_weights()
    sampler = await future
    assert isinstance(sampler, AsyncSamplingClient)
    assert await future is sampler
    assert (sampler.sampler_id, server.calls[-1].request.sampler_seq, server.calls[-1].request.name) == ("sampler-2", 1, None)
    await sampler.sample(text="a")
    assert server.calls[-1].request.sampler_id == "sampler-2"


async def test_info_and_unload_speak_of_the_model(training, server):
    server.script("/models/model-1", info(3))
    assert (await training.info()).next_seq == 3
    await training.unload()
    assert server.calls[-1].request == native.UnloadModel(model_id="model-1")
    assert repr(training) == "AsyncTrainingClient('model-1')"


# What is not


@pytest.mark.proves("R33", "R37")
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "batch, conversations, texts"),
        ({"texts": ["a"], "input_ids": [1]}, "batch, conversations, texts"),
        ({"texts": "abc"}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": [1]}, "texts.0"),
        ({"inputs": {"weights": [1.0]}}, "inputs"),
        ({"input_ids": [1], "batch": TokenBatch(input_ids=int_array("i", [1]))}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [1], "inputs": {"weights": [[1.0], 2.0]}}, "inputs.weights"),
        ({"texts": ["a"], "loss_config": {"beta": "x"}}, "loss_config.beta"),
        ({"texts": ["a"], "micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"texts": ["a"], "loss": 3}, "loss"),
        ({"conversations": [[]]}, "conversations.0.messages"),
        ({"conversations": [["hi"]]}, "conversations.0.0"),
        ({"conversations": [[{"role": "boss", "content": "x"}]]}, "conversations.0.0.role"),
        ({"texts": ["a"], "optimizer": {"learning_rate": 0.1}}, "optimizer"),
        ({"texts": ["a"], "optimizer": "adam"}, "optimizer"),
    ],
)
async def test_a_wrong_argument_of_a_pass_is_named_before_any_request(training, server, arguments, field):
    num_calls = len(server.calls)
    with pytest.raises(ClientValidationError) as raised:
        await training.train_step(**arguments)
    assert raised.value.field.startswith(field)
    assert len(server.calls) == num_calls


@pytest.mark.parametrize("arguments", [{"ttl_s": 7200}, {"metadata": {}}])
async def test_only_named_sampler_weights_have_a_lifetime_and_metadata(training, arguments):
    with pytest.raises(ClientValidationError, match="name: is missing"):
        await training.publish_sampler_weights(**arguments)


async def test_a_command_that_fails_keeps_its_seq_id(training, server):
    error = {"error": "no", "reason": "validation_failed", "category": "user", "error_code": 422}
    server.script(STEP, envelope("failed", error=error))
    future = await training.optim_step()
    with pytest.raises(TaskFailed):
        await future
    await training.optim_step()
    assert seqs(server) == [1, 2]


# Its creation


async def test_a_model_is_created_as_it_was_asked_for(client, server):
    schedule = LrSchedule(kind="linear", warmup_steps=2, total_steps=10)
    await client.training(
        base_model="org/tiny", rank=4, seed=7, train_mlp=False, optimizer=SgdConfig(momentum=0.5), schedule=schedule, metadata={"k": "v"}
    )
    await client.training(checkpoint="tinker://m/weights/a", load_optimizer=True)
    first, second = (call.request for call in server.of("/create_model"))
    assert (first.session_id, first.model_seq, first.base_model, first.metadata) == ("session-1", 0, "org/tiny", {"k": "v"})
    assert first.lora == native.LoraOptions(rank=4, seed=7, train_mlp=False)
    assert (first.optimizer, first.schedule) == (SgdConfig(momentum=0.5), schedule)
    assert (second.model_seq, second.lora, second.checkpoint, second.load_optimizer) == (1, None, "tinker://m/weights/a", True)


@pytest.mark.proves("R37")
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "base_model, checkpoint"),
        ({"checkpoint": "c", "rank": 4}, "lora"),
        ({"base_model": "b", "rank": 0}, "rank"),
        ({"base_model": "b", "load_optimizer": True}, "load_optimizer"),
        ({"base_model": "b", "train_attn": False, "train_mlp": False, "train_unembed": False}, "train_attn, train_mlp, train_unembed"),
    ],
)
async def test_a_model_that_cannot_be_is_refused_before_any_request(client, server, arguments, field):
    with pytest.raises(ClientValidationError) as raised:
        await client.training(**arguments)
    assert raised.value.field == field
    assert server.calls == []


async def test_a_creation_that_fails_is_raised_where_it_was_asked_for(client, server):
    error = {"error": "no slot", "reason": "internal_error", "category": "server", "error_code": 500}
    server.script("/create_model", envelope("pending"))
    server.script("/retrieve_future", envelope("failed", error=error))
    with pytest.raises(TaskFailed, match="no slot"):
        await client.training(base_model="b")


@pytest.mark.proves("R33")
@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"texts": ["a", "b\ud800"]}, "texts.1"),
        ({"conversations": [[{"role": "user", "content": "\udfffa"}]]}, "conversations.0.messages.0.content"),
    ],
)
async def test_a_text_that_no_request_can_hold_is_named_and_the_next_call_takes_the_seq_id(training, server, data, field):
    num_calls = len(server.calls)
    with pytest.raises(ClientValidationError) as raised:
        await training.forward(**data)
    assert raised.value.field == field
    str(raised.value).encode()
    assert len(server.calls) == num_calls
    await training.forward(texts=["a"])
    assert [(call.path, call.seq_id) for call in server.calls[num_calls:]] == [("/forward", 1)]
