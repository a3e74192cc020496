"""dpo against a float64 reference, automatic differentiation and a vector worked out by hand; its pass on the tiny model."""

import math

import numpy as np
import pytest
import torch

from tests.unit.engines.datums import array, compute, datum, ints, tensor
from tests.unit.engines.peft import computed, refused, run, state
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.engines.preference import Side, dpo
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.training import AdamParams, Compute, LoraConfig, OptimStep, TrainStep

LORA = LoraConfig(rank=8, seed=11)
STEP = OptimStep(optimizer=AdamParams(learning_rate=1e-3, eps=1e-6))
LENGTHS = (5, 31, 12, 1, 20, 8)


def side(policy: object, reference: object, weights: object = None) -> Side:
    inputs = {} if weights is None else {"weights": torch.tensor(weights, dtype=torch.float32)}
    return Side(torch.tensor(policy, dtype=torch.float32), torch.tensor(reference, dtype=torch.float32), inputs)


def reference_of(chosen: Side, rejected: Side, beta: float) -> tuple[float, np.ndarray, np.ndarray]:
    """Written from the formula in float64, independent of the code under test."""
    (p_c, q_c, w_c), (p_r, q_r, w_r) = (
        [
            np.asarray(values, dtype=np.float64)
            for values in (one.policy, one.reference, one.inputs.get("weights", np.ones(len(one.policy))))
        ]
        for one in (chosen, rejected)
    )
    h = beta * ((w_c @ p_c - w_c @ q_c) - (w_r @ p_r - w_r @ q_r))
    sigmoid = 1 / (1 + np.exp(-h))
    return -float(np.log(sigmoid)), -beta * (1 - sigmoid) * w_c, beta * (1 - sigmoid) * w_r


def random_pair(seed: int, *, weighted: bool) -> tuple[Side, Side]:
    rng = np.random.default_rng(seed)
    return tuple(  # type: ignore[return-value]
        side(-2 + rng.normal(size=n), -2 + rng.normal(size=n), rng.normal(size=n) if weighted else None) for n in (7, 11)
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_the_float64_reference(seed: int, beta: float, weighted: bool) -> None:
    chosen, rejected = random_pair(seed, weighted=weighted)
    term = dpo(chosen, rejected, {"beta": beta})
    value, grad_chosen, grad_rejected = reference_of(chosen, rejected, beta)
    assert term.value == pytest.approx(value, rel=1e-5)
    for found, expected in ((term.grad_chosen, grad_chosen), (term.grad_rejected, grad_rejected)):
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-9)


def test_the_gradient_is_the_derivative_of_the_value() -> None:
    chosen, rejected = random_pair(5, weighted=True)

    def value_at(index: int, delta: float, *, of_chosen: bool) -> float:
        sides = [chosen, rejected]
        moved = sides[0 if of_chosen else 1]
        policy = moved.policy.double()
        policy[index] += delta
        sides[0 if of_chosen else 1] = Side(policy, moved.reference, moved.inputs)
        return dpo(sides[0], sides[1], {"beta": 0.5}).value

    term = dpo(chosen, rejected, {"beta": 0.5})
    for of_chosen, grad in ((True, term.grad_chosen), (False, term.grad_rejected)):
        for index in range(len(grad)):
            slope = (value_at(index, 1e-5, of_chosen=of_chosen) - value_at(index, -1e-5, of_chosen=of_chosen)) / 2e-5
            assert float(grad[index]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_the_published_vector() -> None:
    term = dpo(side([-1.0, -0.7], [-0.9, -0.7]), side([-2.1], [-2.1]), {"beta": 0.1})
    assert term.margin == pytest.approx(-0.01, rel=1e-6)
    assert term.value == pytest.approx(0.69815968, rel=1e-6)
    np.testing.assert_allclose(term.grad_chosen.numpy(), [-0.05025, -0.05025], rtol=1e-6)
    np.testing.assert_allclose(term.grad_rejected.numpy(), [0.05025], rtol=1e-6)


@pytest.mark.parametrize(("shift", "value"), [(1e4, 0.0), (-1e4, 1e4)])
def test_a_margin_of_any_size_is_finite(shift: float, value: float) -> None:
    term = dpo(side([shift], [0.0]), side([0.0], [0.0]), {"beta": 1.0})
    assert term.value == pytest.approx(value)
    assert bool(torch.isfinite(term.grad_chosen).all())


def test_weight_0_hides_an_infinite_logprob() -> None:
    term = dpo(side([-math.inf, -1.0], [-1.0, -1.0], [0.0, 1.0]), side([-1.0], [-1.0]), {"beta": 1.0})
    assert (term.margin, term.grad_chosen[0].item()) == (0.0, 0.0)


# The pass


def preferences(seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [
        datum(
            [int(token) for token in rng.integers(0, 49000, length)],
            target_tokens=ints(rng.integers(0, 49000, length)),
            weights=tensor(np.abs(rng.normal(size=length))),
        )
        for length in LENGTHS
    ]


@pytest.fixture
def engine(peft: PeftEngine) -> PeftEngine:
    """With an adapter "m" that has learned something, so that policy and reference differ."""
    for model_id in list(peft._adapters):
        peft.drop_adapter(model_id)
    peft.create_adapter("m", LORA)
    run(peft, "m", compute(preferences(9), "dpo"), STEP)
    return peft


def plain_logprobs(engine: PeftEngine, model_id: str, data: list[Datum]) -> list[np.ndarray]:
    """Those of an adapter, by another loss."""
    plain = compute([datum(one.model_input.tokens, target_tokens=one.loss_fn_inputs["target_tokens"]) for one in data], backward=False)
    return [array(logprobs).astype(np.float64) for logprobs in computed(engine, model_id, plain).logprobs]


def test_the_reference_is_the_model_with_the_adapter_off(engine: PeftEngine) -> None:
    data = preferences()
    engine.create_adapter("fresh", LORA)
    output = computed(engine, "m", compute(data, "dpo", config={"beta": 0.5}))
    policy, base = plain_logprobs(engine, "m", data), plain_logprobs(engine, "fresh", data)
    rewards = [array(one.loss_fn_inputs["weights"]) @ (p - q) for one, p, q in zip(data, policy, base, strict=True)]
    margins = [0.5 * (chosen - rejected) for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)]
    assert output.metrics == {
        "loss:sum": pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins), rel=1e-5),
        "dpo/accuracy:mean": sum(margin > 0 for margin in margins) / 3,
        "dpo/margin:mean": pytest.approx(np.mean(margins), rel=1e-3, abs=1e-6),
    }
    for logprobs, expected in zip(output.logprobs, policy, strict=True):
        np.testing.assert_allclose(array(logprobs), expected, rtol=1e-5)


def test_a_fresh_adapter_prefers_nothing(engine: PeftEngine) -> None:
    engine.create_adapter("fresh", LORA)
    output = computed(engine, "fresh", compute(preferences(), "dpo"))
    assert output.metrics == {"loss:sum": pytest.approx(3 * math.log(2)), "dpo/accuracy:mean": 0.0, "dpo/margin:mean": 0.0}


def test_the_gradient_is_that_of_cross_entropy_with_the_slopes_as_weights(engine: PeftEngine) -> None:
    """The chain rule: any loss's gradient is that of sum(g l) with g held constant."""
    data = preferences()
    beta = 0.5
    files = state(engine, "m")
    engine.create_adapter("fresh", LORA)
    policy, base = plain_logprobs(engine, "m", data), plain_logprobs(engine, "fresh", data)
    weighted = []
    for first in range(0, len(data), 2):
        w_c, w_r = (array(data[first + offset].loss_fn_inputs["weights"]).astype(np.float64) for offset in (0, 1))
        _, g_c, g_r = reference_of(side(policy[first], base[first], w_c), side(policy[first + 1], base[first + 1], w_r), beta)
        for one, g in ((data[first], g_c), (data[first + 1], g_r)):
            weighted.append(datum(one.model_input.tokens, target_tokens=one.loss_fn_inputs["target_tokens"], weights=tensor(-g)))
    run(engine, "m", compute(data, "dpo", config={"beta": beta}))
    found = engine._adapters["m"].grad_P
    engine.restore("m", LORA, files)
    run(engine, "m", compute(weighted))
    expected = engine._adapters["m"].grad_P
    assert found is not None
    assert expected is not None
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())


def test_pairs_may_fall_into_any_micro_batches(engine: PeftEngine) -> None:
    files = state(engine, "m")
    outputs, grads = [], []
    for bound in (1, 40, 100_000):
        engine.restore("m", LORA, files)
        command = Compute(tuple(preferences()), "dpo", {}, backward=True, micro_batch_tokens=bound)
        outputs.append(computed(engine, "m", command))
        grads.append(engine._adapters["m"].grad_P)
    assert grads[0] is not None
    for output, grad in zip(outputs[1:], grads[1:], strict=True):
        assert output.metrics["loss:sum"] == pytest.approx(outputs[0].metrics["loss:sum"], rel=1e-5)
        assert grad is not None
        assert float((grad - grads[0]).norm()) <= 1e-4 * float(grads[0].norm())


def test_forward_alone_says_the_same_and_a_replay_repeats_bit_for_bit(engine: PeftEngine) -> None:
    files = state(engine, "m")
    forward = computed(engine, "m", compute(preferences(), "dpo", backward=False))
    assert state(engine, "m") == files
    command = compute(preferences(), "dpo")
    first = (computed(engine, "m", command), state(engine, "m"))
    assert first[0] == forward
    engine.restore("m", LORA, files)
    assert (computed(engine, "m", command), state(engine, "m")) == first


def test_training_raises_the_margin(engine: PeftEngine) -> None:
    engine.create_adapter("fresh", LORA)
    step = TrainStep(compute(preferences(), "dpo"), STEP)
    run(engine, "fresh", *[step] * 3)
    after = computed(engine, "fresh", compute(preferences(), "dpo", backward=False))
    assert after.metrics["dpo/margin:mean"] > 0
    assert after.metrics["loss:sum"] < 3 * math.log(2)


def test_a_pair_whose_loss_is_not_finite_is_named_and_leaves_no_trace(engine: PeftEngine) -> None:
    before = state(engine, "m")
    huge = datum([1, 2], target_tokens=ints([2, 3]), weights=tensor([3e38, 3e38]))
    bad = compute([*preferences()[:2], huge, preferences()[0]], "dpo", config={"beta": 1e300})
    answer = refused(engine, "m", bad)
    assert isinstance(answer, ValidationFailed)
    assert answer.message.startswith("data[2]: dpo: the loss or its gradient is not finite")
    assert state(engine, "m") == before


@pytest.mark.proves("R10")
def test_half_a_pair_is_refused_with_the_adapter_unchanged(engine: PeftEngine) -> None:
    before = state(engine, "m")
    half = compute(preferences()[:3], "dpo")
    for command in (half, TrainStep(half, STEP)):
        assert refused(engine, "m", command).message.startswith("data[2]: half a pair")
    assert state(engine, "m") == before
