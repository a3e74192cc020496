"""What the operations of custom losses compute: the table behind the names of `protocol/custom_ops.py`.

A name of that list stands for the torch function, method or operator of the same name, unless it is among the adapted ones here: those
whose torch namesake takes arguments that mean something else than arithmetic (where a tensor lies, writing in place), or whose result's
shape could depend on values. A test holds the two lists together.
"""

import math
import operator
from collections.abc import Callable, Mapping
from types import EllipsisType

import torch
from torch import Tensor

from tinsmith.protocol import custom_ops
from tinsmith.protocol.errors import ValidationFailed

Number = bool | int | float
Value = None | Tensor | Number | str | slice | EllipsisType | torch.dtype | torch.device | list["Value"] | tuple["Value", ...]
Operation = Callable[..., Value]

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
_MAX_EXPONENT = 64  # of two integers: a power of more has no use as a size


def _attribute(value: Value, name: str) -> Value:
    """Of a tensor, or of the pair that max and min answer."""
    if isinstance(value, Tensor) and name in _OF_TENSORS:
        return _OF_TENSORS[name](value)
    if isinstance(value, tuple) and len(value) == 2 and name in _OF_PAIRS:
        return value[_OF_PAIRS[name]]
    raise ValidationFailed(f"graph: a {type(value).__name__} has no attribute {name!r} here; read those of tensors")


_OF_TENSORS: Mapping[str, Callable[[Tensor], Value]] = {
    "T": lambda tensor: tensor.T,
    "device": lambda tensor: tensor.device,
    "dtype": lambda tensor: tensor.dtype,
    "mT": lambda tensor: tensor.mT,
    "ndim": lambda tensor: tensor.ndim,
    "shape": lambda tensor: tuple(tensor.shape),
}
_OF_PAIRS = {"values": 0, "indices": 1}


def _arithmetic(function: Operation) -> Operation:
    """An operator on tensors and numbers: on lists or texts it would repeat and join."""

    def checked(*operands: Value) -> Value:
        if not all(isinstance(operand, Tensor | int | float) for operand in operands):
            raise TypeError("operands must be tensors or numbers")
        return function(*operands)

    return checked


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"an exponent of two integers must be within {_MAX_EXPONENT}")
    return _arithmetic(operator.pow)(base, exponent)


def _getitem(value: Value, key: Value) -> Value:
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(each, Tensor) and each.dtype is torch.bool for each in keys):
        raise TypeError("a boolean mask selects a number of rows that depends on values; use torch.where, or multiply by the mask")
    if isinstance(value, Tensor):
        return value[key]  # type: ignore[index]
    if isinstance(value, tuple) and isinstance(key, int):
        return value[key]
    raise TypeError("only tensors, and tuples by a number, have items")


def _on_numbers(function: Callable[[float], float]) -> Operation:
    def checked(value: Value) -> Value:
        if not isinstance(value, int | float):
            raise TypeError("takes a number; use the function of torch for tensors")
        return function(value)

    return checked


def _anywhere(function: Operation) -> Operation:
    """A factory of tensors, which lie where the run takes place."""

    def made(*args: Value, device: Value = None, **kwargs: Value) -> Value:
        return function(*args, **kwargs)

    return made


def _method(function: Operation) -> Operation:
    """Its first argument must be a tensor."""

    def checked(tensor: Value, *args: Value, **kwargs: Value) -> Value:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"a method of tensors was called on a {type(tensor).__name__}")
        return function(tensor, *args, **kwargs)

    return checked


def _to(tensor: Tensor, other: Value = None, dtype: Value = None, *, device: Value = None) -> Value:
    """A conversion of the dtype alone."""
    wanted = next((each for each in (other, dtype) if isinstance(each, torch.dtype)), None)
    if isinstance(other, Tensor):
        wanted = other.dtype
    return tensor if wanted is None else tensor.to(wanted)


def _reshape(tensor: Tensor, *shape: Value) -> Value:
    return tensor.reshape(*shape)  # type: ignore[arg-type]


def _softmax(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Value:
    return torch.softmax(input, dim, dtype=dtype)


def _log_softmax(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Value:
    return torch.log_softmax(input, dim, dtype=dtype)


def _relu(input: Tensor, inplace: bool = False) -> Value:
    return torch.relu(input)


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Value:
    return torch.nn.functional.elu(input, alpha)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Value:
    return torch.nn.functional.leaky_relu(input, negative_slope)


def _silu(input: Tensor, inplace: bool = False) -> Value:
    return torch.nn.functional.silu(input)


_FACTORIES = frozenset({"arange", "full_like", "ones", "ones_like", "zeros", "zeros_like"})
_ADAPTED_FUNCTIONS: Mapping[str, Operation] = {
    "getattr": _attribute,
    "operator.getitem": _getitem,
    "operator.pow": _power,
    "torch.nn.functional.elu": _elu,
    "torch.nn.functional.leaky_relu": _leaky_relu,
    "torch.nn.functional.log_softmax": _log_softmax,
    "torch.nn.functional.relu": _relu,
    "torch.nn.functional.sigmoid": torch.sigmoid,
    "torch.nn.functional.silu": _silu,
    "torch.nn.functional.softmax": _softmax,
    "torch.nn.functional.tanh": torch.tanh,
    "torch._C._nn.log_sigmoid": torch.nn.functional.logsigmoid,
    "torch._C._nn.softplus": torch.nn.functional.softplus,
    **{f"torch.{name}": _anywhere(operator.attrgetter(name)(torch)) for name in _FACTORIES},
}
_ADAPTED_METHODS: Mapping[str, Operation] = {
    "new_full": _anywhere(Tensor.new_full),
    "new_ones": _anywhere(Tensor.new_ones),
    "new_zeros": _anywhere(Tensor.new_zeros),
    "to": _to,
    "type_as": _to,
    "view": _reshape,
}


def _function(name: str) -> Operation:
    """Of the allow-list's names, which are constants of ours."""
    module, _, attribute = name.rpartition(".")
    match module:
        case "operator":
            return _arithmetic(operator.attrgetter(attribute)(operator))
        case "math":
            return _on_numbers(operator.attrgetter(attribute)(math))
    function: Operation = operator.attrgetter(name.removeprefix("torch."))(torch)
    return function


FUNCTIONS: Mapping[str, Operation] = {name: _ADAPTED_FUNCTIONS.get(name) or _function(name) for name in sorted(custom_ops.FUNCTIONS)}
METHODS: Mapping[str, Operation] = {
    name: _method(_ADAPTED_METHODS.get(name) or operator.attrgetter(name)(Tensor)) for name in sorted(custom_ops.METHODS)
}
