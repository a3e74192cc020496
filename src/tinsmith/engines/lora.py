"""Many LoRA adapters on one frozen base model: where their parameters lie, the linear layer that applies one, and their steps.

An adapter's parameters lie in ONE contiguous float32 buffer (its masters); gradient and moments are buffers of the same layout.
Switching adapters sets a pointer, the optimizer is one fused call, saving needs no gather. Knows nothing of losses, batches or files.

Module matching, initialisation and scaling follow PEFT: y = x W^T + (alpha / r) (x A^T) B^T, A uniform in +-1/sqrt(I), B = 0.

Dimensions: T rows (tokens), I and O input and output features of a linear layer, R rank, P all parameters of an adapter.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tinsmith.engines.optimizers import Moments, update
from tinsmith.protocol.errors import InternalError, TinsmithError, ValidationFailed
from tinsmith.protocol.training import LORA_ALPHA, LoraConfig, LrSchedule, OptimizerParams, SgdParams

CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_
MAX_BLOCK = 1 << 18  # float32 elements of a delta: 1 MiB stays in the cache, the whole of a head's took 4 times as long
MIN_BLOCK_ROWS = 8  # matrix kernels sum in another order below 4 rows
FLOAT32_MAX = torch.finfo(torch.float32).max
SAFE = FLOAT32_MAX / 64  # a bound of each term of a step: their sum, and what rounding adds, stay finite


class Group(StrEnum):
    """Which flag of LoraConfig trains a linear layer."""

    ATTN = "train_attn"
    MLP = "train_mlp"
    UNEMBED = "train_unembed"


_GROUP_OF = {
    "q_proj": Group.ATTN,
    "k_proj": Group.ATTN,
    "v_proj": Group.ATTN,
    "o_proj": Group.ATTN,
    "gate_proj": Group.MLP,
    "up_proj": Group.MLP,
    "down_proj": Group.MLP,
}


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer of the base model that can carry adapters; `name` is its dotted module name."""

    name: str
    group: Group
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The two factors of one adapter at one site and where their gradients are summed; float32 whatever the base model's dtype."""

    A_RI: Tensor
    B_OR: Tensor
    scale: float
    grad_A_RI: Tensor | None = None
    grad_B_OR: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a site's factors lie in the buffer."""

    site: Site
    offset: int
    rank: int

    @property
    def size(self) -> int:
        return self.rank * (self.site.in_features + self.site.out_features)

    def views(self, buffer_P: Tensor) -> tuple[Tensor, Tensor]:
        """A_RI and B_OR as views."""
        split = self.offset + self.rank * self.site.in_features
        A_RI = buffer_P[self.offset : split].view(self.rank, self.site.in_features)
        B_OR = buffer_P[split : self.offset + self.size].view(self.site.out_features, self.rank)
        return A_RI, B_OR


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of an adapter's parameters; `placements[i]` is None where the adapter does not train site i."""

    placements: tuple[Placement | None, ...]
    size: int
    rank: int

    @classmethod
    def of(cls, sites: Sequence[Site], lora: LoraConfig) -> "Layout":
        """Raises ValidationFailed if a flag that is set has no layer to act on, or if none is set."""
        flags = {Group.ATTN: lora.train_attn, Group.MLP: lora.train_mlp, Group.UNEMBED: lora.train_unembed}
        if not any(flags.values()):
            raise ValidationFailed("lora_config: at least one of train_attn, train_mlp and train_unembed must be true")
        for group, wanted in flags.items():
            if wanted and not any(site.group is group for site in sites):
                raise ValidationFailed(f"lora_config: the base model has no layers that {group} could train; set it to false")
        placements: list[Placement | None] = []
        offset = 0
        for site in sites:
            placement = Placement(site, offset, lora.rank) if flags[site.group] else None
            offset += placement.size if placement else 0
            placements.append(placement)
        return cls(tuple(placements), offset, lora.rank)

    @property
    def trained(self) -> list[Placement]:
        return [placement for placement in self.placements if placement]


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did: the L2 norm of the gradient before clipping, and the learning rate after the schedule."""

    grad_norm: float
    learning_rate: float


@dataclass(slots=True)
class Adapter:
    """All that a model's training consists of. `grad_P` None: nothing accumulated; `moments` None: no step taken yet."""

    lora: LoraConfig
    layout: Layout
    weights_P: Tensor
    moments: Moments | None = None
    grad_P: Tensor | None = None

    @classmethod
    def fresh(cls, lora: LoraConfig, layout: Layout, device: torch.device) -> "Adapter":
        """B = 0; A fixed by (seed, module name), whatever else is trained."""
        weights_P = torch.zeros(layout.size)
        for placement in layout.trained:
            A_RI, _ = placement.views(weights_P)
            bound = 1.0 / math.sqrt(placement.site.in_features)
            A_RI.uniform_(-bound, bound, generator=_generator(lora.seed, placement.site.name))
        return cls(lora, layout, weights_P.to(device))

    def accumulate(self, grad_P: Tensor) -> None:
        """Add the gradient of one command; the buffer given is taken over. Raises ValidationFailed, with nothing added, if the sum is
        not finite."""
        total_P = grad_P if self.grad_P is None else grad_P.add_(self.grad_P)
        if not _is_finite(total_P):
            raise ValidationFailed("the accumulated gradient is not finite; lower the weights, advantages or learning rate")
        self.grad_P = total_P

    def check_optimizer(self, params: OptimizerParams) -> None:
        """Raises ValidationFailed if the adapter has taken steps of another optimizer."""
        if self.moments is not None:
            self.moments.check(params)

    def step(self, params: OptimizerParams, schedule: LrSchedule | None = None) -> Step | None:
        """One optimizer step, its learning rate scaled by the schedule's factor after the steps taken so far.

        Clipping scales the summed gradient by min(1, c / (norm + 1e-6)) before the moments see it. Nothing accumulated: nothing changes
        and the answer is None. Raises ValidationFailed, with nothing changed, if the adapter has taken steps of another optimizer, or if
        the step would leave numbers that are not finite. A norm that is not finite raises InternalError with the gradient cleared and all
        else unchanged.
        """
        self.check_optimizer(params)
        grad_P, self.grad_P = self.grad_P, None
        if grad_P is None:
            return None
        norm = float(torch.linalg.vector_norm(grad_P, dtype=torch.float64))
        if not math.isfinite(norm):
            raise InternalError("the accumulated gradient is not finite; it was cleared and no step was taken")
        moments = self.moments or Moments.fresh(params, grad_P)
        learning_rate = params.learning_rate * (schedule.factor(moments.step) if schedule else 1.0)
        weights_P, unclipped_P = self.weights_P, grad_P
        is_risky = not self._is_safe(moments, params, norm, learning_rate)
        if is_risky:  # done on copies, which a refusal drops
            weights_P, grad_P, moments = weights_P.clone(), grad_P.clone(), _copy_of(moments)
        if params.grad_clip_norm > 0:
            grad_P.mul_(min(1.0, params.grad_clip_norm / (norm + CLIP_EPS)))
        if is_risky and not _stays_finite(weights_P, grad_P, moments, params, learning_rate):
            self.grad_P = unclipped_P  # a refusal has no effect: a replay does not run it
            raise ValidationFailed(
                f"learning_rate: a step of {learning_rate:g} leaves weights that are not finite, the model is as it was; "
                "lower it or the weight decay, or raise eps"
            )
        if not is_risky:
            update(weights_P, grad_P, moments, params, learning_rate)
        moments.step += 1
        self.weights_P, self.moments = weights_P, moments
        return Step(norm, learning_rate)

    def _is_safe(self, moments: Moments, params: OptimizerParams, norm: float, learning_rate: float) -> bool:
        """Whether a bound of the step rules an overflow out, whatever the elements are; two passes of reading, where copies take six.

        With w and m the largest magnitudes of weights and first moments, n the gradient's norm, lr and wd: SGD adds at most
        lr (m + n + wd w), AdamW at most lr (m + n) / ((1 - beta1) eps) to w (1 + lr wd), and its second moments stay below n^2 or what
        they were. The ones bound the rate itself.
        """
        weight = _largest(self.weights_P)
        moment = 0.0 if moments.exp_avg_P is None else _largest(moments.exp_avg_P)
        decay = params.weight_decay
        if isinstance(params, SgdParams):
            push = 1 + moment + norm + decay * (1 + weight)
            return push < SAFE and learning_rate * push < SAFE and weight < SAFE
        floor = (1 - params.beta1) * min(1.0, params.eps)
        return (
            norm < math.sqrt(SAFE)
            and (1 + weight) * (1 + learning_rate * decay) < SAFE
            and learning_rate * (1 + moment + norm) < SAFE * floor
        )

    def train(self, grad_P: Tensor, params: OptimizerParams, schedule: LrSchedule | None = None) -> Step | None:
        """`accumulate` and `step`, both or neither: what either refuses leaves the adapter, an earlier gradient included, as it was."""
        before_P = self.grad_P
        self.accumulate(grad_P)
        try:
            return self.step(params, schedule)
        except TinsmithError:
            self.grad_P = before_P
            raise


class ActiveAdapter:
    """The pointer that all LoRA layers of a model follow: the factors of the adapter that is being computed, by site."""

    def __init__(self, device: torch.device) -> None:
        self.pairs: Sequence[Pair | None] | None = None
        # The factors are no autograd leaves (their gradients go straight into a buffer); this one makes their products differentiable.
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    @contextmanager
    def use(self, adapter: Adapter, grad_P: Tensor | None = None) -> Iterator[None]:
        """Compute with an adapter; with `grad_P` [P] float32, backward passes add to it."""
        self.pairs = [
            _pair(placement, adapter.weights_P, grad_P, LORA_ALPHA / adapter.layout.rank) if placement else None
            for placement in adapter.layout.placements
        ]
        try:
            yield
        finally:
            self.pairs = None


class LoraLinear(nn.Module):
    """A frozen linear layer that adds the active adapter's product; shares the base layer's parameters."""

    def __init__(self, base: nn.Linear, active: ActiveAdapter, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self._active = active
        self._index = index

    @property
    def pair(self) -> Pair | None:
        """The active adapter's factors here; None without an adapter or where it does not train this layer."""
        return self._active.pairs[self._index] if self._active.pairs is not None else None

    def forward(self, x: Tensor) -> Tensor:
        pair = self.pair
        if pair is None:
            return nn.functional.linear(x, self.weight, self.bias)
        x_TI = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled():
            y_TO: Tensor = _LoraProduct.apply(x_TI, self._active.anchor, self, pair)  # type: ignore[no-untyped-call]
        else:
            y_TO, _ = self.product(x_TI, pair)
        return y_TO.view(*x.shape[:-1], self.out_features)

    def product(self, x_TI: Tensor, pair: Pair | None) -> tuple[Tensor, Tensor | None]:
        """y_TO and, for the backward pass, the low-rank product u_TR = x A^T."""
        y_TO = nn.functional.linear(x_TI, self.weight, self.bias)
        if pair is None:
            return y_TO, None
        u_TR = x_TI.float() @ pair.A_RI.T
        return add_delta(y_TO, u_TR, pair.B_OR, pair.scale), u_TR

    def adapter_gradient(self, dy_TO: Tensor, x_TI: Tensor, u_TR: Tensor | None, pair: Pair | None) -> Tensor | None:
        """Add the factors' gradients to the pair's buffers; returns du_TR, which `input_gradient` takes."""
        if pair is None or u_TR is None:
            return None
        du_TR = (dy_TO @ pair.B_OR.to(dy_TO.dtype)).mul_(pair.scale)
        if pair.grad_A_RI is not None and pair.grad_B_OR is not None:
            _add_product(pair.grad_A_RI, du_TR.T, x_TI, 1.0)
            _add_product(pair.grad_B_OR, dy_TO.T, u_TR.to(dy_TO.dtype), pair.scale)
        return du_TR

    def input_gradient(self, dy_TO: Tensor, du_TR: Tensor | None, pair: Pair | None) -> Tensor:
        """dx_TI."""
        dx_TI = dy_TO @ self.weight
        return dx_TI if pair is None or du_TR is None else dx_TI.addmm_(du_TR, pair.A_RI.to(du_TR.dtype))


class _LoraProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, anchor: Tensor, layer: LoraLinear, pair: Pair) -> Tensor:
        y_TO, u_TR = layer.product(x_TI, pair)
        ctx.save_for_backward(x_TI, u_TR)
        ctx.layer, ctx.pair = layer, pair
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, None, None, None]:
        x_TI, u_TR = ctx.saved_tensors
        layer, pair = ctx.layer, ctx.pair
        du_TR = layer.adapter_gradient(dy_TO, x_TI, u_TR, pair)
        # The first layer's input comes from the frozen embedding and wants no gradient.
        dx_TI = layer.input_gradient(dy_TO, du_TR, pair) if ctx.needs_input_grad[0] else None
        return dx_TI, None, None, None


def add_delta(y_TO: Tensor, u_TR: Tensor, B_OR: Tensor, scale: float) -> Tensor:
    """y_TO + scale * u_TR B^T, in place; u and B are float32.

    Where y is shorter, the steps are PEFT's to the bit: base and delta meet in float32 and their sum is rounded once. Rounding anywhere
    else is as good as PEFT's, but in bf16 the layers above amplify one changed bit to the full noise of the format.
    """
    if y_TO.dtype == u_TR.dtype:
        return y_TO.addmm_(u_TR, B_OR.T, alpha=scale)
    num_blocks = max(1, len(y_TO) // max(MIN_BLOCK_ROWS, MAX_BLOCK // y_TO.shape[1]))
    for y_block, u_block in zip(y_TO.tensor_split(num_blocks), u_TR.tensor_split(num_blocks), strict=True):
        y_block.copy_((u_block @ B_OR.T).mul_(scale).add_(y_block))
    return y_TO


def _add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """total += alpha * left @ right; `total` is float32, the factors may be of a shorter dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, alpha=alpha)
    else:
        total.add_(left @ right, alpha=alpha)


def install(model: nn.Module, unembedding: nn.Module, active: ActiveAdapter) -> tuple[Site, ...]:
    """Put a LoraLinear in place of every linear layer that adapters can train; returns the sites in the model's order.

    A tied unembedding is replaced on the output side only; the embedding keeps the shared weight.
    """
    found = [
        (name, module, Group.UNEMBED if module is unembedding else _GROUP_OF[name.rpartition(".")[2]])
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (module is unembedding or name.rpartition(".")[2] in _GROUP_OF)
    ]
    for index, (name, module, _) in enumerate(found):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LoraLinear(module, active, index))
    return tuple(Site(name, group, module.in_features, module.out_features) for name, module, group in found)


def _pair(placement: Placement, weights_P: Tensor, grad_P: Tensor | None, scale: float) -> Pair:
    A_RI, B_OR = placement.views(weights_P)
    if grad_P is None:
        return Pair(A_RI, B_OR, scale)
    return Pair(A_RI, B_OR, scale, *placement.views(grad_P))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _stays_finite(weights_P: Tensor, grad_P: Tensor, moments: Moments, params: OptimizerParams, learning_rate: float) -> bool:
    """Step; answers whether all that it left is finite. Rates that are no float32 are refused by some of torch's kernels: no step then."""
    if max(learning_rate, params.weight_decay) > FLOAT32_MAX:
        return False
    update(weights_P, grad_P, moments, params, learning_rate)
    return all(_is_finite(values_P) for values_P in (weights_P, moments.exp_avg_P, moments.exp_avg_sq_P) if values_P is not None)


def _copy_of(moments: Moments) -> Moments:
    exp_avg_P, exp_avg_sq_P = moments.exp_avg_P, moments.exp_avg_sq_P
    return replace(
        moments,
        exp_avg_P=None if exp_avg_P is None else exp_avg_P.clone(),
        exp_avg_sq_P=None if exp_avg_sq_P is None else exp_avg_sq_P.clone(),
    )


def _is_finite(values_P: Tensor) -> bool:
    """The largest magnitude is NaN or infinite iff some element is."""
    return math.isfinite(_largest(values_P))


def _largest(values_P: Tensor) -> float:
    """The largest magnitude; NaN if an element is. One pass without a mask of the same size; on a CPU 30 times as fast as the norm."""
    return float(torch.stack(torch.aminmax(values_P)).abs().max())
