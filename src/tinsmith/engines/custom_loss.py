"""Losses that callers wrote: from a graph as data to (value, gradient, metrics) of each datum.

A graph names operations; each name is looked up in a table of torch functions that is written here, and nowhere else. Shapes never depend
on values (`protocol/custom_ops.py`), so the graph first runs on tensors without memory, once for each set of shapes in the command: that
finds every fault of shape or type and measures what the real run will take, before the base model computes anything. The bound of work is
counted in elements and not in seconds: whether a command is refused is then the same each time it is run.

Knows nothing of models or of how a gradient reaches the adapter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import fsum, isfinite

import torch
from torch import Tensor

from tinsmith.engines.batch import Example
from tinsmith.engines.custom_ops import DTYPES, FUNCTIONS, METHODS, Value
from tinsmith.engines.losses import LossTerm
from tinsmith.protocol.custom_inputs import read_names
from tinsmith.protocol.custom_losses import (
    MAX_INTEGER,
    Argument,
    CpuDevice,
    CustomLoss,
    DTypeName,
    LossNode,
    Ref,
    check_custom_loss,
    output_of,
)
from tinsmith.protocol.errors import ValidationFailed

MAX_ELEMENTS = 1 << 22  # of one tensor
MAX_DATUM_ELEMENTS = 1 << 25  # of all tensors of one datum, which its gradient keeps
MAX_WORK = 1 << 30  # of one command, in elements read or written: some ten seconds
CALL_WORK = 4096  # what one operation costs beside its elements: some ten microseconds

# What torch raises for arguments that do not fit.
_FAULTS = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError)
_SHOWN = 200  # characters of such a fault


@dataclass(frozen=True, slots=True)
class Scored:
    """One datum: its loss, a scalar that can be differentiated, and its metrics by key."""

    total: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(slots=True)
class Meter:
    """What a run takes. Raises ValidationFailed at the first node that is over a bound."""

    elements: int = 0
    work: int = 0

    def add(self, step: "Step", taken: Sequence[Value], made: Value) -> None:
        sizes = [tensor.numel() for tensor in _tensors(made, step)]
        if any(size > MAX_ELEMENTS for size in sizes):
            raise ValidationFailed(
                f"{step.label}: makes a tensor of {max(sizes)} elements, the bound is {MAX_ELEMENTS}; send smaller datums"
            )
        self.elements += sum(sizes)
        self.work += (
            CALL_WORK * max(1, len(sizes)) + sum(sizes) + sum(tensor.numel() for value in taken for tensor in _tensors(value, step))
        )
        if self.elements > MAX_DATUM_ELEMENTS:
            raise ValidationFailed(f"{step.label}: the loss has made more than {MAX_DATUM_ELEMENTS} elements by here; send smaller datums")


@dataclass(frozen=True, slots=True)
class Step:
    """One call. `label` is what messages call it."""

    label: str
    name: str
    function: Callable[..., Value]
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]

    def run(self, values: Mapping[str, Value], meter: Meter | None) -> Value:
        """Raises ValidationFailed for what does not fit."""
        args = [_resolved(value, values) for value in self.args]
        kwargs = {name: _resolved(value, values) for name, value in self.kwargs.items()}
        try:
            made = self.function(*args, **kwargs)
        except NotImplementedError as error:  # there is nothing to read in a tensor without memory
            raise ValidationFailed(f"{self.label}: the size of its result depends on values; use torch.where or gather") from error
        except _FAULTS as error:
            told = str(error).strip().partition("\n")[0][:_SHOWN]
            raise ValidationFailed(f"{self.label}: {told}; mend the loss or its inputs") from error
        if meter is not None:
            meter.add(self, [*args, *kwargs.values()], made)
        return made


class Program:
    """A graph, rebuilt. Raises ValidationFailed, PayloadTooLarge for one that is not sound."""

    def __init__(self, loss: CustomLoss) -> None:
        check_custom_loss(loss)
        nodes, num_inputs = loss.graph.nodes, len(loss.inputs)
        self._inputs = [node.name for node in nodes[:num_inputs]]
        self._steps = [_step(node, f"graph.nodes[{index}]") for index, node in enumerate(nodes) if node.op.startswith("call_")]
        self._total, self._metrics = output_of(loss)

    def run(self, inputs: Sequence[Tensor], meter: Meter | None = None) -> Scored:
        """`inputs`: the log-probs first. Raises ValidationFailed."""
        values: dict[str, Value] = dict(zip(self._inputs, inputs, strict=True))
        for step in self._steps:
            values[step.name] = step.run(values, meter)
        total = values[self._total]
        if not isinstance(total, Tensor) or total.dim() != 0 or not total.requires_grad:
            raise ValidationFailed("graph: the loss must be a scalar tensor that depends on logprobs; return its sum")
        return Scored(total, {key: _scalar(key, values[name]) for key, name in self._metrics.items()})

    def measure(self, inputs: Sequence[Tensor]) -> Meter:
        """What a run on inputs of these shapes takes, found without memory. Raises ValidationFailed."""
        logprobs, *others = (torch.empty_like(tensor, device="meta") for tensor in inputs)
        meter = Meter()
        with ExitStack() as stack:
            stack.enter_context(torch.device("meta"))
            stack.enter_context(torch.enable_grad())
            self.run([logprobs.requires_grad_(), *others], meter)
        return meter


@dataclass(slots=True)
class Evaluation:
    """One command's custom loss, datum by datum; `metrics` afterwards."""

    program: Program
    reads: tuple[str, ...]
    num_datums: int
    _noted: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, loss: CustomLoss, examples: Sequence[Example]) -> "Evaluation":
        """Raises ValidationFailed, PayloadTooLarge: after this, only values can be at fault."""
        evaluation = cls(Program(loss), read_names(loss), len(examples))
        evaluation._check_work(examples)
        return evaluation

    def term(self, logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> LossTerm:
        """L = graph(logprobs, inputs); g = dL/dlogprobs by automatic differentiation. logprobs: float32, [N] or [N,K].

        Raises ValidationFailed for an index out of range and for a metric that is not finite.
        """
        leaf = logprobs.detach().requires_grad_()
        with torch.enable_grad():
            scored = self.program.run([leaf, *(inputs[name] for name in self.reads)])
        (grad,) = torch.autograd.grad(scored.total, leaf)
        for key, metric in scored.metrics.items():
            self._note(key, float(metric))
        return LossTerm(float(scored.total.detach()), grad)

    def metrics(self) -> dict[str, float]:
        """`:sum` over the datums, `:mean` a datum."""
        sums = {key: fsum(values) for key, values in self._noted.items()}
        return {key: value / self.num_datums if key.endswith(":mean") else value for key, value in sums.items()}

    def _note(self, key: str, value: float) -> None:
        if not isfinite(value):
            raise ValidationFailed(f"graph: metric {key} is not finite; check the loss and its inputs")
        self._noted.setdefault(key, []).append(value)

    def _check_work(self, examples: Sequence[Example]) -> None:
        known: dict[tuple[object, ...], int] = {}
        total = 0
        for example in examples:
            inputs = [example.targets.to(torch.float32), *(example.inputs[name] for name in self.reads)]
            shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
            if shapes not in known:
                known[shapes] = self.program.measure(inputs).work
            total += known[shapes]
            if total > MAX_WORK:
                raise ValidationFailed(
                    f"data: the loss takes more than {MAX_WORK} element operations on {len(examples)} datums; send fewer, or a simpler loss"
                )


def _step(node: LossNode, where: str) -> Step:
    table = FUNCTIONS if node.op == "call_function" else METHODS
    return Step(f"{where} ({node.target})", node.name, table[node.target], node.arguments(where), node.keywords(where))


def _resolved(value: Argument, values: Mapping[str, Value]) -> Value:
    match value:
        case Ref(name):
            return values[name]
        case DTypeName(name):
            return DTYPES[name]
        case CpuDevice():
            return torch.device("cpu")
        case list():
            return [_resolved(item, values) for item in value]
        case tuple():
            return tuple(_resolved(item, values) for item in value)
        case slice():
            return slice(*(_resolved(item, values) for item in (value.start, value.stop, value.step)))
        case dict():
            raise ValidationFailed("graph: a dict is no argument; pass tensors and numbers")
    return value


def _tensors(value: Value, step: Step) -> Iterator[Tensor]:
    """The tensors in a value. Raises ValidationFailed for what a custom loss has no use for."""
    match value:
        case Tensor():
            yield value
        case tuple() | list():
            for item in value:
                yield from _tensors(item, step)
        case int() if abs(value) > MAX_INTEGER:
            raise ValidationFailed(f"{step.label}: gives an integer of more than 64 bits; use smaller numbers")
        case complex():
            raise ValidationFailed(f"{step.label}: gives a complex number; use real ones")


def _scalar(key: str, value: Value) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValidationFailed(f"graph: metric {key} must be a scalar tensor; reduce it")
    return value.detach()
