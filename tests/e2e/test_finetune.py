"""SmolLM2 in fp32, the stock SDK, the server as users start it: what is trained equals the same loop on the engine, bit for bit."""

import math
import statistics
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.conftest import Stack, Weights, lora_b
from tests.e2e.lessons import (
    LEARNING_RATE,
    SMOLLM2,
    Loop,
    create,
    logprobs_of,
    pipelined_losses,
    sdk_datum,
    tokens_of,
)
from tinsmith.engines.base import Contents
from tinsmith.engines.peft_engine import PeftEngine

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=stack.server.url, api_key="tml-local")
    yield client
    client.close("success").result()


@pytest.fixture
def loop(engine: PeftEngine) -> Iterator[Loop]:
    loop = Loop(engine, "reference")
    yield loop
    loop.close()


def test_forward_equals_forward_backward(service: tinker.ServiceClient) -> None:
    client = create(service)
    data = [sdk_datum(lesson) for lesson in range(3)]
    forward = client.forward(data, "cross_entropy").result()
    backward = client.forward_backward(data, "cross_entropy").result()
    assert logprobs_of(forward) == logprobs_of(backward)
    assert forward.metrics["loss:sum"] == backward.metrics["loss:sum"]
    assert math.isclose(-sum(map(sum, logprobs_of(forward))), forward.metrics["loss:sum"], rel_tol=1e-5)


def test_a_call_split_into_three_chunks_equals_the_unsplit_one(stack: Stack, service: tinker.ServiceClient, loop: Loop) -> None:
    """The server tells clients to send at most 4 datums a chunk, so 10 go out as three requests, the first one last."""
    client = create(service)
    lessons = range(10)
    split = client.forward_backward([sdk_datum(lesson) for lesson in lessons], "cross_entropy").result()
    whole = loop.forward_backward(lessons)
    assert math.isclose(split.metrics["loss:sum"], whole.metrics["loss:sum"], rel_tol=1e-5)
    for ours, tensor in zip(logprobs_of(split), whole.logprobs, strict=True):
        np.testing.assert_allclose(ours, np.frombuffer(tensor.data, np.float32), atol=1e-5)
    # With a huge eps a first Adam step is lr / eps * gradient: the weights of B, zero before, then are the gradient.
    huge = 1e12
    ours_step = client.optim_step(types.AdamParams(learning_rate=huge, eps=huge)).result()
    reference_step = loop.optim_step(learning_rate=huge, eps=huge)
    norm = "unclipped_grad_l2:mean"
    assert ours_step.metrics is not None
    assert math.isclose(ours_step.metrics[norm], reference_step.metrics[norm], rel_tol=1e-5)
    path = client.save_state("gradient").result().path
    ours_b, reference_b = stack.lora_b(path), loop_lora_b(loop)
    assert ours_b.keys() == reference_b.keys()
    difference = math.sqrt(sum(float(((ours_b[name] - reference_b[name]) ** 2).sum()) for name in ours_b))
    size = math.sqrt(sum(float((reference_b[name] ** 2).sum()) for name in reference_b))
    assert difference / size < 1e-5


def test_twenty_pipelined_steps_equal_the_loop_in_process(service: tinker.ServiceClient, loop: Loop) -> None:
    assert pipelined_losses(create(service), 20) == loop.losses(20)


def test_a_new_client_from_state_with_optimizer_goes_on_bit_for_bit(service: tinker.ServiceClient) -> None:
    client = create(service)
    pipelined_losses(client, 3)
    path = client.save_state("resume").result().path
    uninterrupted = pipelined_losses(client, 5, first=3)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert pipelined_losses(resumed, 5, first=3) == uninterrupted
    fresh_optimizer = service.create_training_client_from_state(path).result()
    assert pipelined_losses(fresh_optimizer, 2, first=3) != uninterrupted[:2]


def test_the_sampler_agrees_with_the_trainer_and_a_snapshot_stays_fixed(service: tinker.ServiceClient) -> None:
    client = create(service)
    pipelined_losses(client, 4)
    sampler = client.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    prompt = tokens_of(1, 8)
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=[])
    sampled = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0]
    assert len(sampled.tokens) == 12
    assert sampled.logprobs is not None
    trained = trainer_logprobs(client, prompt, list(sampled.tokens))
    gap = statistics.fmean(abs(q - p) for q, p in zip(sampled.logprobs, trained, strict=True))
    assert gap < 0.02
    before = sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
    assert before[0] is None
    pipelined_losses(client, 3, first=4)
    assert sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result() == before
    moved = client.save_weights_and_get_sampling_client()
    moved = moved.result() if hasattr(moved, "result") else moved
    assert moved.compute_logprobs(types.ModelInput.from_ints(prompt)).result() != before


def test_two_interleaved_adapters_equal_their_solo_runs(service: tinker.ServiceClient, engine: PeftEngine) -> None:
    one, two = create(service, seed=1), create(service, seed=2)
    pending = []
    for step in range(4):
        for client, first in ((one, 0), (two, 50)):
            pending.append((client, client.forward_backward([sdk_datum(first + step), sdk_datum(first + step + 1)], "cross_entropy")))
            client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    losses = {one: [], two: []}  # type: dict[tinker.TrainingClient, list[float]]
    for client, future in pending:
        losses[client].append(future.result().metrics["loss:sum"])
    for client, seed, first in ((one, 1, 0), (two, 2, 50)):
        solo = Loop(engine, f"solo-{seed}", seed=seed)
        assert losses[client] == solo.losses(4, first=first)
        solo.close()


def test_bad_input_fails_at_once_and_the_client_goes_on(service: tinker.ServiceClient) -> None:
    client = create(service)
    good = sdk_datum(0)
    before = client.forward([good], "cross_entropy").result()

    def refused(call: object) -> None:
        started = time.monotonic()
        with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)) as caught:
            call()  # type: ignore[operator]
        assert time.monotonic() - started < 1.0
        error = caught.value
        if isinstance(error, tinker.RequestFailedError):
            assert error.category == "user"
        else:
            assert 400 <= error.status_code < 500

    no_targets = types.Datum(model_input=good.model_input, loss_fn_inputs={"weights": [1.0] * 12})  # type: ignore[dict-item]
    too_long = sdk_datum(0, length=9000)
    refused(lambda: client.forward_backward([good], "no_such_loss").result())  # type: ignore[arg-type]
    refused(lambda: client.forward_backward([no_targets], "cross_entropy").result())
    refused(lambda: client.forward_backward([too_long], "cross_entropy").result())
    refused(lambda: service.create_lora_training_client(base_model="no/such-model").result())
    sampler = service.create_sampling_client(base_model=SMOLLM2)
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    long_prompt = types.ModelInput.from_ints([100] * 9000)
    refused(lambda: sampler.sample(long_prompt, 1, types.SamplingParams(max_tokens=4)).result())
    after = client.forward([good], "cross_entropy").result()
    assert logprobs_of(after) == logprobs_of(before)


@pytest.mark.proves("I1", "I2", "I8")
def test_killed_trainer_and_gateway_cost_time_and_no_work(stack: Stack, service: tinker.ServiceClient, loop: Loop) -> None:
    client = create(service)
    steps = 30
    futures = []
    for step in range(steps):
        futures.append(client.forward_backward([sdk_datum(step), sdk_datum(step + 1)], "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    futures[4].result()
    stack.kill("trainer")
    futures[8].result()
    stack.kill("gateway")
    losses = [future.result().metrics["loss:sum"] for future in futures]
    assert losses == loop.losses(steps)


def test_killed_redis_costs_time_and_no_work(stack: Stack, service: tinker.ServiceClient, loop: Loop) -> None:
    if stack.redis is None:
        pytest.skip("the memory store has no process of its own to kill")
    client = create(service)
    steps = 16
    futures = []
    for step in range(steps):
        futures.append(client.forward_backward([sdk_datum(step), sdk_datum(step + 1)], "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    futures[3].result()
    stack.redis.kill()
    time.sleep(3)  # the outage itself, not a wait for something
    stack.redis.restart()
    losses = [future.result().metrics["loss:sum"] for future in futures]
    assert losses == loop.losses(steps)


def trainer_logprobs(client: tinker.TrainingClient, prompt: list[int], sampled: list[int]) -> list[float]:
    """The trainer's log-probs of the sampled tokens, from one forward over prompt and sample."""
    tokens = prompt + sampled
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})  # type: ignore[dict-item]
    return logprobs_of(client.forward([datum], "cross_entropy").result())[0][len(prompt) - 1 :]


def loop_lora_b(loop: Loop) -> Weights:
    return lora_b(dict(loop.engine.capture(loop.model_id, Contents.CHECKPOINT)))
