"""The losses against float64 references, automatic differentiation and vectors worked out by hand."""

import numpy as np
import pytest
import torch

from tinsmith.engines.losses import Loss, LossTerm, cross_entropy, importance_sampling

LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "importance_sampling": importance_sampling}

# The published vectors: log-probs, sampling log-probs, advantages.
V_L = [-0.5, -1.2, -2.0, -0.1, -3.0]
V_Q = [-0.7, -1.0, -0.5, -0.8, -3.0]
V_A = [1.0, -0.5, 2.0, -1.0, 0.0]


def f32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def loss_of(name: str, logprobs: object, /, **inputs: object) -> LossTerm:
    return LOSSES[name](f32(logprobs), {key: f32(value) for key, value in inputs.items()}, {})


def reference(name: str, logprobs: np.ndarray, inputs: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """Written from the formulas in float64, independent of the code under test."""
    weights = inputs.get("weights", np.ones_like(logprobs))
    if name == "cross_entropy":
        return -float((weights * logprobs).sum()), -weights
    ratio = np.exp(logprobs - inputs["logprobs"])
    return -float((ratio * inputs["advantages"] * weights).sum()), -ratio * inputs["advantages"] * weights


def random_inputs(name: str, rng: np.random.Generator, *, weighted: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    shape = (7, 3) if name == "cross_entropy" else (11,)
    inputs = {"weights": rng.normal(size=shape)} if weighted else {}
    if name != "cross_entropy":
        inputs |= {"logprobs": -2 + rng.normal(size=shape), "advantages": rng.normal(size=shape)}
    as_float32 = {key: value.astype(np.float32).astype(np.float64) for key, value in inputs.items()}
    return (-2 + rng.normal(size=shape)).astype(np.float32).astype(np.float64), as_float32


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_value_and_gradient_equal_the_float64_reference(name: str, weighted: bool) -> None:
    logprobs, inputs = random_inputs(name, np.random.default_rng(3), weighted=weighted)
    term = loss_of(name, logprobs.tolist(), **{key: value.tolist() for key, value in inputs.items()})
    value, grad = reference(name, logprobs, inputs)
    assert term.value == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert term.grad.dtype == torch.float32
    np.testing.assert_allclose(term.grad.numpy(), grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_gradient_is_the_derivative_of_the_value(name: str) -> None:
    logprobs, inputs = random_inputs(name, np.random.default_rng(4), weighted=True)
    tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
    term = LOSSES[name](torch.from_numpy(logprobs), tensors, {})
    step = 1e-6
    for index in np.ndindex(*logprobs.shape):
        moved = [logprobs.copy(), logprobs.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        above, below = (LOSSES[name](torch.from_numpy(values), tensors, {}).value for values in moved)
        assert float(term.grad[index]) == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8)


def test_importance_sampling_vector() -> None:
    term = loss_of("importance_sampling", V_L, logprobs=V_Q, advantages=V_A)
    assert term.value == pytest.approx(0.75545501, abs=1e-6)
    np.testing.assert_allclose(term.grad.numpy(), [-1.22140276, 0.40936538, -0.44626032, 2.01375271, 0], rtol=1e-5)


def test_cross_entropy_vector_with_fractional_and_negative_weights() -> None:
    term = loss_of("cross_entropy", V_L, weights=[0, 1, 1, 0.5, -2])
    assert term.value == pytest.approx(-2.75)
    assert term.grad.tolist() == [0, -1, -1, -0.5, 2]


def test_cross_entropy_vector_with_several_targets_a_row() -> None:
    weights = [[0.75, 0.25], [0, 0], [0.1, 0.9]]
    term = loss_of("cross_entropy", [[-0.2, -2.3], [-1.1, -0.9], [-4.0, -0.05]], weights=weights)
    assert term.value == pytest.approx(1.17)
    np.testing.assert_allclose(term.grad.numpy(), -np.array(weights), rtol=1e-6)


def test_cross_entropy_without_weights_weighs_every_row_1() -> None:
    term = loss_of("cross_entropy", [-1.0, -2.0])
    assert (term.value, term.grad.tolist()) == (3.0, [-1, -1])


def test_a_custom_loss_s_second_pass() -> None:
    """C = sum of squares sends w = -dC/dl = -2l; the surrogate value is sum(l * dC/dl)."""
    term = loss_of("cross_entropy", V_L[:3], weights=[1, 2.4, 4])
    assert term.value == pytest.approx(11.38)


def test_weight_0_hides_an_infinite_logprob() -> None:
    term = cross_entropy(f32([-torch.inf, -1.0]), {"weights": f32([0, 1])}, {})
    assert (term.value, term.grad.tolist()) == (1.0, [0.0, -1.0])


@pytest.mark.parametrize("inputs", [{"advantages": [0.0, 1.0]}, {"advantages": [1.0, 1.0], "weights": [0.0, 1.0]}])
def test_advantage_or_weight_0_hides_an_overflowing_ratio(inputs: dict[str, list[float]]) -> None:
    term = loss_of("importance_sampling", [0.0, -1.0], logprobs=[-1000.0, -1.0], **inputs)
    assert (term.value, term.grad.tolist()) == (-1.0, [0.0, -1.0])


def test_an_overflowing_ratio_is_not_clamped() -> None:
    term = loss_of("importance_sampling", [0.0], logprobs=[-1000.0], advantages=[1.0])
    assert term.value == -torch.inf
    assert torch.isinf(term.grad).all()


def test_an_underflowing_ratio_is_legal() -> None:
    term = loss_of("importance_sampling", [-1000.0], logprobs=[0.0], advantages=[1.0])
    assert (term.value, term.grad.tolist()) == (0.0, [0.0])


def test_weights_multiply_the_rows_of_importance_sampling() -> None:
    inputs = {"logprobs": f32(V_Q), "advantages": f32(V_A)}
    plain = importance_sampling(f32(V_L), inputs, {})
    weighted = importance_sampling(f32(V_L), inputs | {"weights": f32([2.0] * 5)}, {})
    assert weighted.value == pytest.approx(2 * plain.value)
    assert torch.equal(weighted.grad, 2 * plain.grad)
