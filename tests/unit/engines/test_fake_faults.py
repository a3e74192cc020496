"""An adapter's seed asks the fake engines for a fault in one operation, and in no other."""

import pytest

from tests.fakes.training import LORA, optim, train
from tinsmith.engines import fake_faults
from tinsmith.engines.base import Contents, Job
from tinsmith.engines.fake import FakeTrainingEngine
from tinsmith.engines.fake_faults import SEEDED_OPERATIONS, Fault, fault_seed
from tinsmith.engines.fake_sampler import FakeSamplingEngine
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.training import LoraConfig


def seeded(operation: str, fault: Fault) -> LoraConfig:
    return LORA.model_copy(update={"seed": fault_seed(operation, fault)})


def call(operation: str, lora: LoraConfig) -> None:
    """The operation on an adapter of that seed, after all that must come before it."""
    engine, files_of = FakeTrainingEngine(), FakeTrainingEngine()
    files_of.create_adapter("m", lora.model_copy(update={"seed": 1}))
    snapshot = files_of.capture("m", Contents.SNAPSHOT)
    if operation == "restore":
        engine.restore("m", lora, snapshot)
        return
    engine.create_adapter("m", lora)
    match operation:
        case "drop_adapter":
            engine.drop_adapter("m")
        case "capture":
            engine.capture("m", Contents.CHECKPOINT)
        case "load":
            engine.load("m", snapshot, optimizer=True)
        case "optim_step":
            engine.run([Job("m", 1, train(1, 2)), Job("m", 2, optim())])
        case "load_adapter":
            FakeSamplingEngine().load_adapter("a", engine.capture("m", Contents.SAMPLER))


ON_THE_WAY = {operation: {operation, "create_adapter"} for operation in SEEDED_OPERATIONS} | {
    "restore": {"restore"},
    "load_adapter": {"load_adapter", "create_adapter", "capture"},
}  # what `call` does on its way to an operation


@pytest.mark.parametrize("operation", SEEDED_OPERATIONS)
@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.RAISE_HALFWAY])
def test_a_seed_asks_for_a_fault_in_its_operation_alone(operation: str, fault: Fault) -> None:
    with pytest.raises(RuntimeError, match="injected fault"):
        call(operation, seeded(operation, fault))
    for other in SEEDED_OPERATIONS:
        if operation not in ON_THE_WAY[other]:
            call(other, seeded(operation, fault))


def test_a_seed_may_ask_for_a_refusal() -> None:
    with pytest.raises(ValidationFailed, match="injected fault: refused"):
        call("create_adapter", seeded("create_adapter", Fault.REFUSE))


def test_a_seed_may_ask_for_a_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(fake_faults.time, "sleep", slept.append)
    call("capture", seeded("capture", Fault.SLEEP))
    assert slept == [fake_faults.SLOW_S]


@pytest.mark.parametrize(
    "seed", [0, 7, 2**31 - 1, fault_seed("create_adapter", Fault.SLEEP) - 2, fault_seed("load_adapter", Fault.LATE) + 100]
)
def test_other_seeds_ask_for_nothing(seed: int) -> None:
    for operation in SEEDED_OPERATIONS:
        call(operation, LORA.model_copy(update={"seed": seed}))
