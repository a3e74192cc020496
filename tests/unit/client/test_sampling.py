"""Sampling: what is asked for, and whole results."""

import asyncio

import numpy as np
import pytest

from tinsmith.client import ChatMessage, ClientValidationError
from tinsmith.protocol import native


async def test_a_sample_is_asked_for_in_the_protocols_words(sampling, server):
    future = await sampling.sample(
        prompt_ids=np.array([1, 2]),
        num_samples=2,
        max_tokens=8,
        temperature=0.0,
        top_k=5,
        top_p=0.9,
        seed=3,
        stop_token_ids=[7],
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
    )
    assert (await future).sequences[0].tokens == (5,)
    sent = server.calls[-1].request
    assert (sent.sampler_id, sent.num_samples, sent.prompt_logprobs, sent.topk_prompt_logprobs) == ("sampler-1", 2, True, 2)
    assert list(sent.prompt_ids.whole().shape) == [2]
    assert sent.sampling == native.SamplingOptions(max_tokens=8, temperature=0.0, top_k=5, top_p=0.9, seed=3, stop_token_ids=(7,))


async def test_a_prompt_may_be_a_chat_or_a_text(sampling, server):
    await sampling.sample(messages=[{"role": "user", "content": "hi"}, ChatMessage(role="assistant", content="ho")], stop=["."])
    await sampling.sample(text="once")
    chat, text = (call.request for call in server.calls[-2:])
    assert [message.content for message in chat.messages] == ["hi", "ho"]
    assert (chat.sampling.stop, text.text, text.sampling.stop) == ((".",), "once", None)


@pytest.mark.proves("R33")
async def test_a_message_that_no_request_can_hold_is_named(sampling, server):
    num_calls = len(server.calls)
    chat = [{"role": "user", "content": "a"}, ChatMessage(role="user", content="b\ud800")]
    for call in (lambda: sampling.sample(messages=chat), lambda: anext(sampling.stream(messages=chat))):
        with pytest.raises(ClientValidationError) as raised:
            await call()
        assert raised.value.field == "messages.1.content"
    assert len(server.calls) == num_calls


async def test_no_two_samples_share_a_seq_id(sampling, server):
    await asyncio.gather(*(sampling.sample(text="a") for _ in range(5)))
    assert sorted(call.seq_id for call in server.of("/sample")) == [0, 1, 2, 3, 4]


@pytest.mark.proves("R37")
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt_ids, messages, text"),
        ({"text": "a", "prompt_ids": [1]}, "prompt_ids, messages, text"),
        ({"text": "a", "temperature": -1.0}, "temperature"),
        ({"text": "a", "top_p": 0.0}, "top_p"),
        ({"text": "a", "stop": ["."], "stop_token_ids": [1]}, "stop, stop_token_ids"),
        ({"text": "a", "num_samples": 0}, "num_samples"),
        ({"prompt_ids": ["a"]}, "prompt_ids"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ],
)
async def test_a_wrong_argument_is_named_before_any_request(sampling, server, arguments, field):
    num_calls = len(server.calls)
    with pytest.raises(ClientValidationError) as raised:
        await sampling.sample(**arguments)
    assert raised.value.field == field
    with pytest.raises(ClientValidationError) as raised:
        sampling.stream(**arguments)
    assert raised.value.field == field
    with pytest.raises(TypeError, match="tempurature"):
        sampling.stream(text="a", tempurature=1.0)
    assert len(server.calls) == num_calls


async def test_a_sampler_is_of_a_base_model_or_of_a_checkpoint(client, server):
    first = await client.sampling(base_model="org/tiny")
    await client.sampling(checkpoint="tinker://m/sampler_weights/a")
    base, checkpoint = (call.request for call in server.of("/create_sampler"))
    assert (base.base_model, base.sampler_seq, checkpoint.checkpoint, checkpoint.sampler_seq) == (
        "org/tiny",
        0,
        "tinker://m/sampler_weights/a",
        1,
    )
    assert repr(first) == "AsyncSamplingClient('sampler-1')"
    with pytest.raises(ClientValidationError):
        await client.sampling()
