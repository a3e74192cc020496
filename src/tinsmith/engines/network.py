"""The base model as passes see it: micro-batches in, hidden states, log-probs and gradients out, with an adapter or without.

Knows nothing of losses. What a pass is given and what it answers are here too, since every kind of pass shares them.

Dimensions: B sequences of a micro-batch, T padded length, M its real tokens, D hidden size, P parameters of an adapter.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tinsmith.engines import batch, unembed
from tinsmith.engines.batch import Example
from tinsmith.engines.lora import ActiveAdapter, Adapter, LoraLinear


@dataclass(frozen=True, slots=True)
class Work:
    """A command, checked and read. `batches`: the micro-batches, as positions in `examples`. `grad_P`: where the backward pass adds the
    adapter's gradient; None without one."""

    loss_fn: str
    config: Mapping[str, float]
    examples: Sequence[Example]
    batches: Sequence[Sequence[int]]
    grad_P: Tensor | None

    def of(self, positions: Sequence[int]) -> list[Example]:
        return [self.examples[position] for position in positions]


@dataclass(frozen=True, slots=True)
class Passed:
    """`outputs`: log-probs or embeddings, one a datum in order. `loss`: the sum. `metrics`: what else the loss has to say."""

    outputs: Sequence[Tensor]
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Network:
    """A frozen decoder and its unembedding, whose LoRA layers follow `active`."""

    def __init__(self, decoder: nn.Module, unembedding: LoraLinear, active: ActiveAdapter, device: torch.device) -> None:
        self._decoder = decoder
        self._unembedding = unembedding
        self._active = active
        self.device = device

    def using(self, adapter: Adapter, grad_P: Tensor | None = None) -> AbstractContextManager[None]:
        """Compute with an adapter (outside of this: with the base model alone); with `grad_P`, backward passes add to it."""
        return self._active.use(adapter, grad_P)

    def score(self, examples: Sequence[Example], loss: unembed.LossOf, *, backward: bool) -> unembed.Scores:
        """One micro-batch: log-probs and loss, and with `backward` the gradients into the active buffer."""
        hidden_BTD, mask_BT = self._hidden(examples, backward=backward)
        scores = unembed.score(self._unembedding, hidden_BTD.detach()[mask_BT], examples, loss, backward=backward)
        if scores.d_hidden_MD is not None and hidden_BTD.requires_grad:
            d_hidden_BTD = torch.zeros_like(hidden_BTD)
            d_hidden_BTD[mask_BT] = scores.d_hidden_MD
            hidden_BTD.backward(d_hidden_BTD)  # type: ignore[no-untyped-call]
        return scores

    def last_hidden(self, examples: Sequence[Example], *, backward: bool) -> Tensor:
        """hidden_BD float32 of each example's last token, after the model's final norm; no logits are computed. With `backward` it is
        differentiable, and gradients go into the active buffer."""
        hidden_BTD, mask_BT = self._hidden(examples, backward=backward)
        rows_B = torch.arange(len(examples), device=self.device)
        with torch.set_grad_enabled(backward):
            return hidden_BTD[rows_B, mask_BT.sum(dim=1) - 1].float()

    def _hidden(self, examples: Sequence[Example], *, backward: bool) -> tuple[Tensor, Tensor]:
        tokens_BT, mask_BT = (tensor.to(self.device) for tensor in batch.pad(examples))
        with torch.set_grad_enabled(backward):
            hidden_BTD: Tensor = self._decoder(input_ids=tokens_BT, use_cache=False).last_hidden_state
        return hidden_BTD, mask_BT
