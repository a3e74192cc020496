"""Where adapters go in a model, their linear layer beside autograd, and their optimizer beside torch's AdamW."""

import math

import pytest
import torch
from torch import nn

from tinsmith.engines.lora import ActiveAdapter, Adapter, Group, Layout, LoraLinear, Site, install
from tinsmith.protocol.errors import InternalError, ValidationFailed
from tinsmith.protocol.training import AdamParams, LoraConfig

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 4, bias=True)
        self.router = nn.Linear(6, 2, bias=False)
        self.up_proj = nn.Linear(6, 8, bias=False)


class TinyTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(6, 10, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


@pytest.fixture
def model() -> TinyTied:
    return TinyTied()


@pytest.fixture
def sites(model: TinyTied) -> tuple[Site, ...]:
    return install(model, model.lm_head, ActiveAdapter(CPU))


def lora(**changed: object) -> LoraConfig:
    return LoraConfig.model_validate({"rank": 2, "seed": 7} | changed)


def adapter_of(values: list[float], gradient: list[float] | None = None) -> Adapter:
    site = Site("lm_head", Group.UNEMBED, len(values) - 1, 1)
    layout = Layout.of([site], lora(rank=1, train_attn=False, train_mlp=False))
    return Adapter(lora(), layout, torch.tensor(values), grad_P=None if gradient is None else torch.tensor(gradient))


def test_install_replaces_the_trainable_layers_and_no_others(model: TinyTied, sites: tuple[Site, ...]) -> None:
    assert [site.name for site in sites] == [
        "layers.0.q_proj",
        "layers.0.up_proj",
        "layers.1.q_proj",
        "layers.1.up_proj",
        "lm_head",
    ]
    assert isinstance(model.layers[1].q_proj, LoraLinear)
    assert type(model.layers[0].router) is nn.Linear


def test_a_tied_unembedding_keeps_the_shared_weight(model: TinyTied, sites: tuple[Site, ...]) -> None:
    assert isinstance(model.lm_head, LoraLinear)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert type(model.embed_tokens) is nn.Embedding


def test_the_flags_choose_the_sites(sites: tuple[Site, ...]) -> None:
    layout = Layout.of(sites, lora(train_attn=True, train_mlp=False, train_unembed=False))
    assert [placement.site.name for placement in layout.trained] == ["layers.0.q_proj", "layers.1.q_proj"]
    assert layout.size == 2 * 2 * (6 + 4)


def test_no_flag_is_refused(sites: tuple[Site, ...]) -> None:
    with pytest.raises(ValidationFailed, match="at least one of train_attn, train_mlp and train_unembed"):
        Layout.of(sites, lora(train_attn=False, train_mlp=False, train_unembed=False))


def test_a_flag_without_layers_is_refused(sites: tuple[Site, ...]) -> None:
    attention_only = [site for site in sites if site.name.endswith("q_proj")]
    with pytest.raises(ValidationFailed, match="no layers that train_mlp could train"):
        Layout.of(attention_only, lora(train_unembed=False))


def test_a_fresh_adapter_has_b_0_and_a_within_the_bound(sites: tuple[Site, ...]) -> None:
    layout = Layout.of(sites, lora())
    adapter = Adapter.fresh(lora(), layout, CPU)
    for placement in layout.trained:
        A_RI, B_OR = placement.views(adapter.weights_P)
        bound = 1 / math.sqrt(placement.site.in_features)
        assert not B_OR.any()
        assert A_RI.abs().max() <= bound
        assert A_RI.abs().max() > bound / 2


def test_the_initial_a_depends_on_seed_and_module_name_alone(sites: tuple[Site, ...]) -> None:
    def initial_factor(config: LoraConfig, name: str) -> torch.Tensor:
        layout = Layout.of(sites, config)
        (placement,) = (placement for placement in layout.trained if placement.site.name == name)
        return placement.views(Adapter.fresh(config, layout, CPU).weights_P)[0]

    everything = initial_factor(lora(), "layers.1.q_proj")
    assert torch.equal(everything, initial_factor(lora(train_mlp=False, train_unembed=False), "layers.1.q_proj"))
    assert not torch.equal(everything, initial_factor(lora(seed=8), "layers.1.q_proj"))
    assert not torch.equal(everything, initial_factor(lora(), "layers.0.q_proj"))


def test_product_and_gradients_equal_autograd() -> None:
    torch.manual_seed(0)
    base, active = nn.Linear(6, 4), ActiveAdapter(CPU)
    parent = nn.Module()
    parent.q_proj = base
    (site,) = install(parent, nn.Identity(), active)
    config = lora(rank=4, train_mlp=False, train_unembed=False)
    layout = Layout.of([site], config)
    adapter = Adapter.fresh(config, layout, CPU)
    adapter.weights_P.normal_()
    x, dy = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 4)
    A, B = (view.clone().requires_grad_() for view in layout.trained[0].views(adapter.weights_P))
    expected = base(x) + (32 / 4) * (x @ A.T) @ B.T
    dx, dA, dB = torch.autograd.grad(expected, [x, A, B], dy)

    grad_P = torch.zeros(layout.size)
    with active.use(adapter, grad_P):
        y = parent.q_proj(x)
        y.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, dx)
    for found, wanted in zip(layout.trained[0].views(grad_P), (dA, dB), strict=True):
        torch.testing.assert_close(found, wanted)


def test_without_an_active_adapter_the_layer_is_the_base_layer(model: TinyTied, sites: tuple[Site, ...]) -> None:
    layer = model.layers[0].q_proj
    x = torch.randn(3, 6)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    y, low_rank = layer.product(x, None)
    assert low_rank is None
    assert layer.adapter_gradient(y, x, low_rank, None) is None
    assert torch.equal(layer.input_gradient(y, None, None), y @ layer.weight)


@pytest.mark.parametrize("params", [AdamParams(), AdamParams(learning_rate=0.1, weight_decay=0.1, eps=1e-3, beta1=0.5)])
def test_steps_equal_torch_adamw(params: AdamParams) -> None:
    torch.manual_seed(1)
    start = torch.randn(64)
    parameter = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    adapter = adapter_of(start.tolist())
    for _ in range(4):
        gradient = torch.randn(64)
        parameter.grad = gradient.clone()
        optimizer.step()
        adapter.accumulate(gradient.clone())
        adapter.step(params)
    torch.testing.assert_close(adapter.weights_P, parameter.data, rtol=1e-6, atol=1e-7)
    assert adapter.moments is not None
    torch.testing.assert_close(adapter.moments.exp_avg_sq_P, optimizer.state[parameter]["exp_avg_sq"])
    assert adapter.moments.step == 4


def stepped(params: AdamParams, *gradients: list[float]) -> tuple[Adapter, list[float]]:
    adapter = adapter_of([1.0, -2.0, 0.5])
    norms = []
    for gradient in gradients:
        adapter.accumulate(torch.tensor(gradient))
        step = adapter.step(params)
        assert step is not None
        norms.append(step.grad_norm)
    return adapter, norms


G1, G2, ZERO = [0.3, -0.4, 0.0], [-0.1, 1.2, 0.0], [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("changed", "gradients", "expected"),
    [
        ({}, [G1], [0.9, -1.9, 0.5]),
        ({}, [G1, G2], [0.85956933, -1.94892958, 0.5]),
        ({}, [G1, G2, ZERO], [0.82791220, -1.98724133, 0.5]),
        ({"weight_decay": 0.1, "grad_clip_norm": 0.5}, [G1], [0.89, -1.88, 0.495]),
        ({"weight_decay": 0.1, "grad_clip_norm": 0.5}, [G1, G2], [0.82424244, -1.87726285, 0.49005]),
        ({"eps": 1.0}, [G1], [0.97692308, -1.97142857, 0.5]),
    ],
)
def test_adamw_vectors(changed: dict[str, float], gradients: list[list[float]], expected: list[float]) -> None:
    adapter, _ = stepped(AdamParams(learning_rate=0.1, **changed), *gradients)
    torch.testing.assert_close(adapter.weights_P, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_the_reported_norm_is_that_before_clipping() -> None:
    _, norms = stepped(AdamParams(grad_clip_norm=0.5), G1, G2)
    assert norms == [pytest.approx(0.5), pytest.approx(1.20415946)]


@pytest.mark.parametrize("params", [AdamParams(learning_rate=0.1, grad_clip_norm=-1.0), AdamParams(learning_rate=0.1)])
def test_a_clip_norm_of_0_or_less_clips_nothing(params: AdamParams) -> None:
    """With eps 1 the size of a gradient shows in the step."""
    found, _ = stepped(params.model_copy(update={"eps": 1.0}), [3e4, -4e4, 0.0])
    torch.testing.assert_close(found.weights_P, torch.tensor([0.9, -1.9, 0.5]), rtol=1e-4, atol=0)
    assert found.moments is not None
    torch.testing.assert_close(found.moments.exp_avg_P, torch.tensor([3e3, -4e3, 0.0]))


def test_hyperparameters_may_change_at_every_step_as_in_torch() -> None:
    """The correction of the bias takes the new betas to the power of all steps."""
    torch.manual_seed(2)
    parameter = nn.Parameter(torch.randn(32))
    adapter = adapter_of(parameter.tolist())
    optimizer = torch.optim.AdamW([parameter])
    for params in (
        AdamParams(learning_rate=0.1),
        AdamParams(learning_rate=0.01, beta1=0.5, beta2=0.7, eps=1e-3),
        AdamParams(learning_rate=0.2, weight_decay=0.3),
    ):
        parameter.grad = torch.randn(32)
        group = {"lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": params.eps, "weight_decay": params.weight_decay}
        optimizer.param_groups[0].update(group)
        optimizer.step()
        adapter.accumulate(parameter.grad.clone())
        adapter.step(params)
        torch.testing.assert_close(adapter.weights_P, parameter.data, rtol=1e-6, atol=1e-7)


def test_gradients_of_several_commands_add() -> None:
    adapter = adapter_of([1.0, 1.0, 1.0])
    adapter.accumulate(torch.tensor(G1))
    adapter.accumulate(torch.tensor(G2))
    assert adapter.grad_P is not None
    torch.testing.assert_close(adapter.grad_P, torch.tensor([0.2, 0.8, 0.0]))


def test_a_step_without_a_gradient_changes_nothing() -> None:
    adapter, _ = stepped(AdamParams(learning_rate=0.1), G1, G2)
    before = adapter.weights_P.clone()
    assert adapter.step(AdamParams(learning_rate=0.1)) is None
    assert torch.equal(adapter.weights_P, before)
    assert adapter.moments is not None
    assert adapter.moments.step == 2


def test_learning_rate_0_moves_the_moments_only() -> None:
    adapter, _ = stepped(AdamParams(learning_rate=0), G1)
    assert adapter.weights_P.tolist() == [1.0, -2.0, 0.5]
    assert adapter.moments is not None
    assert adapter.moments.step == 1
    assert adapter.moments.exp_avg_P.any()


def test_a_gradient_that_would_overflow_is_not_added() -> None:
    adapter = adapter_of([1.0, 1.0], [3e38, 0.0])
    before = adapter.grad_P
    with pytest.raises(ValidationFailed, match="not finite"):
        adapter.accumulate(torch.tensor([3e38, 0.0]))
    assert adapter.grad_P is before


def test_a_norm_that_is_not_finite_clears_the_gradient_and_nothing_else() -> None:
    adapter = adapter_of([1.0, 1.0], [math.nan, 0.0])
    with pytest.raises(InternalError, match="cleared and no step"):
        adapter.step(AdamParams())
    assert (adapter.grad_P, adapter.moments, adapter.weights_P.tolist()) == (None, None, [1.0, 1.0])
