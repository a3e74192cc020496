"""Losses that callers wrote: the same numbers as torch on the caller's own function, and nothing beyond the allow-list and its bounds."""

import math
import warnings
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.fx.node import _get_qualified_name
from torch.nn import functional

from tests.unit.engines.traced import call, loss_of, ref, traced
from tinsmith.engines import custom_loss
from tinsmith.engines.batch import Example
from tinsmith.engines.custom_loss import MAX_ELEMENTS, Evaluation
from tinsmith.engines.custom_ops import FUNCTIONS, METHODS
from tinsmith.protocol import custom_ops
from tinsmith.protocol.custom_losses import CustomLoss
from tinsmith.protocol.errors import ValidationFailed

N, K = 6, 3


def squared(logprobs):
    loss = (logprobs**2).sum()
    return loss, {"custom/squares:sum": loss, "custom/share:mean": loss / logprobs.shape[0]}


def clipped_policy(logprobs, old, advantages, mask):
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    terms = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -torch.where(mask > 0, terms, 0.0).sum() / mask.sum().clamp(min=1.0)
    share = ((ratio != clipped) & (mask > 0)).to(logprobs.dtype).mean()
    return loss, {"custom/clip_frac:mean": share.detach()}


def preference(logprobs, old, beta):
    margin = beta * (logprobs - old).sum()
    return -functional.logsigmoid(margin), {"custom/margin:mean": margin}


def soft_targets(logprobs, teacher):
    weights = functional.softmax(teacher, dim=-1)
    entropy = -(weights * functional.log_softmax(teacher, dim=1)).sum()
    return -(weights * logprobs).sum(dim=-1).sum(), {"custom/entropy:sum": entropy}


def of_every_kind(logprobs, advantages, mask):
    rows = logprobs.shape[0]
    scale = math.sqrt(rows)
    pairs = torch.relu(logprobs[:, None] - logprobs[None, :]).mean()
    best = torch.max(logprobs, dim=0).values
    spread = (logprobs - logprobs.mean()).square().mean().sqrt()
    decay = torch.cumsum(torch.ones_like(advantages), dim=0).pow(-0.5)
    smooth = functional.softplus(-logprobs).to(torch.float64).mean().float() + abs(logprobs[1:] - logprobs[:-1]).sum() / 2
    position = torch.arange(rows, dtype=torch.float32) / rows
    joined = torch.cat([logprobs, advantages]).unsqueeze(0).expand(2, -1).transpose(0, 1).reshape(-1)
    loss = scale * pairs + best - spread + (decay * logprobs * position).sum() + smooth + torch.logsumexp(joined, dim=0)
    return loss + (1.0 / (2.0 - logprobs)).masked_fill(mask == 0, 0.0).sum(), {}


def whole_numbers(logprobs, steps, target_tokens):
    return (logprobs * (steps // 2)).sum() + (logprobs * (target_tokens % 2 == 0)).sum(), {}


DRAWS = torch.Generator().manual_seed(7)
FLOATS = {"old": -torch.rand(N, generator=DRAWS), "advantages": torch.randn(N, generator=DRAWS), "mask": torch.tensor([0.0, 1, 1, 0, 1, 1])}
CASES: list[tuple[Callable[..., object], Mapping[str, int], Mapping[str, Tensor]]] = [
    (squared, {}, {}),
    (clipped_policy, {}, FLOATS),
    (preference, {"beta": 0}, FLOATS | {"beta": torch.tensor(0.1)}),
    (soft_targets, {"logprobs": 2, "teacher": 2}, {"teacher": torch.randn(N, K, generator=DRAWS)}),
    (of_every_kind, {}, FLOATS),
    (whole_numbers, {}, {"steps": torch.arange(N), "target_tokens": torch.arange(N)}),
]


def example(inputs: Mapping[str, Tensor], shape: tuple[int, ...] = (N,)) -> Example:
    return Example(torch.zeros(shape[0], dtype=torch.int64), {"target_tokens": torch.arange(math.prod(shape)).reshape(shape), **inputs})


def native(function: Callable[..., object], logprobs: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    leaf = logprobs.clone().requires_grad_()
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    total, metrics = function(leaf, *(inputs[name] for name in names))
    (grad,) = torch.autograd.grad(total, leaf)
    return total.detach(), grad, metrics


@pytest.mark.parametrize(("function", "ranks", "inputs"), CASES, ids=[case[0].__name__ for case in CASES])
def test_value_gradient_and_metrics_are_those_of_the_callers_function(function, ranks, inputs):
    shape = (N, K) if ranks.get("logprobs") == 2 else (N,)
    data = [example(inputs, shape), example(inputs, shape)]
    evaluation = Evaluation.of(traced(function, **ranks), data)
    sums: dict[str, float] = {}
    for datum in data:
        logprobs = -torch.rand(shape, generator=DRAWS)
        total, grad, metrics = native(function, logprobs, {**datum.inputs})
        term = evaluation.term(logprobs, datum.inputs, {})
        assert term.value == pytest.approx(float(total), rel=1e-6)
        torch.testing.assert_close(term.grad, grad, rtol=1e-6, atol=1e-7)
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + float(value.detach()) / (2 if key.endswith(":mean") else 1)
    assert evaluation.metrics() == pytest.approx(sums, rel=1e-6)


def test_the_table_is_the_allow_list():
    assert set(FUNCTIONS) == custom_ops.FUNCTIONS
    assert set(METHODS) == custom_ops.METHODS


@pytest.mark.parametrize(
    "function",
    [
        functional.logsigmoid,
        functional.softplus,
        functional.relu,
        functional.softmax,
        functional.log_softmax,
        torch.where,
        torch.clamp,
        math.sqrt,
    ],
)
def test_names_are_those_that_tracers_write(function):
    assert _get_qualified_name(function) in custom_ops.FUNCTIONS


LEAVES_TORCH = {
    "apply_",
    "backward",
    "bernoulli",
    "data",
    "dropout",
    "empty",
    "item",
    "nonzero",
    "numpy",
    "rand",
    "set_",
    "tolist",
    "unique",
}


def test_nothing_of_the_list_writes_in_place_draws_or_leaves_torch():
    names = custom_ops.METHODS | {name.rpartition(".")[2] for name in custom_ops.FUNCTIONS} | custom_ops.ATTRIBUTES
    assert not names & LEAVES_TORCH
    assert {name for name in names if name.endswith("_")} == {"and_", "or_"}  # operators
    assert {name for name in names if name.startswith("_")} == set()
    assert not {"out", "generator", "requires_grad", "pin_memory"} & custom_ops.KEYWORDS


def refusal(loss: CustomLoss, *, rows: int = N, **inputs: Tensor) -> str:
    with warnings.catch_warnings(), pytest.raises(ValidationFailed) as refused:
        Evaluation.of(loss, [example(inputs, (rows,))])
    return refused.value.message


def method(name: str, target: str, *args: object, **kwargs: object) -> dict[str, object]:
    return call("call_method", name, target, *args, **kwargs)


def function(name: str, target: str, *args: object, **kwargs: object) -> dict[str, object]:
    return call("call_function", name, target, *args, **kwargs)


TOTAL = method("total", "sum", ref("big"))
LOG = ref("logprobs")
HUGE = [
    [method("big", "expand", LOG, 1 << 40, -1)],
    [method("big", "repeat", LOG, 1 << 20)],
    [function("wide", "torch.unsqueeze", LOG, 0), method("big", "tile", ref("wide"), 1 << 12, 1 << 12)],
    [method("big", "new_zeros", LOG, 1 << 40)],
    [method("big", "new_full", LOG, [1 << 20, 1 << 20], 1.0)],
    [function("big", "torch.zeros", 1 << 40)],
    [function("big", "torch.ones", 1 << 40, device={"device": "cpu"})],
    [function("big", "torch.arange", 0, 1e12)],
    [function("big", "torch.broadcast_to", LOG, [1 << 22, N])],
]


@pytest.mark.parametrize("calls", HUGE)
def test_a_tensor_that_is_too_large_is_refused_before_it_exists(calls):
    message = refusal(loss_of(*calls, TOTAL))
    assert f"the bound is {MAX_ELEMENTS}" in message
    assert "graph.nodes[" in message


def test_an_outer_product_of_a_long_datum_is_too_large():
    calls = [function("column", "torch.unsqueeze", LOG, 1), function("big", "operator.sub", ref("column"), LOG)]
    Evaluation.of(loss_of(*calls, TOTAL), [example({}, (1024,))])
    assert str(4096 * 4096) in refusal(loss_of(*calls, TOTAL), rows=4096)


def test_memory_of_one_datum_is_bounded():
    rows = 1 << 11
    calls = [function("column", "torch.unsqueeze", LOG, 1), function("n0", "operator.sub", ref("column"), LOG)]
    calls += [function(f"n{index}", "torch.exp", ref(f"n{index - 1}")) for index in range(1, 9)]
    assert "elements by here" in refusal(loss_of(*calls, method("total", "sum", ref("n8"))), rows=rows)


def test_work_of_a_command_is_bounded_and_known_before_it_is_run():
    calls = [function("n0", "torch.exp", LOG)] + [function(f"n{index}", "torch.exp", ref(f"n{index - 1}")) for index in range(1, 250)]
    loss = loss_of(*calls, method("total", "sum", ref("n249")))
    one = Evaluation.of(loss, [example({})]).program.measure([torch.zeros(N)]).work
    Evaluation.of(loss, [example({})] * (custom_loss.MAX_WORK // one))
    with pytest.raises(ValidationFailed, match="send fewer"):
        Evaluation.of(loss, [example({})] * (custom_loss.MAX_WORK // one + 1))


def test_a_long_chain_of_integers_stays_short():
    calls = [function("n0", "operator.pow", 9, 9)] + [
        function(f"n{index}", "operator.mul", *[ref(f"n{index - 1}")] * 2) for index in range(1, 20)
    ]
    assert "64 bits" in refusal(loss_of(*calls, function("scaled", "operator.mul", LOG, ref("n19")), method("total", "sum", ref("scaled"))))
    assert "exponent" in refusal(loss_of(function("n", "operator.pow", 9, 1 << 40), method("total", "sum", LOG)))


SHAPE = function("shape", "getattr", LOG, "shape")
POSITIVE = function("positive", "operator.gt", LOG, 0)
BEST = function("best", "torch.argmax", LOG)
END = method("total", "sum", LOG)


def end_of(name: str) -> dict[str, object]:
    return method("total", "sum", ref(name))


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        ([function("n", "operator.mul", [1], 1 << 30), END], "tensors or numbers"),
        ([SHAPE, function("n", "operator.mul", ref("shape"), 1 << 30), END], "tensors or numbers"),
        ([function("n", "math.sqrt", LOG), END], "takes a number"),
        ([function("n", "operator.getitem", [1, 2], 0), END], "have items"),
        ([POSITIVE, function("x", "operator.getitem", LOG, ref("positive")), end_of("x")], "torch.where"),
        ([POSITIVE, function("x", "operator.getitem", LOG, {"tuple": [{"ellipsis": True}, ref("positive")]}), end_of("x")], "torch.where"),
        ([POSITIVE, function("x", "torch.where", ref("positive")), END], "depends on values"),
        ([BEST, function("x", "operator.getitem", LOG, {"slice": [None, ref("best"), None]}), end_of("x")], "operator.getitem"),
        ([SHAPE, function("n", "getattr", ref("shape"), "values"), END], "attribute"),
        ([function("n", "getattr", LOG, "values"), END], "attribute"),
        ([SHAPE, method("n", "sum", ref("shape")), END], "method of tensors"),
        ([function("total", "torch.exp", LOG)], "scalar"),
        ([function("ones", "torch.ones_like", LOG), end_of("ones")], "depends on logprobs"),
        ([method("copy", "detach", LOG), end_of("copy")], "depends on logprobs"),
        ([function("n", "operator.floordiv", 1, 0), END], "zero"),
        ([function("n", "operator.pow", -8, 0.3), END], "complex"),
        ([function("n", "torch.reshape", LOG, [4, 4]), END], "torch.reshape"),
    ],
)
def test_what_only_shapes_and_types_can_tell_is_refused_before_the_model_runs(calls, names):
    assert names in refusal(loss_of(*calls))


def test_values_that_do_not_fit_are_refused_when_they_are_met():
    calls = [function("picked", "torch.gather", LOG, 0, ref("index")), method("total", "sum", ref("picked"))]
    inputs = {"index": torch.tensor([0, 99])}
    evaluation = Evaluation.of(loss_of(*calls, inputs=("logprobs", "index")), [example(inputs)])
    with pytest.raises(ValidationFailed, match=r"torch\.gather"):
        evaluation.term(-torch.rand(N, generator=DRAWS), inputs, {})


def test_a_loss_that_is_not_finite_is_told_and_so_is_a_metric():
    def diverging(logprobs, scale):
        loss = (logprobs * scale).exp().sum()
        return loss, {"custom/loss:sum": loss.log().exp() - loss}

    inputs = {"scale": torch.full((N,), -1e4)}
    evaluation = Evaluation.of(traced(diverging), [example(inputs)])
    with pytest.raises(ValidationFailed, match="custom/loss:sum is not finite"):
        evaluation.term(-torch.ones(N), inputs, {})


def test_inputs_stay_as_they_are():
    def relued(logprobs, advantages):
        return (functional.relu(advantages) * logprobs).sum(), {}

    inputs = {"advantages": torch.tensor([-1.0, 1, -1, 1, -1, 1])}
    evaluation = Evaluation.of(traced(relued), [example(inputs)])
    logprobs = -torch.rand(N, generator=DRAWS)
    before = logprobs.clone()
    evaluation.term(logprobs, inputs, {})
    assert inputs["advantages"].tolist() == [-1, 1, -1, 1, -1, 1]
    assert torch.equal(logprobs, before)
    assert not logprobs.requires_grad
