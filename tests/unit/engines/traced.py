"""Python losses as the SDK traces and sends them, and graphs written by hand."""

from collections.abc import Callable

from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from tinsmith.protocol.custom_losses import CustomLoss


def traced(function: Callable[..., object], **ranks: int) -> CustomLoss:
    """`ranks`: of the function's parameters; logprobs, and every other one that is left out, have rank 1."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    handle = trace_loss(function, {name: ranks.get(name, 1) for name in names}, "session")
    return sent(handle.name, [one.model_dump() for one in handle.inputs], encode_graph(handle).model_dump())


def sent(name: str, inputs: list[dict[str, object]], graph: dict[str, object]) -> CustomLoss:
    return CustomLoss.model_validate({"name": name, "inputs": inputs, "graph": graph})


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def call(op: str, name: str, target: str, *args: object, **kwargs: object) -> dict[str, object]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def graph_of(*calls: dict[str, object], inputs: tuple[str, ...] = ("logprobs",), total: str = "total") -> dict[str, object]:
    """A graph of the calls, whose node `total` is the loss."""
    placeholders = [call("placeholder", name, name) for name in inputs]
    output = call("output", "output", "output", {"tuple": [ref(total), {"dict": {}}]})
    return {"format": 1, "nodes": [*placeholders, *calls, output]}


def loss_of(*calls: dict[str, object], inputs: tuple[str, ...] = ("logprobs",), total: str = "total") -> CustomLoss:
    """As `graph_of`, of inputs of rank 1."""
    return sent("by_hand", [{"name": name, "rank": 1} for name in inputs], graph_of(*calls, inputs=inputs, total=total))
