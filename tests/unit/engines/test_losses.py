"""The losses of single datums, value and gradient, against a float64 reference and the published vectors, in both engines."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from tests.fakes import loss_reference
from tests.fakes.loss_reference import Array
from tests.unit.engines.datums import sparse, tensor
from tests.unit.engines.loss_cases import CLIPPED, LOSSES, POLICIES, config_of, loss_of, random_case
from tinsmith.engines import fake_losses
from tinsmith.protocol.losses import LOSSES as SPECS

Computed = tuple[float, Array]


def by_torch(name: str, logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Computed:
    """In float32, as the engine computes."""
    term = LOSSES[name](*_tensors(logprobs, inputs, torch.float32), config)
    assert term.grad.dtype == torch.float32
    return term.value, term.grad.numpy().astype(np.float64)


def by_the_fake(name: str, logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Computed:
    rows = fake_losses.Rows(logprobs.reshape(-1).tolist(), {key: tensor(values) for key, values in inputs.items()})
    term = fake_losses.POINTWISE[name](rows, config)
    return term.value, np.array(term.slopes).reshape(logprobs.shape)


ENGINES: list[Callable[[str, Array, Mapping[str, Array], Mapping[str, float]], Computed]] = [by_torch, by_the_fake]
CASES = [
    (name, weighted, bounded) for name in sorted(LOSSES) for weighted in (False, True) for bounded in ({False, name in ("ppo", "cispo")})
]


def _tensors(logprobs: Array, inputs: Mapping[str, Array], dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.tensor(logprobs, dtype=dtype), {key: torch.tensor(values, dtype=dtype) for key, values in inputs.items()}


def assert_equal(found: Computed, value: float, grad: object) -> None:
    """Within 1e-5 relative; a gradient of 0 is exactly 0."""
    assert found[0] == pytest.approx(value, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(found[1], np.asarray(grad, dtype=np.float64), rtol=1e-5, atol=1e-30)


# The reference


def test_the_defaults_of_the_config_are_the_published_ones() -> None:
    assert {name: SPECS[name].config for name in LOSSES} == loss_reference.CONFIG


@pytest.mark.parametrize(("name", "weighted", "bounded"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_reference_s_gradient_is_the_slope_of_its_value(name: str, weighted: bool, bounded: bool, seed: int) -> None:
    logprobs, inputs = random_case(name, seed, weighted=weighted, bounded=bounded)
    config = loss_reference.CONFIG[name]
    grad = loss_reference.gradient(name, logprobs, inputs, config)
    for index in np.ndindex(*logprobs.shape):
        values = []
        for step in (1e-6, -1e-6):
            moved = logprobs.copy()
            moved[index] += step
            values.append(loss_reference.objective(name, moved, logprobs, inputs, config))
        assert grad[index] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("compute", ENGINES)
@pytest.mark.parametrize(("name", "weighted", "bounded"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_the_float64_reference(
    compute: Callable[..., Computed], name: str, weighted: bool, bounded: bool, seed: int
) -> None:
    logprobs, inputs = random_case(name, seed, weighted=weighted, bounded=bounded)
    config = loss_reference.CONFIG[name]
    expected = loss_reference.value(name, logprobs, inputs, config), loss_reference.gradient(name, logprobs, inputs, config)
    assert_equal(compute(name, logprobs, inputs, config), *expected)


@pytest.mark.parametrize("compute", ENGINES)
@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.0), (1.0, 50.0), (0.3, 2.5)])
def test_any_thresholds_equal_the_reference(compute: Callable[..., Computed], name: str, low: float, high: float) -> None:
    logprobs, inputs = random_case(name, 7, weighted=True)
    config = {"clip_low_threshold": low, "clip_high_threshold": high}
    expected = loss_reference.value(name, logprobs, inputs, config), loss_reference.gradient(name, logprobs, inputs, config)
    assert_equal(compute(name, logprobs, inputs, config), *expected)


# The published vectors

V_L, V_Q, V_A = [-0.5, -1.2, -2.0, -0.1, -3.0], [-0.7, -1.0, -0.5, -0.8, -3.0], [1.0, -0.5, 2.0, -1.0, 0.0]
V = {"logprobs": V_Q, "advantages": V_A}
M1, M2 = V | {"sequence_ratio_mask": [1, 1, 1, 0, 0]}, V | {"sequence_ratio_mask": [1, 0, 0, 1, 0]}
UNCLIPPED = [-1.22140276, 0.40936538, -0.44626032, 2.01375271, 0]
W_2D = [[0.75, 0.25], [0, 0], [0.1, 0.9]]
L_2D = [[-0.2, -2.3], [-1.1, -0.9], [-4.0, -0.05]]


def clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


VECTORS: list[tuple[str, dict[str, float], list[object], dict[str, object], float, object]] = [
    ("importance_sampling", {}, V_L, V, 0.75545501, UNCLIPPED),
    ("ppo", {}, V_L, V, 0.77685776, [0, 0.40936538, -0.44626032, 2.01375271, 0]),
    ("ppo", clip(0.5, 1.5), V_L, V, 0.75545501, UNCLIPPED),
    ("ppo", clip(0.9, 1.1), V_L, V, 0.91749239, [0, 0, -0.44626032, 2.01375271, 0]),
    ("cispo", {}, V_L, V, 0.81060830, UNCLIPPED),
    ("cispo", clip(0.8, 1.2), V_L, V, 3.18876155, [-1.2, 0.40936538, -1.6, 1.2, 0]),
    ("dro", {"beta": 0.05}, V_L, V, 3.8705, [-0.99, 0.49, -2.075, 1.035, 0]),
    ("dro", {}, V_L, V, 3.8705, [-0.99, 0.49, -2.075, 1.035, 0]),
    ("dro", {"beta": 1}, V_L, V, 5.21, [-0.8, 0.3, -3.5, 1.7, 0]),
    ("gspo", {}, V_L, M1, -0.61959198, [-0.60653066, 0, -1.21306132, 0, 0]),
    ("gspo", clip(0.5, 1.5), V_L, M1, -0.90979599, [-0.60653066, 0.30326533, -1.21306132, 0.60653066, 0]),
    ("gspo", clip(0.8, 1.2), V_L, M2, -1.24753172, [0, 0.78415609, 0, 1.56831219, 0]),
    ("cross_entropy", {}, V_L, {"weights": [0, 1, 1, 0.5, -2]}, -2.75, [0, -1, -1, -0.5, 2]),
    ("cross_entropy", {}, L_2D, {"weights": W_2D}, 1.17, [[-0.75, -0.25], [0, 0], [-0.1, -0.9]]),
    ("cross_entropy", {}, V_L[:3], {"weights": [1, 2.4, 4]}, 11.38, [-1, -2.4, -4]),  # C = sum of squares, as a client sends it
    ("cross_entropy", {}, [-1.0, -2.0], {}, 3.0, [-1, -1]),  # absent weights are 1
    ("ppo", clip(1.0, 1.2), [-1.0, -1.0], {"logprobs": [-1.0, -1.0], "advantages": [1, -1]}, 0.0, [-1, 1]),  # ties keep the gradient
    ("ppo", clip(0.8, 1.0), [-1.0, -1.0], {"logprobs": [-1.0, -1.0], "advantages": [1, -1]}, 0.0, [-1, 1]),
    ("importance_sampling", {}, V_L, V | {"logprobs": V_L}, -1.5, [-1, 0.5, -2, 1, 0]),  # on the policy itself: L = -sum(A), g = -A
]


@pytest.mark.parametrize("compute", ENGINES)
@pytest.mark.parametrize(("name", "config", "logprobs", "inputs", "value", "grad"), VECTORS)
def test_published_vectors(
    compute: Callable[..., Computed],
    name: str,
    config: dict[str, float],
    logprobs: list[object],
    inputs: dict[str, object],
    value: float,
    grad: object,
) -> None:
    arrays = {key: np.array(values, dtype=np.float64) for key, values in inputs.items()}
    found = compute(name, np.array(logprobs, dtype=np.float64), arrays, config_of(name, config))
    assert found[0] == pytest.approx(value, rel=1e-5, abs=1e-9)
    np.testing.assert_allclose(found[1], np.array(grad), rtol=1e-5)


def test_the_sparse_weights_of_the_vector_are_the_dense_ones() -> None:
    listed = sparse(W_2D)
    assert listed.csr is not None
    assert np.frombuffer(listed.csr.crow, "<i8").tolist() == [0, 2, 2, 4]
    assert fake_losses.dense(listed) == pytest.approx(np.ravel(W_2D).tolist())


# The edges of a ratio

FAR = {"logprobs": [-1000.0, -1.0]}  # beside log-probs of 0 and -1: r = inf, 1


def values_of(
    name: str, logprobs: list[float], config: dict[str, float], inputs: dict[str, list[float]]
) -> list[tuple[float, list[float]]]:
    """By both engines; a clipped datum of its own for gspo, whose ratio is of the first row."""
    mask = {"sequence_ratio_mask": [1.0, *[0.0] * (len(logprobs) - 1)]} if name == "gspo" else {}
    arrays = {key: np.array(values) for key, values in (inputs | mask).items()}
    computed = [compute(name, np.array(logprobs), arrays, config_of(name, config)) for compute in ENGINES]
    return [(value, grad.tolist()) for value, grad in computed]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
@pytest.mark.parametrize("still", [{"advantages": [0.0, 1.0]}, {"advantages": [-1.0, 1.0], "weights": [0.0, 1.0]}])
def test_advantage_or_weight_0_hides_a_ratio_that_overflows(name: str, still: dict[str, list[float]]) -> None:
    value = 1.0 if name == "cispo" else -1.0  # l = -1 in cispo's value
    assert values_of(name, [0.0, -1.0], {}, FAR | still) == [(value, [0.0, -1.0])] * 2


@pytest.mark.parametrize("still", [{"advantages": [0.0, 0.0]}, {"advantages": [-1.0, -1.0], "weights": [0.0, 0.0]}])
def test_a_sequence_whose_ratio_overflows_and_that_trains_nothing_adds_0(still: dict[str, list[float]]) -> None:
    assert values_of("gspo", [0.0, -1.0], {}, FAR | still) == [(0.0, [0.0, 0.0])] * 2


def test_a_sequence_without_members_and_without_advantages_adds_0() -> None:
    inputs = {"logprobs": np.zeros(2), "advantages": np.zeros(2), "sequence_ratio_mask": np.zeros(2)}
    for compute in ENGINES:
        value, grad = compute("gspo", np.array([-1.0, -2.0]), inputs, config_of("gspo"))
        assert (value, grad.tolist()) == (0.0, [0.0, 0.0])


def test_a_log_prob_outside_of_the_sequence_s_mask_is_not_read() -> None:
    for compute in ENGINES:
        found = [
            compute("gspo", np.array([-1.0, -2.0]), {key: np.array(values) for key, values in inputs.items()}, config_of("gspo"))
            for inputs in (
                {"logprobs": [-1.1, outside], "advantages": [1.0, -2.0], "sequence_ratio_mask": [-1.0, 0.0]} for outside in (-2.0, -1000.0)
            )
        ]
        assert found[0][0] == found[1][0] != 0
        assert found[0][1].tolist() == found[1][1].tolist()


@pytest.mark.parametrize(
    ("name", "advantage", "value", "slope"),
    [
        ("ppo", 2.0, -2 * 1.2, 0.0),
        ("gspo", 2.0, -2 * 1.2, 0.0),
        ("cispo", 2.0, -2 * 4.0 * -0.5, -2 * 4.0),
        ("cispo", -2.0, 2 * 4.0 * -0.5, 2 * 4.0),
    ],
)
def test_a_clip_makes_a_ratio_that_overflows_finite(name: str, advantage: float, value: float, slope: float) -> None:
    for found, grad in values_of(name, [-0.5], {}, {"logprobs": [-1000.0], "advantages": [advantage]}):
        assert found == pytest.approx(value, rel=1e-6)
        assert grad == pytest.approx([slope], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "advantage"), [("importance_sampling", 1.0), ("importance_sampling", -1.0), ("ppo", -1.0), ("gspo", -1.0)]
)
@pytest.mark.parametrize("distance", [89.0, 1000.0])
def test_a_ratio_that_overflows_is_not_clamped_in_silence(name: str, advantage: float, distance: float) -> None:
    inputs = {"logprobs": [-distance], "advantages": [advantage]}
    for value, grad in values_of(name, [0.0], {}, inputs):
        assert math.isinf(value)
        assert math.isinf(grad[0])
    inputs |= {"sequence_ratio_mask": [1.0]} if name == "gspo" else {}
    assert not loss_of(name, [0.0], None, **inputs).is_finite
    rows = fake_losses.Rows([0.0], {key: tensor(values) for key, values in inputs.items()})
    assert not fake_losses.POINTWISE[name](rows, config_of(name)).is_finite


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
def test_a_ratio_that_underflows_is_legal(name: str) -> None:
    for value, grad in values_of(name, [-1000.0], {}, {"logprobs": [0.0], "advantages": [1.0]}):
        assert (value, grad) == (0.0, [0.0])
    if name != "importance_sampling":
        for value, grad in values_of(name, [-1000.0], {}, {"logprobs": [0.0], "advantages": [-1.0]}):
            assert value == pytest.approx(0.8)
            assert grad == [0.0]


@pytest.mark.parametrize("low", [0.0, 0.5])
def test_cispo_gives_a_ratio_that_underflows_its_lower_threshold(low: float) -> None:
    for value, grad in values_of("cispo", [-1000.0], clip(low, 4.0), {"logprobs": [0.0], "advantages": [2.0]}):
        assert value == low * 2000
        assert grad == [-low * 2]


def test_the_gate_of_ppo_follows_the_advantage_and_not_its_product_with_a_weight() -> None:
    """r = 2 with A > 0 is clipped, also where a negative weight turns the term."""
    inputs = {"logprobs": [-1.0 - math.log(2)], "advantages": [1.0], "weights": [-3.0]}
    for value, grad in values_of("ppo", [-1.0], {}, inputs):
        assert value == pytest.approx(3 * 1.2)
        assert grad == [0.0]


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_thresholds_of_a_row_go_before_those_of_the_config(name: str) -> None:
    rows = {"clip_low_threshold": [0.9] * 5, "clip_high_threshold": [1.1] * 5}
    for by_row, by_config in zip(values_of(name, V_L, clip(0.1, 9.0), V | rows), values_of(name, V_L, clip(0.9, 1.1), V), strict=True):
        assert by_row[0] == pytest.approx(by_config[0], rel=1e-6)
        assert by_row[1] == pytest.approx(by_config[1], rel=1e-6)
    one = values_of(name, V_L, clip(0.1, 1.1), V | {"clip_low_threshold": [0.9] * 5})  # the other one stays the config's
    assert [value for value, _ in one] == pytest.approx([value for value, _ in values_of(name, V_L, clip(0.9, 1.1), V)], rel=1e-6)


def test_a_threshold_beyond_float32_bounds_nothing() -> None:
    found, free = (loss_of(name, V_L, config, **V) for name, config in (("ppo", clip(0.0, 1e300)), ("importance_sampling", {})))
    assert found.value == pytest.approx(free.value)
    assert torch.equal(found.grad, free.grad)


@pytest.mark.parametrize("name", POLICIES)
def test_weights_multiply_the_rows_of_a_policy(name: str) -> None:
    logprobs, inputs = random_case(name, 5, weighted=False)
    for compute in ENGINES:
        plain = compute(name, logprobs, inputs, config_of(name))
        doubled = compute(name, logprobs, inputs | {"weights": np.full(len(logprobs), -2.0)}, config_of(name))
        assert doubled[0] == pytest.approx(-2 * plain[0])
        np.testing.assert_allclose(doubled[1], -2 * plain[1])


# What is special to one loss


def test_weight_0_hides_an_infinite_logprob() -> None:
    term = loss_of("cross_entropy", [-torch.inf, -1.0], None, weights=[0, 1])
    assert (term.value, term.grad.tolist()) == (1.0, [0.0, -1.0])


def test_the_penalty_of_dro_holds_where_the_advantage_is_0_and_not_where_the_weight_is() -> None:
    inputs = {"logprobs": [0.0, 0.0], "advantages": [0.0, 0.0]}
    for value, grad in values_of("dro", [-2.0, -3.0], {"beta": 0.1}, inputs | {"weights": [1.0, 0.0]}):
        assert value == pytest.approx(0.5 * 0.1 * 4)
        assert grad == pytest.approx([-0.2, 0.0])


def test_beta_0_leaves_no_penalty_however_far_the_policy_is() -> None:
    for value, grad in values_of("dro", [-2.0], {"beta": 0.0}, {"logprobs": [-1e30], "advantages": [3.0]}):
        assert (value, grad) == (6.0, [-3.0])


def test_a_penalty_that_overflows_is_not_finite() -> None:
    assert not loss_of("dro", [-2.0], None, logprobs=[-1e30], advantages=[3.0]).is_finite
    rows = fake_losses.Rows([-2.0], {"logprobs": tensor([-1e30]), "advantages": tensor([3.0])})
    assert not fake_losses.dro(rows, config_of("dro")).is_finite
