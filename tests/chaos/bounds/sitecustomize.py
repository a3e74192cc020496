"""Shortens the bound that is declared for calls that move a whole adapter, which is an hour, in the processes of a server under test.

Python imports this module by its name in every process that has its folder in PYTHONPATH. It costs the others nothing: the constant is
changed when, and only when, the module that holds it is imported.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

GATE = "tinsmith.queue.gate"


class _ShortBounds(importlib.abc.MetaPathFinder):
    """Finds the gate's module once, with a loader that changes the constant after it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != GATE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _shorten(module, float(os.environ["CHAOS_TRANSFER_S"]))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _shorten(gate: ModuleType, transfer_s: float) -> None:
    declared = {name: transfer_s if bound_s == gate.TRANSFER_S else bound_s for name, bound_s in gate.DECLARED_BOUNDS_S.items()}
    gate.DECLARED_BOUNDS_S.update(declared)
    gate.TRANSFER_S = transfer_s


if "CHAOS_TRANSFER_S" in os.environ:
    sys.meta_path.insert(0, _ShortBounds())
