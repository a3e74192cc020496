"""A program against both faces of the client that `mypy --strict` accepts; what it reveals is asserted by type."""

import array
from typing import assert_type

from pydantic import JsonValue

from tinsmith.client import (
    AdamWConfig,
    AsyncClient,
    AsyncFuture,
    AsyncSamplingClient,
    AsyncTrainingClient,
    Capabilities,
    Client,
    Future,
    LrSchedule,
    ModelInfo,
    PassResult,
    ResultArray,
    SampleResult,
    SamplingClient,
    SgdConfig,
    StepResult,
    Stream,
    StreamFrame,
    TaskEnvelope,
    TrainingClient,
    WeightsPublished,
    WeightsSaved,
)


def report(task: TaskEnvelope) -> None:
    print(task.status, task.queue_state)


async def with_await() -> None:
    async with AsyncClient("http://127.0.0.1:8700", api_key="tml-local", on_progress=report) as client:
        training = await client.training(
            base_model="org/tiny",
            rank=8,
            optimizer=AdamWConfig(learning_rate=1e-3, max_grad_norm=1.0),
            schedule=LrSchedule(kind="cosine", warmup_steps=10, total_steps=100),
        )
        assert_type(training, AsyncTrainingClient)
        future = await training.forward_backward(
            input_ids=[[1, 2, 3], [4, 5]],
            inputs={"target_tokens": [[2, 3, 4], [5, 6]], "weights": [array.array("f", [1, 1, 1]), array.array("f", [1, 1])]},
        )
        assert_type(future, AsyncFuture[PassResult])
        result = await future
        assert_type(result, PassResult)
        assert_type(result.logprobs, tuple[ResultArray, ...])
        again = await training.forward(input_ids=result.logprobs[:0], inputs={"logprobs": result.logprobs})
        assert_type(await again.result(timeout=5), PassResult)
        assert_type(await (await training.optim_step(optimizer=SgdConfig(momentum=0.9))), StepResult)
        assert_type(await (await training.publish_sampler_weights(name="a")), WeightsPublished)
        sampler = await (await training.publish_sampler_weights())
        assert_type(sampler, AsyncSamplingClient)
        async for frame in sampler.stream(text="Once", max_tokens=8):
            assert_type(frame, StreamFrame)
        assert_type(await client.future("id"), JsonValue)
        assert_type(await client.future("id", SampleResult), SampleResult)
        assert_type(await client.capabilities(), Capabilities)


def without_await() -> None:
    with Client("http://127.0.0.1:8700", "tml-local") as client:
        training = client.training(checkpoint="tinker://run/weights/a", load_optimizer=True)
        assert_type(training, TrainingClient)
        future = training.train_step(
            conversations=[[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]],
            loss_config={},
            optimizer=AdamWConfig(),
        )
        assert_type(future, Future[PassResult])
        assert_type(future.result(timeout=60, on_progress=report).metrics["loss:sum"], float)
        assert_type(training.evaluate(texts=["a"]).result(), StepResult)
        assert_type(training.save_weights(name="a", ttl_s=7200).result(), WeightsSaved)
        assert_type(training.info(), ModelInfo)
        assert_type(training.publish_sampler_weights(name="a").result(), WeightsPublished)
        sampler = training.publish_sampler_weights().result()
        assert_type(sampler, SamplingClient)
        assert_type(sampler.sample(messages=[{"role": "user", "content": "hi"}], seed=1).result(), SampleResult)
        stream = sampler.stream(prompt_ids=[1, 2])
        assert_type(stream, Stream)
        for frame in stream:
            assert_type(frame, StreamFrame)
        assert_type(client.future("id", WeightsSaved).result(), WeightsSaved)
        training.unload()
