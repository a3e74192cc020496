"""Steps and schedules beside torch.optim, and what keeps one optimizer's state from another."""

from functools import partial

import pytest
import torch
from torch import nn

from tinsmith.engines.lora import Adapter, Group, Layout, Site
from tinsmith.engines.optimizers import Moments, update
from tinsmith.protocol.errors import InternalError, ValidationFailed
from tinsmith.protocol.training import AdamParams, LoraConfig, LrSchedule, OptimizerParams, SgdParams

SIZE = 64
LORA = LoraConfig(rank=1, seed=7, train_attn=False, train_mlp=False)
SCHEDULES = [
    None,
    LrSchedule(warmup_steps=2),
    LrSchedule(kind="linear", warmup_steps=1, total_steps=4, final_fraction=0.1),
    LrSchedule(kind="cosine", total_steps=5),
]
SGD = [SgdParams(learning_rate=0.1), SgdParams(learning_rate=0.1, momentum=0.9, weight_decay=0.01)]


def adapter_of(weights: torch.Tensor) -> Adapter:
    return Adapter(LORA, Layout.of([Site("lm_head", Group.UNEMBED, SIZE - 1, 1)], LORA), weights.clone())


def torch_optimizer(parameter: nn.Parameter, params: OptimizerParams) -> torch.optim.Optimizer:
    if isinstance(params, SgdParams):
        return torch.optim.SGD(
            [parameter], lr=params.learning_rate, momentum=params.momentum, weight_decay=params.weight_decay, foreach=False
        )
    return torch.optim.AdamW(
        [parameter],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        fused=True,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("params", [*SGD, AdamParams(learning_rate=0.1, weight_decay=0.1, eps=1e-8)])
def test_steps_equal_torch_with_lambda_lr_bit_for_bit(params: OptimizerParams, schedule: LrSchedule | None) -> None:
    torch.manual_seed(3)
    start = torch.randn(SIZE)
    parameter = nn.Parameter(start.clone())
    optimizer = torch_optimizer(parameter, params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor if schedule else lambda _: 1.0)
    adapter = adapter_of(start)
    for _ in range(6):
        gradient = torch.randn(SIZE)
        parameter.grad = gradient.clone()
        (rate,) = scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
        adapter.accumulate(gradient.clone())
        step = adapter.step(params, schedule)
        assert step is not None
        assert step.learning_rate == rate
        assert torch.equal(adapter.weights_P, parameter.data)


def test_momentum_may_come_and_go_as_in_torch() -> None:
    """The buffer begins at the first step with momentum, and rests while there is none."""
    torch.manual_seed(4)
    start = torch.randn(SIZE)
    parameter = nn.Parameter(start.clone())
    optimizer = torch_optimizer(parameter, SgdParams())
    adapter = adapter_of(start)
    for momentum in (0.0, 0.9, 0.0, 0.5):
        gradient = torch.randn(SIZE)
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.step()
        adapter.train(gradient, SgdParams(momentum=momentum))
    assert torch.equal(adapter.weights_P, parameter.data)


OVERFLOWING = [
    AdamParams(learning_rate=1e308),
    AdamParams(learning_rate=3e38),
    AdamParams(learning_rate=1e30, weight_decay=1e30),
    AdamParams(eps=1e-320),
    SgdParams(learning_rate=1e308),
    SgdParams(learning_rate=3e38, momentum=0.9, grad_clip_norm=5.0),
    SgdParams(weight_decay=1e308),
]


def buffers_of(adapter: Adapter) -> list[bytes]:
    assert adapter.moments is not None
    assert adapter.grad_P is not None
    held = (adapter.weights_P, adapter.grad_P, adapter.moments.exp_avg_P, adapter.moments.exp_avg_sq_P)
    return [values.numpy().tobytes() for values in held if values is not None]


def trained_adapter(params: OptimizerParams) -> Adapter:
    """With a step of sound rates behind it and a gradient, of which an element is 0."""
    torch.manual_seed(5)
    adapter = adapter_of(torch.randn(SIZE))
    sound = AdamParams() if isinstance(params, AdamParams) else SgdParams(momentum=0.9)
    gradient = torch.randn(SIZE)
    gradient[0] = 0
    adapter.train(gradient.clone(), sound)
    adapter.accumulate(gradient)
    return adapter


@pytest.mark.proves("R10")
@pytest.mark.parametrize("params", OVERFLOWING)
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_step_that_leaves_weights_that_are_not_finite_is_refused_and_has_no_effect(params: OptimizerParams, is_fused: bool) -> None:
    adapter = trained_adapter(params)
    before = buffers_of(adapter)
    step = partial(adapter.train, torch.zeros(SIZE), params) if is_fused else partial(adapter.step, params)
    with pytest.raises(ValidationFailed, match=r"^learning_rate: a step of .* not finite, the model is as it was; lower it"):
        step()
    assert buffers_of(adapter) == before
    assert adapter.moments is not None
    assert adapter.moments.step == 1


def test_a_first_step_that_is_refused_leaves_no_moments() -> None:
    adapter = adapter_of(torch.ones(SIZE))
    with pytest.raises(ValidationFailed, match="learning_rate"):
        adapter.train(torch.ones(SIZE), AdamParams(learning_rate=1e308))
    assert (adapter.moments, adapter.grad_P, adapter.weights_P.tolist()) == (None, None, [1.0] * SIZE)


@pytest.mark.parametrize("params", [AdamParams(learning_rate=1e35), SgdParams(learning_rate=1e36), AdamParams(eps=1e-40)])
def test_a_risky_step_that_comes_out_finite_is_that_of_torch(params: OptimizerParams) -> None:
    torch.manual_seed(6)
    start, gradient = torch.randn(SIZE), torch.randn(SIZE)
    parameter = nn.Parameter(start.clone())
    optimizer = torch_optimizer(parameter, params)
    parameter.grad = gradient.clone()
    optimizer.step()
    adapter = adapter_of(start)
    moments = Moments.fresh(params, gradient)
    assert not adapter._is_safe(moments, params, float(gradient.norm()), params.learning_rate)
    adapter.train(gradient, params)
    assert torch.equal(adapter.weights_P, parameter.data)


def test_a_gradient_whose_square_overflows_does_not_spoil_the_moments() -> None:
    adapter = trained_adapter(AdamParams())
    before = buffers_of(adapter)
    with pytest.raises(ValidationFailed, match="not finite"):
        adapter.train(torch.full((SIZE,), 1e30), AdamParams())
    assert buffers_of(adapter) == before


@pytest.mark.parametrize("params", [AdamParams(), AdamParams(learning_rate=1.0, weight_decay=0.1, eps=1e-8), SgdParams(momentum=0.9)])
def test_a_usual_step_is_done_in_place(params: OptimizerParams) -> None:
    adapter = adapter_of(torch.randn(SIZE))
    weights_P = adapter.weights_P
    adapter.train(1000 * torch.randn(SIZE), params)
    assert adapter.weights_P is weights_P


def test_the_first_buffer_is_the_gradient() -> None:
    adapter = adapter_of(torch.zeros(SIZE))
    adapter.train(torch.ones(SIZE), SgdParams(momentum=0.9))
    assert adapter.moments is not None
    assert adapter.moments.exp_avg_P is not None
    assert torch.equal(adapter.moments.exp_avg_P, torch.ones(SIZE))


def test_sgd_clips_as_adam_does() -> None:
    adapter = adapter_of(torch.zeros(SIZE))
    step = adapter.train(torch.ones(SIZE), SgdParams(learning_rate=1.0, grad_clip_norm=2.0))
    assert step is not None
    assert step.grad_norm == pytest.approx(8.0)
    assert float(adapter.weights_P.norm()) == pytest.approx(2.0)


@pytest.mark.parametrize(("first", "second"), [(AdamParams(), SgdParams()), (SgdParams(), AdamParams())])
def test_a_step_of_another_optimizer_is_refused_with_nothing_changed(first: OptimizerParams, second: OptimizerParams) -> None:
    adapter = adapter_of(torch.zeros(SIZE))
    adapter.train(torch.ones(SIZE), first)
    adapter.accumulate(torch.ones(SIZE))
    weights, moments = adapter.weights_P.clone(), adapter.moments
    message = rf"^optimizer: the model has taken 1 steps of {first.type} and takes none of {second.type}; send {first.type}, or load"
    with pytest.raises(ValidationFailed, match=message):
        adapter.step(second)
    with pytest.raises(ValidationFailed, match=message):
        adapter.train(torch.ones(SIZE), second)
    assert torch.equal(adapter.weights_P, weights)
    assert adapter.moments is moments
    assert adapter.grad_P is not None
    assert torch.equal(adapter.grad_P, torch.ones(SIZE))


def test_before_its_first_step_an_adapter_takes_any_optimizer() -> None:
    adapter = adapter_of(torch.zeros(SIZE))
    assert adapter.step(AdamParams()) is None  # nothing to step on
    adapter.accumulate(torch.ones(SIZE))
    assert adapter.step(SgdParams()) is not None


def test_train_adds_to_what_was_accumulated_before() -> None:
    together, apart = adapter_of(torch.zeros(SIZE)), adapter_of(torch.zeros(SIZE))
    for adapter in (together, apart):
        adapter.accumulate(torch.ones(SIZE))
    apart.accumulate(torch.full((SIZE,), 2.0))
    assert together.train(torch.full((SIZE,), 2.0), SgdParams()) == apart.step(SgdParams())
    assert torch.equal(together.weights_P, apart.weights_P)
    assert together.grad_P is None


def test_train_keeps_the_earlier_gradient_where_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of(torch.zeros(SIZE))
    adapter.accumulate(torch.ones(SIZE))
    bad = torch.full((SIZE,), torch.nan)
    with pytest.raises(ValidationFailed, match="not finite"):
        adapter.train(bad.clone(), SgdParams())
    monkeypatch.setattr("tinsmith.engines.lora._is_finite", lambda _: True)
    with pytest.raises(InternalError, match="not finite"):
        adapter.train(bad.clone(), SgdParams(grad_clip_norm=1.0))
    assert adapter.moments is None
    assert adapter.grad_P is not None
    assert torch.equal(adapter.grad_P, torch.ones(SIZE))
    assert not adapter.weights_P.any()


def test_moments_of_the_wrong_kind_are_a_programming_error() -> None:
    weights = torch.zeros(SIZE)
    with pytest.raises(TypeError, match="not AdamW's"):
        update(weights, torch.ones(SIZE), Moments.fresh(SgdParams(), weights), AdamParams(), 0.1)
