"""Losses that callers write and the server runs: a traced function as plain data, its closed schema, and what it is refused for.

A function of the message alone; no tensor library is needed, and nothing in the data is executable. Which operations there are is
`custom_ops.py`'s business, what they compute an engine's.

    nodes: placeholder (one an input, in order), then call_function and call_method, then one output
    output: (loss, {"custom/<name>:sum" or "custom/<name>:mean": metric})
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite, nan
from types import EllipsisType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from tinsmith.protocol.custom_ops import ATTRIBUTES, DTYPES, FUNCTIONS, KEYWORDS, METHODS, ROUNDING_MODES
from tinsmith.protocol.errors import PayloadTooLarge, ValidationFailed

CUSTOM = "custom"  # the name under which a pass asks for one
LOGPROBS = "logprobs"  # the first input: what the model says of the targets
MAX_LOSSES = 256  # of a session
MAX_INPUTS = 16
MAX_NODES = 256
MAX_ARGUMENTS = 64  # of a node, nested ones included
MAX_NESTING = 4
MAX_NAME = 128
MAX_LOSS_BYTES = 128 * 1024
MAX_INTEGER = 2**63 - 1

_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_SPECIAL_FLOATS = {"inf": inf, "-inf": -inf, "nan": nan}
_QUOTED = 60  # characters of a caller's text that a message repeats


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class LossParameter(_Part):
    """`rank`: 0 a scalar, 1 [N], 2 [N,K], N being the datum's rows."""

    name: str = Field(max_length=MAX_NAME)
    rank: Literal[0, 1, 2]


class LossNode(_Part):
    """One step of a traced function. `args` and `kwargs` as the wire encodes them; `arguments` and `keywords` decode them."""

    op: Literal["placeholder", "call_function", "call_method", "output"]
    name: str = Field(max_length=MAX_NAME)
    target: str = Field(max_length=MAX_NAME)
    args: list[JsonValue] = Field(default=[], max_length=MAX_ARGUMENTS)
    kwargs: dict[str, JsonValue] = Field(default={}, max_length=MAX_ARGUMENTS)

    def arguments(self, field: str) -> tuple["Argument", ...]:
        """Raises ValidationFailed naming `field`."""
        return tuple(decode_argument(value, f"{field}.args[{index}]") for index, value in enumerate(self.args))

    def keywords(self, field: str) -> dict[str, "Argument"]:
        """Raises ValidationFailed naming `field`."""
        return {name: decode_argument(value, f"{field}.kwargs.{name[:_QUOTED]}") for name, value in self.kwargs.items()}


class LossGraph(_Part):
    """Nodes in the order in which they run."""

    format: Literal[1] = 1
    nodes: Annotated[tuple[LossNode, ...], Field(strict=False, min_length=1, max_length=MAX_NODES)]


class CustomLoss(_Part):
    """A loss of one datum; a request's loss is the sum over its datums."""

    name: str = Field(max_length=MAX_NAME)
    inputs: Annotated[tuple[LossParameter, ...], Field(strict=False, min_length=1, max_length=MAX_INPUTS)]
    graph: LossGraph

    def encoded(self) -> bytes:
        """Canonical: equal losses give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class DTypeName:
    """A dtype of `custom_ops.DTYPES`."""

    name: str


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """Where losses run."""


Argument = (
    None
    | bool
    | int
    | float
    | str
    | Ref
    | DTypeName
    | CpuDevice
    | slice
    | EllipsisType
    | list["Argument"]
    | tuple["Argument", ...]
    | dict[str, "Argument"]
)


def check_custom_loss(loss: CustomLoss) -> None:
    """Everything that needs no tensors. Raises ValidationFailed naming the field and the remedy, PayloadTooLarge."""
    size = len(loss.encoded())
    if size > MAX_LOSS_BYTES:
        raise PayloadTooLarge(f"graph: the loss has {size} bytes, the bound is {MAX_LOSS_BYTES}; send a smaller one")
    _check_inputs(loss)
    _check_frame(loss)
    known: set[str] = set()
    for index, node in enumerate(loss.graph.nodes):
        field = f"graph.nodes[{index}]"
        if not _NODE_NAME.fullmatch(node.name):
            raise ValidationFailed(f"{field}.name: {node.name[:_QUOTED]!r} is no name; use letters, digits and underscores")
        if node.name in known:
            raise ValidationFailed(f"{field}.name: {node.name[:_QUOTED]!r} is taken by an earlier node; use each name once")
        _check_node(node, field, known)
        known.add(node.name)


def output_of(loss: CustomLoss) -> tuple[str, dict[str, str]]:
    """Nodes of the loss and, by key, of the metrics. Raises ValidationFailed."""
    field = f"graph.nodes[{len(loss.graph.nodes) - 1}]"
    args = loss.graph.nodes[-1].arguments(field)
    match args:
        case ((Ref(total), dict(metrics)),) | ([Ref(total), dict(metrics)],):
            return total, {key: _metric(key, value, field) for key, value in metrics.items()}
    raise ValidationFailed(f"{field}.args: must be one pair of the loss, a tensor, and a dict of metrics; return (loss, metrics)")


def decode_argument(value: JsonValue, field: str, depth: int = 0) -> Argument:
    """A wire argument as what it stands for. Raises ValidationFailed."""
    if depth > MAX_NESTING:
        raise ValidationFailed(f"{field}: nested deeper than {MAX_NESTING}; flatten it")
    match value:
        case None | bool() | str():
            return value
        case int() | float():
            return _number(value, field)
        case list():
            return [decode_argument(item, field, depth + 1) for item in value]
        case dict() if len(value) == 1:
            ((kind, content),) = value.items()
            return _tagged(kind, content, field, depth)
    raise _no_argument(value, field)


def _tagged(kind: str, content: JsonValue, field: str, depth: int) -> Argument:
    match kind, content:
        case "dict", dict():
            return {key: decode_argument(item, field, depth + 1) for key, item in content.items()}
        case "tuple", list():
            return tuple(decode_argument(item, field, depth + 1) for item in content)
        case "slice", [start, stop, step]:
            return slice(*(decode_argument(item, field, depth + 1) for item in (start, stop, step)))
        case "ref", str():
            return Ref(content)
        case "ellipsis", True:
            return ...
        case "float", str() if content in _SPECIAL_FLOATS:
            return _SPECIAL_FLOATS[content]
        case "dtype", str() if content in DTYPES:
            return DTypeName(content)
        case "device", "cpu":
            return CpuDevice()
    raise _no_argument({kind: content}, field)


def _no_argument(value: JsonValue, field: str) -> ValidationFailed:
    return ValidationFailed(
        f"{field}: {json.dumps(value)[:_QUOTED]} is no argument of a custom loss; pass tensors, numbers, slices, dtypes "
        f"({', '.join(sorted(DTYPES))}) or the device cpu"
    )


def _number(value: int | float, field: str) -> int | float:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValidationFailed(f"{field}: the integer has more than 64 bits; send a smaller one")
    if not isfinite(value):
        raise ValidationFailed(f'{field}: {value} is no JSON number; send {{"float": "{value}"}}')
    return value


def _check_inputs(loss: CustomLoss) -> None:
    names = [parameter.name for parameter in loss.inputs]
    for index, name in enumerate(names):
        if not _INPUT_NAME.fullmatch(name):
            raise ValidationFailed(
                f"inputs[{index}].name: {name[:_QUOTED]!r} is no name; use up to 64 lower-case letters, digits and underscores"
            )
        if name in names[:index]:
            raise ValidationFailed(f"inputs[{index}].name: {name!r} is taken by an earlier input; use each name once")
    if names[0] != LOGPROBS or loss.inputs[0].rank == 0:
        raise ValidationFailed(f"inputs[0]: must be {LOGPROBS} of rank 1 or 2; let the loss take them first")


def _check_frame(loss: CustomLoss) -> None:
    """The inputs come first, in order, and one output last."""
    nodes, num_inputs = loss.graph.nodes, len(loss.inputs)
    for index, node in enumerate(nodes):
        wanted = "placeholder" if index < num_inputs else "output" if index == len(nodes) - 1 else "call_function or call_method"
        if node.op not in wanted.split(" or "):
            raise ValidationFailed(
                f"graph.nodes[{index}].op: is {node.op}, must be {wanted}; send one placeholder an input, then the output last"
            )
    if nodes[-1].op != "output":
        raise ValidationFailed(f"graph.nodes[{len(nodes) - 1}].op: is {nodes[-1].op}, must be output; return (loss, metrics)")
    for index, (node, parameter) in enumerate(zip(nodes, loss.inputs, strict=False)):
        if node.target != parameter.name or node.args or node.kwargs:
            raise ValidationFailed(f"graph.nodes[{index}]: must be the placeholder of input {parameter.name!r} without a default")
    output_of(loss)


def _check_node(node: LossNode, field: str, known: set[str]) -> None:
    if node.op == "placeholder":
        return
    args, kwargs = node.arguments(field), node.keywords(field)
    if sum(1 for _ in _leaves((*args, *kwargs.values()))) > MAX_ARGUMENTS:
        raise ValidationFailed(f"{field}.args: more than {MAX_ARGUMENTS} arguments, nested ones included; send fewer")
    for leaf in _leaves((*args, *kwargs.values())):
        if isinstance(leaf, Ref) and leaf.name not in known:
            raise ValidationFailed(f"{field}.args: {leaf.name[:_QUOTED]!r} is no earlier node; refer to nodes that have run")
    if node.op != "output":
        _check_call(node, field, args, kwargs)
    elif kwargs:
        raise ValidationFailed(f"{field}.kwargs: an output has none; return (loss, metrics)")


def _check_call(node: LossNode, field: str, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> None:
    allowed, what = (FUNCTIONS, "function") if node.op == "call_function" else (METHODS, "method")
    if node.target not in allowed:
        raise ValidationFailed(
            f"{field}.target: the {what} {node.target[:_QUOTED]!r} is not offered in a custom loss; use element-wise operations, "
            "reductions, softmax, where, gather and shapes of torch, or run the loss in the client"
        )
    if node.op == "call_method" and not (args and isinstance(args[0], Ref)):
        raise ValidationFailed(f"{field}.args: a method is called on the value of an earlier node; send its ref first")
    if node.target == "getattr":
        _check_attribute(field, args, kwargs)
        return
    for name, value in kwargs.items():
        _check_keyword(field, name, value)
    if any(isinstance(leaf, str | dict) for leaf in _leaves(args)):
        raise ValidationFailed(f"{field}.args: texts and dicts are no arguments of {node.target[:_QUOTED]}; pass tensors and numbers")


def _check_attribute(field: str, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> None:
    match args:
        case (Ref(), str(attribute)) if attribute in ATTRIBUTES and not kwargs:
            return
    raise ValidationFailed(f"{field}.args: an attribute of a node's value must be one of {', '.join(sorted(ATTRIBUTES))}; read no other")


def _check_keyword(field: str, name: str, value: Argument) -> None:
    if name not in KEYWORDS:
        raise ValidationFailed(f"{field}.kwargs: {name[:_QUOTED]!r} is not offered in a custom loss; leave it out")
    texts = ROUNDING_MODES if name == "rounding_mode" else frozenset()
    if any(isinstance(leaf, dict) or (isinstance(leaf, str) and leaf not in texts) for leaf in _leaves(value)):
        raise ValidationFailed(f"{field}.kwargs.{name}: no text or dict is taken there; pass tensors and numbers")


def _metric(key: str, value: Argument, field: str) -> str:
    if not _METRIC.fullmatch(key):
        raise ValidationFailed(
            f"{field}.args: metric {key[:_QUOTED]!r} is no name; use custom/<name>:sum or custom/<name>:mean, in lower case"
        )
    if not isinstance(value, Ref):
        raise ValidationFailed(f"{field}.args: metric {key!r} is no tensor; return tensors")
    return value.name


def _leaves(value: Argument) -> Iterator[Argument]:
    """What an argument is made of; an empty container and a dict of constants are leaves too."""
    match value:
        case list() | tuple() if value:
            for item in value:
                yield from _leaves(item)
        case slice():
            for item in (value.start, value.stop, value.step):
                yield from _leaves(item)
        case dict() if value:
            yield value
            for item in value.values():
                yield from _leaves(item)
        case _:
            yield value
