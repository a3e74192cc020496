"""The faults that callers can ask the deterministic engines for, over HTTP alone.

By data. A sequence that starts with the token 31337 asks for one with its second token:

    second  third  effect
    1       ms     sleep, then work as usual
    2              raise before anything is mutated
    3              raise when half of the effect is in the adapter
    4              hang for ever
    5              exit the process at once
    6              refuse the command (ValidationFailed)
    7       ms     hold the interpreter lock, then work as usual
    8       ms     put half of the effect in the adapter, sleep, then do the rest: what a late thread leaves behind

In a prompt to be sampled 3 acts as 2 and 8 as 1.

By seed. An adapter whose seed is `fault_seed(operation, fault)` suffers the fault in every call of that operation; 3 acts as 2 there, 1 and
8 sleep SLOW_S.
"""

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from enum import IntEnum

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.inputs import Datum

FAULT_TOKEN = 31337
EXIT_CODE = 70
SLOW_S = 1.0
_FIRST_SEED = 313_370_000  # a hundred seeds an operation


class Fault(IntEnum):
    SLEEP = 1
    RAISE = 2
    RAISE_HALFWAY = 3
    HANG = 4
    EXIT = 5
    REFUSE = 6
    HOLD_LOCK = 7
    LATE = 8


# The calls that name an adapter and no data; the order fixes their seeds.
SEEDED_OPERATIONS = ("create_adapter", "drop_adapter", "capture", "load", "restore", "optim_step", "load_adapter")

_BEFORE_ANY_EFFECT = {Fault.RAISE_HALFWAY: Fault.RAISE, Fault.LATE: Fault.SLEEP}


def fault_seed(operation: str, fault: Fault) -> int:
    """The LoRA seed that asks for the fault in that call. Raises ValueError for an operation that none asks for."""
    return _FIRST_SEED + 100 * SEEDED_OPERATIONS.index(operation) + fault


def suffer_seeded(operation: str, seed: int) -> None:
    """What an adapter's seed asks for in this call; usually nothing."""
    index, fault = divmod(seed - _FIRST_SEED, 100)
    if 0 <= index < len(SEEDED_OPERATIONS) and SEEDED_OPERATIONS[index] == operation and fault in list(Fault):
        suffer(before_any_effect(Fault(fault)), round(1000 * SLOW_S))


def fault_in(data: Sequence[Datum]) -> tuple[Fault | None, int]:
    """The first fault that a datum asks for, and its third token."""
    for datum in data:
        fault, ms = fault_of(datum.model_input.tokens)
        if fault is not None:
            return fault, ms
    return None, 0


def fault_of(tokens: Sequence[int]) -> tuple[Fault | None, int]:
    if len(tokens) < 2 or tokens[0] != FAULT_TOKEN or tokens[1] not in list(Fault):
        return None, 0
    return Fault(tokens[1]), tokens[2] if len(tokens) > 2 else 0


def before_any_effect(fault: Fault | None) -> Fault | None:
    """The fault that comes closest where there is no effect that could be half done."""
    return None if fault is None else _BEFORE_ANY_EFFECT.get(fault, fault)


def suffer(fault: Fault | None, ms: int) -> None:
    """Faults that strike before anything is mutated."""
    match fault:
        case Fault.SLEEP:
            time.sleep(ms / 1000)
        case Fault.RAISE:
            raise RuntimeError("injected fault: nothing was mutated")
        case Fault.HANG:
            threading.Event().wait()
        case Fault.EXIT:
            os._exit(EXIT_CODE)
        case Fault.REFUSE:
            raise ValidationFailed("injected fault: refused")
        case Fault.HOLD_LOCK:
            ctypes.PyDLL(None).usleep(ms * 1000)  # PyDLL keeps the lock while it calls
