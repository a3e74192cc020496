"""infonce against a float64 reference and automatic differentiation; its pass on the tiny model."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.engines.datums import array, compute, datum
from tests.unit.engines.peft import computed, refused, run, state
from tinsmith.engines import unembed
from tinsmith.engines.embedding import infonce
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.training import AdamParams, Compute, LoraConfig, OptimStep, TrainStep

LORA = LoraConfig(rank=8, seed=11, train_unembed=False)
STEP = OptimStep(optimizer=AdamParams(learning_rate=1e-3, eps=1e-6))
LENGTHS = (5, 31, 12, 1, 20, 8, 9, 14)
HOT = {"temperature": 0.5}


def unit_rows(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    rows = rng.normal(size=shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def reference_of(query: np.ndarray, positive: np.ndarray, temperature: float) -> tuple[float, np.ndarray, np.ndarray]:
    """Written from the formula in float64, independent of the code under test."""
    query, positive = query.astype(np.float64), positive.astype(np.float64)
    logits = np.array([[q @ p / temperature for p in positive] for q in query])
    soft = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = -sum(math.log(soft[i, i]) for i in range(len(query)))
    d_logits = (soft - np.eye(len(query))) / temperature
    return loss, d_logits @ positive, d_logits.T @ query


@pytest.mark.parametrize("temperature", [0.05, 1.0])
@pytest.mark.parametrize("num_pairs", [1, 2, 9])
def test_value_and_gradient_equal_the_float64_reference(num_pairs: int, temperature: float) -> None:
    rng = np.random.default_rng(num_pairs)
    query, positive = unit_rows(rng, (num_pairs, 16)), unit_rows(rng, (num_pairs, 16))
    contrast = infonce(torch.from_numpy(query), torch.from_numpy(positive), {"temperature": temperature})
    loss, grad_query, grad_positive = reference_of(query, positive, temperature)
    assert contrast.value == pytest.approx(loss, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(contrast.grad_query_QD.numpy(), grad_query, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(contrast.grad_positive_QD.numpy(), grad_positive, rtol=1e-5, atol=1e-6)
    assert contrast.grad_query_QD.dtype == torch.float32


def test_only_a_positive_that_is_nearer_than_every_other_counts() -> None:
    query = torch.eye(3)
    assert infonce(query, query, HOT).num_nearest == 3
    assert infonce(query, query[[1, 0, 2]], HOT).num_nearest == 1
    assert infonce(query, torch.ones(3, 3), HOT).num_nearest == 0  # all alike: none is the nearest
    assert infonce(query[:1], query[:1], HOT).num_nearest == 1


# The pass


def sequences(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [datum([int(token) for token in rng.integers(0, 49000, length)]) for length in lengths]


@pytest.fixture
def engine(peft: PeftEngine) -> PeftEngine:
    """With an adapter "m" that has learned something."""
    for model_id in list(peft._adapters):
        peft.drop_adapter(model_id)
    peft.create_adapter("m", LORA)
    run(peft, "m", compute(sequences(9), "infonce"), STEP)
    return peft


def test_an_embedding_is_the_normalised_hidden_state_of_the_last_token(engine: PeftEngine, tiny_model: BaseModelInfo) -> None:
    engine.create_adapter("fresh", LORA)
    data = sequences()
    output = computed(engine, "fresh", compute(data, "infonce", backward=False))
    assert output.logprobs == ()
    base = AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32)
    for one, embedding in zip(data, output.embeddings, strict=True):
        with torch.no_grad():
            hidden = base.get_decoder()(input_ids=torch.tensor([one.model_input.tokens])).last_hidden_state[0, -1]
        assert embedding.shape == (hidden.shape[0],)
        np.testing.assert_allclose(array(embedding), (hidden / hidden.norm()).numpy(), rtol=1e-4, atol=1e-5)
        assert np.linalg.norm(array(embedding)) == pytest.approx(1.0, abs=1e-5)


def test_loss_and_accuracy_are_those_of_the_embeddings(engine: PeftEngine) -> None:
    output = computed(engine, "m", compute(sequences(), "infonce", config=HOT))
    embeddings = np.stack([array(embedding) for embedding in output.embeddings])
    query, positive = embeddings[::2], embeddings[1::2]
    nearest = (query @ positive.T).argmax(axis=1)
    assert output.metrics == {
        "loss:sum": pytest.approx(reference_of(query, positive, 0.5)[0], rel=1e-6),
        "infonce/accuracy:mean": np.mean(nearest == np.arange(4)),
    }


def test_the_gradient_is_that_of_automatic_differentiation_through_the_model(engine: PeftEngine) -> None:
    """Central differences of the loss along the gradient, which is what a step moves."""
    command = compute(sequences(), "infonce", config=HOT)
    forward = compute(sequences(), "infonce", config=HOT, backward=False)
    run(engine, "m", command)
    adapter = engine._adapters["m"]
    grad = adapter.grad_P
    assert grad is not None
    weights, direction, size = adapter.weights_P.clone(), grad / grad.norm(), 2e-3
    losses = []
    for sign in (1.0, -1.0):
        adapter.weights_P.copy_(weights + sign * size * direction)
        losses.append(computed(engine, "m", forward).metrics["loss:sum"])
    adapter.weights_P.copy_(weights)
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(float(grad.norm()), rel=2e-2)


def test_micro_batches_do_not_change_loss_or_gradient(engine: PeftEngine) -> None:
    """The loss sees the whole command, however little of it is in memory at once."""
    files = state(engine, "m")
    losses, grads = [], []
    for bound in (1, 40, 100_000):
        engine.restore("m", LORA, files)
        output = computed(engine, "m", Compute(tuple(sequences()), "infonce", {}, backward=True, micro_batch_tokens=bound))
        losses.append(output.metrics["loss:sum"])
        grads.append(engine._adapters["m"].grad_P)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert grads[0] is not None
    assert float(grads[0].norm()) > 0
    for grad in grads[1:]:
        assert grad is not None
        assert float((grad - grads[0]).norm()) <= 1e-3 * float(grads[0].norm())


def test_forward_alone_says_the_same_and_a_replay_repeats_bit_for_bit(engine: PeftEngine) -> None:
    files = state(engine, "m")
    forward = computed(engine, "m", compute(sequences(), "infonce", backward=False))
    assert state(engine, "m") == files
    command = compute(sequences(), "infonce")
    first = (computed(engine, "m", command), state(engine, "m"))
    assert first[0] == forward
    engine.restore("m", LORA, files)
    assert (computed(engine, "m", command), state(engine, "m")) == first


def test_no_logits_are_computed(engine: PeftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_logits(*_: object, **__: object) -> None:
        raise AssertionError("the unembedding was computed")

    monkeypatch.setattr(unembed, "score", no_logits)
    monkeypatch.setattr(type(engine._unembed), "forward", forward_of_others(engine))
    computed(engine, "m", compute(sequences(), "infonce"))


def forward_of_others(engine: PeftEngine) -> object:
    original = type(engine._unembed).forward

    def forward(self: object, x: torch.Tensor) -> torch.Tensor:
        assert self is not engine._unembed, "the unembedding was computed"
        return original(self, x)  # type: ignore[arg-type]

    return forward


def test_training_pulls_pairs_together(engine: PeftEngine) -> None:
    engine.create_adapter("fresh", LORA)
    before = computed(engine, "fresh", compute(sequences(), "infonce", config=HOT, backward=False)).metrics["loss:sum"]
    run(engine, "fresh", *[TrainStep(compute(sequences(), "infonce", config=HOT), STEP)] * 4)
    assert computed(engine, "fresh", compute(sequences(), "infonce", config=HOT, backward=False)).metrics["loss:sum"] < before


def test_an_adapter_that_no_embedding_depends_on_is_refused(engine: PeftEngine) -> None:
    engine.create_adapter("head", LORA.model_copy(update={"train_attn": False, "train_mlp": False, "train_unembed": True}))
    before = state(engine, "head")
    answer = refused(engine, "head", compute(sequences(), "infonce"))
    assert isinstance(answer, ValidationFailed)
    assert "create one with train_attn or train_mlp" in answer.message
    assert state(engine, "head") == before
    computed(engine, "head", compute(sequences(), "infonce", backward=False))


def test_a_loss_that_is_not_finite_leaves_no_trace(engine: PeftEngine) -> None:
    before = state(engine, "m")
    answer = refused(engine, "m", compute(sequences(), "infonce", config={"temperature": 1e-310}))
    assert answer.message.startswith("data[0]: infonce: the loss or its gradient is not finite")
    assert state(engine, "m") == before
