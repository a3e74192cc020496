"""OpenAI's own client against a whole server in this process: with fake engines, and once with a real sampler."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.fakes import in_process
from tests.fakes.in_process import BASE, Cast, InProcessServer, serve
from tests.integration.test_streams import Steps
from tinsmith.client import AdamWConfig, Client
from tinsmith.engines.hf_sampler import HfSampler
from tinsmith.gateway.waiting import settled
from tinsmith.protocol.futures import State
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.tokenizer import Tokenizer

WAIT_S = 60
CHAT: Any = [{"role": "user", "content": "Name a colour."}]


def client_of(server: InProcessServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="tml-any", max_retries=0, timeout=WAIT_S)


@pytest.fixture(scope="module")
def info(tiny_model: BaseModelInfo) -> BaseModelInfo:
    return tiny_model.model_copy(update={"name": BASE})


@pytest.fixture(scope="module")
def server(info: BaseModelInfo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process, "INFO", info)
        with serve(tmp_path_factory.mktemp("root"), Cast()) as running:
            yield running


@pytest.fixture
def client(server: InProcessServer) -> Iterator[OpenAI]:
    with closing(client_of(server)) as opened:
        yield opened


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [BASE]
    assert client.models.retrieve(BASE).id == BASE
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("org/none")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_a_completion_and_its_repeat(client: OpenAI) -> None:
    ask = {"model": BASE, "prompt": [5, 6, 7], "max_tokens": 6, "seed": 4, "n": 2, "extra_body": {"return_token_ids": True}}
    first, again, other = (client.completions.create(**(ask | changes)) for changes in ({}, {}, {"seed": 5}))
    ids = [choice.token_ids for choice in first.choices]  # type: ignore[attr-defined]
    assert [len(tokens) for tokens in ids] == [6, 6]
    assert ids[0] != ids[1]
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert [choice.text for choice in first.choices] != [choice.text for choice in other.choices]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens) == (3, 12, 15)
    assert [choice.finish_reason for choice in first.choices] == ["length", "length"]


def test_a_chat_and_its_stream_agree(client: OpenAI) -> None:
    ask = {"model": BASE, "messages": CHAT, "max_completion_tokens": 8, "seed": 4, "logprobs": True}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    told = [entry.logprob for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    assert told == pytest.approx([entry.logprob for entry in whole.choices[0].logprobs.content or ()])
    assert len(told) == 8


def test_a_request_at_fault_is_the_clients_bad_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=BASE, messages=CHAT, response_format={"type": "json_object"})
    assert (raised.value.param, raised.value.code, raised.value.type) == (
        "response_format",
        "unsupported_parameter",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=BASE, prompt=[5] * 5000)
    assert raised.value.code == "context_length_exceeded"


def test_a_stream_that_its_caller_leaves_ends_its_sample(info: BaseModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "INFO", info)
    steps = Steps()
    with serve(tmp_path, Cast(before_step=steps.take)) as server, closing(client_of(server)) as client:
        try:
            steps.allow(3)
            with client.completions.create(model=BASE, prompt=[5], max_tokens=2000, stream=True) as stream:
                rid = next(iter(stream)).id.removeprefix("cmpl-")
            record = server.call(settled(server.services, "local", rid, WAIT_S))
            assert record.state is State.CANCELLED
        finally:
            steps.allow(10_000)


def test_a_checkpoint_that_was_trained_here_is_a_model(client: OpenAI, server: InProcessServer) -> None:
    with Client(server.url, "tml-any") as trainer:
        training = trainer.training(base_model=BASE, rank=4, optimizer=AdamWConfig(learning_rate=0.5))
        training.train_step(input_ids=[[5, 6, 7]], inputs={"target_tokens": [[6, 7, 8]]}).result()
        path = training.publish_sampler_weights(name="learnt").result().checkpoint
        assert path in [model.id for model in client.models.list()]
        assert client.models.retrieve(path).id == path
        ask: Any = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0, "logprobs": 0}
        learnt, base = (client.completions.create(model=model, **ask).choices[0].logprobs for model in (path, BASE))
        assert learnt.token_logprobs != base.token_logprobs


def test_the_real_sampler(info: BaseModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def real(**_: object) -> HfSampler:
        return HfSampler(info, "fp32", max_rows=4, max_adapters=1)

    monkeypatch.setattr(in_process, "INFO", info)
    monkeypatch.setattr(in_process, "FakeSamplingEngine", real)
    tokenizer = Tokenizer.from_dir(info.path)
    with serve(tmp_path) as server, closing(client_of(server)) as client:
        ask = {"model": BASE, "messages": CHAT, "max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 1, "logprobs": True}
        whole = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
        (choice,) = whole.choices
        ids = choice.token_ids  # type: ignore[attr-defined]
        assert choice.message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert len(choice.logprobs.content) == len(ids) == whole.usage.completion_tokens
        assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
        streamed = client.chat.completions.create(**ask, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content
        greedy = client.chat.completions.create(model=BASE, messages=CHAT, max_tokens=1, temperature=0, logprobs=True, top_logprobs=3)
        (entry,) = greedy.choices[0].logprobs.content
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 3
        forced = client.completions.create(
            model=BASE, prompt=ids, max_tokens=3, logit_bias={"100": 100}, extra_body={"return_token_ids": True}
        )
        assert forced.choices[0].token_ids == [100] * 3
        stopped = client.completions.create(
            model=BASE, prompt=ids, max_tokens=9, logit_bias={"100": 100}, stop=[tokenizer.decode([100] * 2)]
        )
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
        assert stopped.usage.completion_tokens == 2
