"""call_backend: the one function through which server code reaches an engine. Off the loop, under a gate, within a bound."""

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CallBackend(Protocol):
    """How the rest of the server sees the gate (`Gate` implements it)."""

    async def __call__(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `call` in the engine's thread. Raises ExecutionTimeout when its bound passes (the gate then stays shut until the call
        really ends), GateUnavailable where the gate is shut; anything the call raises passes through."""
        ...
