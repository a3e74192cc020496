"""From hidden states to log-probs, through a loss, and back to a gradient of the hidden states, a few rows of logits at a time.

A vocabulary is large: the logits of a micro-batch outweigh everything else. They exist here for a bounded number of rows only, and the
backward pass is the closed form that holds for every loss: dL/dz[v] = sum_k g_k [v = x_k] - (sum_k g_k) softmax(z)[v].

Dimensions: M rows of a micro-batch (its real tokens), C rows of a chunk, D hidden size, V vocabulary, R rank, E pairs of (row, target).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tinsmith.engines.batch import Example
from tinsmith.engines.lora import LoraLinear
from tinsmith.engines.losses import LossTerm

MAX_LOGITS = 1 << 25  # of a chunk: 128 MiB in float32, 682 rows of a vocabulary of 49152

# The position of an example among those scored, and its log-probs: the shape of its targets, float32, on the CPU.
LossOf = Callable[[int, Tensor], LossTerm]


@dataclass(frozen=True, slots=True)
class Scores:
    """One entry an example; `d_hidden_MD` is None without a backward pass and where the whole gradient is zero."""

    logprobs: list[Tensor]
    terms: list[LossTerm]
    d_hidden_MD: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Full-vocabulary log-probs of some rows, with what their backward pass needs."""

    hidden_CD: Tensor
    low_rank_CR: Tensor | None
    logprobs_CV: Tensor


def score(layer: LoraLinear, hidden_MD: Tensor, examples: Sequence[Example], loss: LossOf, *, backward: bool) -> Scores:
    """Log-probs of the targets, loss terms and, with `backward`, the gradient of the hidden states.

    `hidden_MD` holds the rows of the examples one after another. The gradients of the layer's own adapter go where its pair says.
    """
    logprobs: list[Tensor] = []
    terms: list[LossTerm] = []
    d_hidden_MD: Tensor | None = None
    max_rows = max(1, MAX_LOGITS // layer.out_features)
    with torch.no_grad():
        start = 0
        for group in _groups(examples, max_rows):
            num_rows = sum(len(example) for example in group)
            group_MD = hidden_MD[start : start + num_rows]
            loss_of_group = partial(_shifted, loss, len(terms))
            group_logprobs, group_terms, d_group_MD = _score_group(layer, group_MD, group, loss_of_group, max_rows, backward=backward)
            logprobs += group_logprobs
            terms += group_terms
            if d_group_MD is not None:
                d_hidden_MD = torch.zeros_like(hidden_MD) if d_hidden_MD is None else d_hidden_MD
                d_hidden_MD[start : start + num_rows] = d_group_MD
            start += num_rows
    return Scores(logprobs, terms, d_hidden_MD)


def _shifted(loss: LossOf, first: int, position: int, logprobs: Tensor) -> LossTerm:
    return loss(first + position, logprobs)


def _groups(examples: Sequence[Example], max_rows: int) -> Iterator[list[Example]]:
    """Runs of whole examples within the bound; a longer example is a group of its own."""
    group: list[Example] = []
    for example in examples:
        if group and sum(map(len, group)) + len(example) > max_rows:
            yield group
            group = []
        group.append(example)
    if group:
        yield group


def _score_group(
    layer: LoraLinear, hidden_MD: Tensor, group: Sequence[Example], loss: LossOf, max_rows: int, *, backward: bool
) -> tuple[list[Tensor], list[LossTerm], Tensor | None]:
    row_E, target_E = _pairs(group, hidden_MD.device)
    bounds = [(start, min(start + max_rows, len(hidden_MD))) for start in range(0, len(hidden_MD), max_rows)]
    spans = [(int(torch.searchsorted(row_E, start)), int(torch.searchsorted(row_E, stop))) for start, stop in bounds]
    logprobs_E = torch.empty(len(row_E), dtype=torch.float32, device=hidden_MD.device)
    chunk: _Chunk | None = None
    for (start, stop), (first, last) in zip(bounds, spans, strict=True):
        chunk = _forward(layer, hidden_MD[start:stop])
        logprobs_E[first:last] = chunk.logprobs_CV[row_E[first:last] - start, target_E[first:last]]
    pieces = torch.split(logprobs_E.cpu(), [example.targets.numel() for example in group])
    logprobs = [piece.view(example.targets.shape) for piece, example in zip(pieces, group, strict=True)]
    terms = [loss(position, piece) for position, piece in enumerate(logprobs)]
    if not backward:
        return logprobs, terms, None
    g_E = torch.cat([term.grad.reshape(-1) for term in terms])
    if not g_E.any():
        return logprobs, terms, None
    g_E = g_E.to(hidden_MD.device)
    d_hidden_MD = torch.zeros_like(hidden_MD)
    for (start, stop), (first, last) in zip(bounds, spans, strict=True):
        if len(bounds) > 1 or chunk is None:  # only an example longer than a chunk pays for its logits twice
            chunk = _forward(layer, hidden_MD[start:stop])
        _backward(layer, chunk, row_E[first:last] - start, target_E[first:last], g_E[first:last], d_hidden_MD[start:stop])
    return logprobs, terms, d_hidden_MD


def _pairs(group: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """row_E, counted within the group and ascending, and target_E."""
    num_targets = torch.cat([torch.full((len(example),), example.num_targets) for example in group])
    row_E = torch.repeat_interleave(torch.arange(len(num_targets)), num_targets)
    target_E = torch.cat([example.targets.reshape(-1) for example in group])
    return row_E.to(device), target_E.to(device)


def _forward(layer: LoraLinear, hidden_CD: Tensor) -> _Chunk:
    logits_CV, low_rank_CR = layer.product(hidden_CD, layer.pair)
    return _Chunk(hidden_CD, low_rank_CR, torch.log_softmax(logits_CV, dim=-1, dtype=torch.float32))


def _backward(layer: LoraLinear, chunk: _Chunk, row_E: Tensor, target_E: Tensor, g_E: Tensor, d_hidden_CD: Tensor) -> None:
    """Write the gradient of the chunk's hidden states; rows without any gradient (prompts) cost nothing. Uses up the chunk."""
    used_E = g_E != 0
    row_E, target_E, g_E = row_E[used_E], target_E[used_E], g_E[used_E]
    used_C, row_E = torch.unique(row_E, return_inverse=True)
    if len(used_C) == 0:
        return
    if len(used_C) == len(d_hidden_CD):
        hidden_CD, low_rank_CR, d_logits_CV = chunk.hidden_CD, chunk.low_rank_CR, chunk.logprobs_CV
    else:
        low_rank_CR = chunk.low_rank_CR[used_C] if chunk.low_rank_CR is not None else None
        hidden_CD, d_logits_CV = chunk.hidden_CD[used_C], chunk.logprobs_CV[used_C]
    total_C = torch.zeros(len(used_C), device=g_E.device).index_put_((row_E,), g_E, accumulate=True)
    d_logits_CV = d_logits_CV.exp_().mul_(-total_C[:, None])
    d_logits_CV.index_put_((row_E, target_E), g_E, accumulate=True)
    d_logits_CV = d_logits_CV.to(hidden_CD.dtype)
    d_low_rank_CR = layer.adapter_gradient(d_logits_CV, hidden_CD, low_rank_CR, layer.pair)
    d_hidden_CD[used_C] = layer.input_gradient(d_logits_CV, d_low_rank_CR, layer.pair)
