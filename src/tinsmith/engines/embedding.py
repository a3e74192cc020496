"""Embeddings of sequences and their contrastive loss.

An embedding is the last hidden state at the last token, L2-normalised. Knows nothing of optimizers or logits. Datums 2i and 2i + 1 are a
query and its positive; the other positives of the command are the query's negatives.

Dimensions: Q queries, as many positives, B sequences of a micro-batch, D hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tinsmith.engines.lora import Adapter
from tinsmith.engines.network import Network, Passed, Work
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.loss_checks import not_finite


@dataclass(frozen=True, slots=True)
class Contrast:
    """`value`: L; float32 gradients with the shapes of the embeddings; `num_nearest`: queries whose own positive is nearer than every
    other."""

    value: float
    grad_query_QD: Tensor
    grad_positive_QD: Tensor
    num_nearest: int


def infonce(query_QD: Tensor, positive_QD: Tensor, config: Mapping[str, float]) -> Contrast:
    """L = -sum over i of log softmax_j(q_i . p_j / temperature) at j = i.

    Source: van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding", equation 4, with in-batch negatives, in
    one direction (queries against positives), summed over queries. With S the similarities and P their softmax over j,
    dL/dS = P - 1; computed in float64.
    """
    temperature = config["temperature"]
    query_QD, positive_QD = query_QD.double(), positive_QD.double()
    logits_QQ = query_QD @ positive_QD.T / temperature
    own_Q = logits_QQ.diagonal()
    value = float((torch.logsumexp(logits_QQ, dim=1) - own_Q).sum())
    d_logits_QQ = torch.softmax(logits_QQ, dim=1)
    d_logits_QQ.diagonal().sub_(1.0)
    d_logits_QQ /= temperature
    others_QQ = logits_QQ.clone()
    others_QQ.fill_diagonal_(-torch.inf)
    num_nearest = int((own_Q > others_QQ.amax(dim=1)).sum())
    return Contrast(value, (d_logits_QQ @ positive_QD).float(), (d_logits_QQ.T @ query_QD).float(), num_nearest)


def infonce_pass(network: Network, adapter: Adapter, work: Work) -> Passed:
    """Embeddings of all datums, then the loss and its gradient by embedding, then micro-batch by micro-batch the embeddings again and the
    backward pass with the stored gradient: the loss sees the whole command, and memory holds one micro-batch.

    Source of the order: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
    Metric: `infonce/accuracy:mean`, the share of queries whose own positive is nearer than every other. Raises ValidationFailed, with the
    adapter unchanged, for a loss that is not finite, and for a backward pass of an adapter that no embedding depends on.
    """
    if work.grad_P is not None and not (adapter.lora.train_attn or adapter.lora.train_mlp):
        raise ValidationFailed(
            f"loss_fn: {work.loss_fn} trains nothing of a model with train_unembed alone; create one with train_attn or train_mlp"
        )
    found: dict[int, Tensor] = {}
    with network.using(adapter):
        for positions in work.batches:
            found |= zip(positions, _embed(network, work, positions, backward=False).cpu(), strict=True)
    embeddings = [found[position] for position in range(len(work.examples))]
    contrast = infonce(torch.stack(embeddings[::2]), torch.stack(embeddings[1::2]), work.config)
    grads = torch.stack((contrast.grad_query_QD, contrast.grad_positive_QD), dim=1).flatten(0, 1)  # one row a datum, in order
    _check(contrast.value, grads, work.loss_fn)
    if work.grad_P is not None:
        with network.using(adapter, work.grad_P):
            for positions in work.batches:
                embedding_BD = _embed(network, work, positions, backward=True)
                embedding_BD.backward(grads[list(positions)].to(network.device))  # type: ignore[no-untyped-call]
    return Passed(embeddings, contrast.value, {"infonce/accuracy:mean": contrast.num_nearest / len(contrast.grad_query_QD)})


def _embed(network: Network, work: Work, positions: Sequence[int], *, backward: bool) -> Tensor:
    with torch.set_grad_enabled(backward):
        return normalize(network.last_hidden(work.of(positions), backward=backward), dim=1)


def _check(value: float, grads: Tensor, loss_fn: str) -> None:
    """A value of NaN or infinity is the first datum's where no single gradient shows it."""
    bad = (~torch.isfinite(grads).all(dim=1)).nonzero().flatten().tolist()
    if bad or not torch.isfinite(torch.tensor(value)):
        raise not_finite(bad[0] if bad else 0, loss_fn)
