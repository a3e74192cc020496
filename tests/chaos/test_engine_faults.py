"""Raise, slow, hang and exit in each call of a trainer's and of a sampler's engine: one server, one row a call and fault.

Beside the model that suffers lives a bystander: its next call comes through, with the loss that it always had.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.chaos.matrix import Matrix, Row
from tests.chaos.scene import (
    E_S,
    LEASE_S,
    PASS_S,
    PROMPT_S,
    RESTART_S,
    TRANSFER_S,
    Caller,
    Ended,
    Keys,
    Model,
    Sampler,
    Task,
    batch,
    faulty,
    start,
    until,
)
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess
from tinsmith.engines.fake_faults import FAULT_TOKEN, Fault, fault_seed
from tinsmith.protocol import native

FAULTS = {"raise": Fault.RAISE, "slow": Fault.SLEEP, "hang": Fault.HANG, "exit": Fault.EXIT}
NUM_DEATHS = 3  # of workers, after which a command is given up (R65)
SLOTS = 4
STEP = {"optimizer": {"type": "adamw", "learning_rate": 0.1}}


@dataclass
class Stage:
    """`loss` and `tokens` are what the bystanders always answer."""

    server: ServerProcess
    keys: Keys
    caller: Caller
    model: Model
    loss: dict[str, float]
    sampler: Sampler
    tokens: object

    def forward(self, bound_s: float) -> float:
        """The bystander's next call; answers how long it took."""
        ended = self.model.forward().end(bound_s)
        assert ended.saw == "completed"
        assert ended.result["metrics"] == self.loss
        return ended.seconds

    def sample(self, bound_s: float) -> float:
        ended = self.sampler.sample(1, 2).end(bound_s)
        assert ended.saw == "completed"
        assert ended.result["sequences"] == self.tokens
        return ended.seconds

    def check_clean(self, caller: Caller) -> None:
        """End the caller's session; nothing of it may be left in the store, in a slot of the trainer or in a row of the sampler."""
        caller.end_session()
        bound_s = PASS_S + LEASE_S + RESTART_S
        until(lambda: self.keys.leaked(caller) == [], bound_s, "keys of an ended session")
        until(lambda: [held["num_used"] for held in caller.processes("trainer")] == [1], bound_s, "slots of an ended session")
        until(lambda: [held["num_used"] for held in caller.processes("sampler")] == [0], bound_s, "rows of an ended session")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with RedisServer() as behind:
        with start(tmp_path_factory.mktemp("checkpoints"), redis_url=behind.url, trainer={"max_adapters": SLOTS}) as server:
            with Caller(server.url) as caller:
                model, sampler = caller.model(), caller.sampler()
                assert model.submit(native.TrainStep, **batch(1, 2, 3), **STEP).end(PROMPT_S).saw == "completed"
                loss = model.forward().end(PROMPT_S).result["metrics"]
                tokens = sampler.sample(1, 2).end(PROMPT_S).result["sequences"]
                keys = Keys(behind.url)
                yield Stage(server, keys, caller, model, loss, sampler, tokens)
                keys.close()


@pytest.fixture
def caller(stage: Stage) -> Iterator[Caller]:
    with Caller(stage.server.url) as caller:
        yield caller
        caller.end_session()  # also of a test that failed: what its models suffer from must not strike another


# --- the calls of a trainer's engine: how each is made to suffer a fault


def create_adapter(caller: Caller, fault: Fault) -> tuple[Model, Task]:
    return caller.creating(lora={"rank": 4, "seed": fault_seed("create_adapter", fault)})


def passing(request: type[native.PassRequest], **fields: object) -> Callable[[Caller, Fault], tuple[Model, Task]]:
    """A pass suffers by its data."""

    def strike(caller: Caller, fault: Fault) -> tuple[Model, Task]:
        model = caller.model()
        return model, model.submit(request, **faulty(fault), **fields)

    return strike


def optim_step(caller: Caller, fault: Fault) -> tuple[Model, Task]:
    model = caller.seeded(fault_seed("optim_step", fault))
    model.submit(native.ForwardBackward, **batch(1, 2))
    return model, model.submit(native.OptimStep)


def save(caller: Caller, fault: Fault) -> tuple[Model, Task]:
    model = caller.seeded(fault_seed("capture", fault))
    return model, model.submit(native.SaveWeights, name="kept")


def publish(caller: Caller, fault: Fault) -> tuple[Model, Task]:
    model = caller.seeded(fault_seed("capture", fault))
    return model, model.submit(native.PublishSamplerWeights, name="kept")


def snapshot(caller: Caller, fault: Fault) -> tuple[Model, Task]:
    """A call that takes so long that a snapshot is due behind it."""
    model = caller.seeded(fault_seed("capture", fault))
    return model, model.submit(native.ForwardBackward, **faulty(Fault.SLEEP))


def load(caller: Caller, fault: Fault) -> tuple[Model, Task]:
    saved = caller.model().submit(native.SaveWeights, name="kept").end(PROMPT_S)
    model = caller.seeded(fault_seed("load", fault))
    return model, model.submit(native.LoadWeights, checkpoint=saved.result["checkpoint"])


def restore(caller: Caller, fault: Fault) -> tuple[Model, Task]:
    """A model with a snapshot whose memory is thrown away: its next call needs the restore."""
    model = caller.seeded(fault_seed("restore", fault))
    model.submit(native.ForwardBackward, **faulty(Fault.SLEEP))
    assert model.submit(native.ForwardBackward, **faulty(Fault.RAISE_HALFWAY)).end(2 * E_S + PROMPT_S).saw == "internal_error"
    return model, model.forward()


@dataclass(frozen=True)
class Call:
    """A call of the training engine. bound_s: its own. unscathed: the caller's command has ended when it comes. is_lost: its failure leaves
    no model."""

    name: str
    strike: Callable[[Caller, Fault], tuple[Model, Task]]
    bound_s: float = E_S
    unscathed: bool = False
    is_lost: bool = False

    @property
    def bound(self) -> str:
        return "E" if self.bound_s == E_S else "T"


CALLS = [
    Call("create_adapter", create_adapter, TRANSFER_S, is_lost=True),
    Call("forward", passing(native.Forward)),
    Call("forward_backward", passing(native.ForwardBackward)),
    Call("evaluate", passing(native.Evaluate)),
    Call("train_step", passing(native.TrainStep, **STEP)),
    Call("optim_step", optim_step),
    Call("capture (save_weights)", save, TRANSFER_S),
    Call("capture (publish_sampler_weights)", publish, TRANSFER_S),
    Call("capture (snapshot)", snapshot, TRANSFER_S, unscathed=True),
    Call("load", load, TRANSFER_S),
    Call("restore", restore, TRANSFER_S),
]


def expected(call: Call, fault: str) -> tuple[str, float, str]:
    """What the caller must see, the bound, and what it follows from."""
    if call.unscathed or fault == "slow":
        return "completed", E_S + PROMPT_S, "E + answer"
    if fault == "raise":
        return "internal_error", PROMPT_S, "answer"
    if fault == "hang":
        return "execution_timeout", call.bound_s + PROMPT_S, f"{call.bound} + answer"
    return "internal_error", NUM_DEATHS * RESTART_S, f"{NUM_DEATHS} restarts"


def free_after(call: Call, fault: str) -> tuple[float, str]:
    """When the engine serves others again, from then on."""
    match fault:
        case "hang":
            return 2 * call.bound_s + RESTART_S + PROMPT_S, f"2 x {call.bound} + restart + answer"
        case "exit":
            return RESTART_S + PROMPT_S, "restart + answer"
        case _:
            return E_S + PROMPT_S, "E + answer"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
def test_a_fault_in_a_call_of_the_training_engine(stage: Stage, caller: Caller, matrix: Matrix, call: Call, fault: str) -> None:
    saw, bound_s, bound = expected(call, fault)
    model, task = call.strike(caller, FAULTS[fault])
    ended = task.end(bound_s)
    assert ended.saw == saw
    free_s, _ = free_after(call, fault)
    then = f"another model: completed after {stage.forward(free_s):.1f} s"
    if call.is_lost and saw != "completed":
        own = model.forward().end(PROMPT_S)
        assert own.saw == "resource_not_found", "its creation failed"
        then += "; a new model: completed"
        caller.model()
    elif not (call.name == "restore" and saw != "completed") and not (call.unscathed and fault in ("hang", "exit")):
        assert model.forward().end(free_s).saw == "completed"
        then += "; the same model: completed"
    matrix.note(Row("trainer", fault, call.name, ended.saw, ended.seconds, bound_s, bound, then))
    stage.check_clean(caller)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_drop_adapter(stage: Stage, caller: Caller, matrix: Matrix, fault: str) -> None:
    """Nobody waits for it. An engine that keeps what it was to drop is replaced: its slot would be counted as free, and be none."""
    caller.seeded(fault_seed("drop_adapter", FAULTS[fault])).unload()
    bound_s, bound = free_after(Call("drop_adapter", restore), "exit" if fault == "raise" else fault)
    seconds = stage.forward(bound_s)
    for _ in range(SLOTS - 1):
        caller.model()
    then = f"another model: completed after {seconds:.1f} s; every slot holds a model again"
    matrix.note(Row("trainer", fault, "drop_adapter", "completed", seconds, bound_s, bound, then))
    stage.check_clean(caller)


def test_a_failure_half_way_through_a_call_leaves_no_trace(stage: Stage, caller: Caller, matrix: Matrix) -> None:
    model = caller.model()
    before = model.forward().end(PROMPT_S).result
    ended = model.submit(native.TrainStep, **faulty(Fault.RAISE_HALFWAY), **STEP).end(PROMPT_S)
    assert ended.saw == "internal_error"
    assert model.forward().end(PROMPT_S).result == before
    then = f"another model: completed after {stage.forward(PROMPT_S):.1f} s; the same model: completed, with its former loss"
    matrix.note(Row("trainer", "raise half way", "train_step", ended.saw, ended.seconds, PROMPT_S, "answer", then))
    stage.check_clean(caller)


# --- the calls of a sampler's engine


def stepping(caller: Caller, fault: Fault) -> Task:
    return caller.sampler().sample(FAULT_TOKEN, int(fault), 800)


def load_adapter(caller: Caller, fault: Fault) -> Task:
    model = caller.seeded(fault_seed("load_adapter", fault))
    published = model.submit(native.PublishSamplerWeights, name="drawn").end(PROMPT_S)
    return caller.sampler(published.result["checkpoint"]).sample(1, 2)


SAMPLER_CALLS = {"step": (stepping, E_S, "E"), "load_adapter": (load_adapter, TRANSFER_S, "T")}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SAMPLER_CALLS)
def test_a_fault_in_a_call_of_the_sampling_engine(stage: Stage, caller: Caller, matrix: Matrix, name: str, fault: str) -> None:
    strike, call_s, letter = SAMPLER_CALLS[name]
    call = Call(name, restore, call_s)
    saw, bound_s, bound = expected(call, fault)
    ended: Ended = strike(caller, FAULTS[fault]).end(bound_s)
    assert ended.saw == saw
    free_s, _ = free_after(call, fault)
    assert call.bound == letter
    then = f"another sample: completed after {stage.sample(free_s):.1f} s"
    matrix.note(Row("sampler", fault, name, ended.saw, ended.seconds, bound_s, bound, then))
    stage.check_clean(caller)


def test_a_refusal_by_the_sampling_engine(stage: Stage, caller: Caller, matrix: Matrix) -> None:
    ended = caller.sampler().sample(FAULT_TOKEN, int(Fault.REFUSE)).end(PROMPT_S)
    assert ended.saw == "validation_failed"
    then = f"another sample: completed after {stage.sample(PROMPT_S):.1f} s"
    matrix.note(Row("sampler", "raise (refusal)", "add", ended.saw, ended.seconds, PROMPT_S, "answer", then))
    stage.check_clean(caller)


def test_samples_beside_one_that_raises_complete(stage: Stage, caller: Caller, matrix: Matrix) -> None:
    sampler = caller.sampler()
    beside = [sampler.sample(1, 2, max_tokens=400) for _ in range(8)]
    ended = sampler.sample(FAULT_TOKEN, int(Fault.RAISE)).end(PROMPT_S)
    assert ended.saw == "internal_error"
    assert {task.end(E_S + PROMPT_S).saw for task in beside} == {"completed"}
    then = f"8 samples in the same batch: completed; another sample: completed after {stage.sample(PROMPT_S):.1f} s"
    matrix.note(Row("sampler", "raise, beside others", "step", ended.saw, ended.seconds, PROMPT_S, "answer", then))
    stage.check_clean(caller)
