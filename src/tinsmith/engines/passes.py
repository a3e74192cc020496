"""From a command to its loss, its outputs and the gradient it would add: the main path of a forward or forward_backward.

A pass reads the adapter and changes nothing of it; what it computed is given back. Its result depends on the command and the adapter alone:
not on what else runs, and in float32 with one thread it repeats bit for bit. `PASSES` is exactly the set of `protocol/losses.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tinsmith.engines import batch
from tinsmith.engines.batch import Example
from tinsmith.engines.custom_loss import Evaluation
from tinsmith.engines.embedding import infonce_pass
from tinsmith.engines.lora import Adapter
from tinsmith.engines.losses import Loss, LossTerm, cross_entropy
from tinsmith.engines.network import Network, Passed, Work
from tinsmith.engines.policy_losses import cispo, dro, gspo, importance_sampling, ppo
from tinsmith.engines.preference import dpo_pass
from tinsmith.protocol.loss_checks import Limits, not_finite, read_config
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.tensors import DType
from tinsmith.protocol.tensors import Tensor as WireTensor
from tinsmith.protocol.training import Compute, ComputeOutput

Pass = Callable[[Network, Adapter, Work], Passed]


def compute(
    network: Network, adapter: Adapter, command: Compute, limits: Limits, micro_batch_tokens: int
) -> tuple[ComputeOutput, Tensor | None]:
    """The answer to a command and, with backward, the gradient [P] to add to the adapter's.

    `micro_batch_tokens`: the bound of a command that has none of its own. Raises ValidationFailed or InputTokensExceeded.
    """
    examples, config, run = _prepared(command, limits)
    bound = micro_batch_tokens if command.micro_batch_tokens is None else command.micro_batch_tokens
    grad_P = torch.zeros(adapter.layout.size, device=network.device) if command.backward else None
    batches = batch.plan([len(example) for example in examples], bound)
    passed = run(network, adapter, Work(command.loss_fn, config, examples, batches, grad_P))
    return _output(command, examples, passed), grad_P


def _prepared(command: Compute, limits: Limits) -> tuple[Sequence[Example], Mapping[str, float], Pass]:
    """All that can be refused without the model."""
    if command.custom_loss is None:
        return batch.read_examples(command, limits, PASSES), read_config(command), PASSES[command.loss_fn]
    examples = batch.read_custom_examples(command, command.custom_loss, limits)
    return examples, {}, partial(_custom_pass, Evaluation.of(command.custom_loss, examples))


def _custom_pass(evaluation: Evaluation, network: Network, adapter: Adapter, work: Work) -> Passed:
    passed = pointwise_pass(evaluation.term, network, adapter, work)
    return replace(passed, metrics=evaluation.metrics())


def pointwise_pass(loss: Loss, network: Network, adapter: Adapter, work: Work) -> Passed:
    """A loss of single datums: each micro-batch runs forward and backward before the next."""

    def checked(positions: Sequence[int], position: int, logprobs: Tensor) -> LossTerm:
        index = positions[position]
        term = loss(logprobs, work.examples[index].inputs, work.config)
        if not term.is_finite:
            raise not_finite(index, work.loss_fn)
        return term

    logprobs: dict[int, Tensor] = {}
    values: list[float] = []
    with network.using(adapter, work.grad_P):
        for positions in work.batches:
            scores = network.score(work.of(positions), partial(checked, positions), backward=work.grad_P is not None)
            logprobs |= zip(positions, scores.logprobs, strict=True)
            values += (term.value for term in scores.terms)
    total = math.fsum(values)  # exact, so the order of micro-batches cannot show
    return Passed([logprobs[position] for position in range(len(work.examples))], total)


PASSES: Mapping[str, Pass] = {
    "cross_entropy": partial(pointwise_pass, cross_entropy),
    "importance_sampling": partial(pointwise_pass, importance_sampling),
    "ppo": partial(pointwise_pass, ppo),
    "cispo": partial(pointwise_pass, cispo),
    "dro": partial(pointwise_pass, dro),
    "gspo": partial(pointwise_pass, gspo),
    "dpo": dpo_pass,
    "infonce": infonce_pass,
}


def _output(command: Compute, examples: Sequence[Example], passed: Passed) -> ComputeOutput:
    metrics = {"loss:sum": passed.loss, **passed.metrics}
    if command.metrics_only:
        return ComputeOutput((), metrics | _measured(command, examples, passed))
    outputs = tuple(_to_wire(output) for output in passed.outputs)
    if command.custom_loss is None and LOSSES[command.loss_fn].output == "embeddings":
        return ComputeOutput((), metrics, embeddings=outputs)
    return ComputeOutput(outputs, metrics)


def _measured(command: Compute, examples: Sequence[Example], passed: Passed) -> dict[str, float]:
    """What an evaluation adds. `tokens:sum` counts the tokens of the model inputs, `pairs:sum` the pairs of a paired loss. With targets:
    `weight:sum` of the target weights (absent means 1 a target) and `nll:sum` = -sum(w * l); nll over weight is the mean negative
    log-likelihood.

    Raises ValidationFailed where a weighted log-prob is not finite.
    """
    spec = LOSSES[command.loss_fn]
    metrics = {"tokens:sum": float(command.num_tokens)}
    if spec.is_paired:
        metrics["pairs:sum"] = len(examples) / 2
    if "target_tokens" not in spec.inputs:
        return metrics
    terms: list[LossTerm] = []
    for index, (example, logprobs) in enumerate(zip(examples, passed.outputs, strict=True)):
        terms.append(cross_entropy(logprobs, example.inputs, {}))
        if not terms[-1].is_finite:
            raise not_finite(index, command.loss_fn)
    weight = math.fsum(-float(term.grad.sum(dtype=torch.float64)) for term in terms)  # the gradient of cross_entropy is the negative weight
    return metrics | {"weight:sum": weight, "nll:sum": math.fsum(term.value for term in terms)}


def _to_wire(values: Tensor) -> WireTensor:
    return WireTensor(DType.FLOAT32, tuple(values.shape), values.contiguous().numpy().tobytes())
