"""The optimizers of an adapter's buffer: AdamW and SGD as `torch.optim` computes them, and what they keep between steps.

Knows nothing of clipping, gradients' origin or files.

Dimensions: P parameters of an adapter.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from tinsmith.engines.base import check_optimizer
from tinsmith.protocol.training import AdamParams, OptimizerParams, SgdParams


@dataclass(slots=True)
class Moments:
    """What `optimizer` keeps after `step` steps.

    adamw: both averages. sgd: `exp_avg_P` is the momentum buffer, None before the first step with momentum; `exp_avg_sq_P` is None.
    """

    optimizer: Literal["adamw", "sgd"]
    step: int
    exp_avg_P: Tensor | None
    exp_avg_sq_P: Tensor | None

    @classmethod
    def fresh(cls, params: OptimizerParams, like_P: Tensor) -> "Moments":
        if isinstance(params, SgdParams):
            return cls("sgd", 0, None, None)
        return cls("adamw", 0, torch.zeros_like(like_P), torch.zeros_like(like_P))

    def to(self, device: torch.device) -> "Moments":
        return replace(self, exp_avg_P=_moved(self.exp_avg_P, device), exp_avg_sq_P=_moved(self.exp_avg_sq_P, device))

    def check(self, params: OptimizerParams) -> None:
        """Raises ValidationFailed for a step of another optimizer than those before."""
        check_optimizer(self.optimizer, self.step, params.type)


def update(weights_P: Tensor, grad_P: Tensor, moments: Moments, params: OptimizerParams, learning_rate: float) -> None:
    """One step, in place; `moments.step` is left to the caller. The buffers of `grad_P` may be used up."""
    if isinstance(params, SgdParams):
        _update_sgd(weights_P, grad_P, moments, params, learning_rate)
    else:
        _update_adamw(weights_P, grad_P, moments, params, learning_rate)


def _update_adamw(weights_P: Tensor, grad_P: Tensor, moments: Moments, params: AdamParams, learning_rate: float) -> None:
    """torch.optim.AdamW, fused: t from 1, eps outside the root and after bias correction, decay decoupled."""
    if moments.exp_avg_P is None or moments.exp_avg_sq_P is None:
        raise TypeError("these moments are not AdamW's")
    adamw(
        [weights_P],
        [grad_P],
        [moments.exp_avg_P],
        [moments.exp_avg_sq_P],
        [],
        [torch.tensor(float(moments.step), device=grad_P.device)],
        fused=True,
        amsgrad=False,
        maximize=False,
        lr=learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
    )


def _update_sgd(weights_P: Tensor, grad_P: Tensor, moments: Moments, params: SgdParams, learning_rate: float) -> None:
    """torch.optim.SGD with dampening 0: g + wd * w; the first momentum buffer is that, later ones momentum * buffer + that."""
    buffers = [moments.exp_avg_P]
    sgd(
        [weights_P],
        [grad_P],
        buffers,
        foreach=False,
        fused=False,
        weight_decay=params.weight_decay,
        momentum=params.momentum,
        lr=learning_rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    (moments.exp_avg_P,) = buffers


def _moved(values_P: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values_P is None else values_P.to(device)
