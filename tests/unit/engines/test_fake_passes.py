"""The fake training engine computes the losses, steps and evaluations of the seam, as the real ones do."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.training import LORA, int64, model_input, optim, train
from tests.unit.engines.test_fake import float32, run
from tinsmith.engines.base import Contents
from tinsmith.engines.fake import FakeTrainingEngine
from tinsmith.engines.fake_faults import FAULT_TOKEN, Fault
from tinsmith.engines.fake_passes import FAKE_LOSSES, check, compute
from tinsmith.protocol.capabilities import TRAINING_ENGINES
from tinsmith.protocol.errors import TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.loss_checks import Limits
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.tensors import Tensor, float32_values
from tinsmith.protocol.training import AdamParams, Compute, ComputeOutput, LrSchedule, OptimOutput, OptimStep, SgdParams, TrainStep

ALL_INPUTS = {
    "target_tokens": int64(2, 3),
    "logprobs": float32(-1, -2),
    "advantages": float32(1, -1),
    "weights": float32(0.5, 2),
    "clip_low_threshold": float32(0.9, 0),
    "clip_high_threshold": float32(1, 3),
    "sequence_ratio_mask": float32(1, 0),
}


def datum(loss_fn: str, *tokens: int) -> Datum:
    inputs = {name: ALL_INPUTS[name] for name in LOSSES[loss_fn].inputs}
    return Datum(model_input(*(tokens or (1, 2))), inputs)


def pairs(*, beta: float = 0.5, backward: bool = True) -> Compute:
    chosen = Datum(model_input(1, 2), {"target_tokens": int64(2, 3), "weights": float32(0.5, 2)})
    rejected = Datum(model_input(5), {"target_tokens": int64(7)})
    return Compute((chosen, rejected, rejected, chosen), "dpo", {"beta": beta}, backward)


@pytest.fixture
def engine() -> FakeTrainingEngine:
    """Its adapter has taken a step and has an unspent gradient."""
    engine = FakeTrainingEngine()
    engine.create_adapter("m", LORA)
    run(engine, train(1, 2, 3), optim(), train(4))
    return engine


def state(engine: FakeTrainingEngine, model: str = "m") -> dict[str, bytes]:
    return dict(engine.capture(model, Contents.SNAPSHOT))


def computed(engine: FakeTrainingEngine, command: Compute | TrainStep) -> ComputeOutput:
    (answer,) = run(engine, command)
    assert isinstance(answer, ComputeOutput), answer
    return answer


def test_the_engine_implements_what_its_capabilities_say() -> None:
    assert TRAINING_ENGINES["fake"].losses == FAKE_LOSSES
    assert TRAINING_ENGINES["fake"].optimizers == {"adamw", "sgd"}
    assert TRAINING_ENGINES["fake"].fields == frozenset()


class Recording(Mapping[str, Tensor]):
    """Inputs that note which of them are read."""

    def __init__(self, inputs: Mapping[str, Tensor], read: set[str]) -> None:
        self._inputs, self._read = inputs, read

    def __getitem__(self, name: str) -> Tensor:
        self._read.add(name)
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


@pytest.mark.proves("R44")
@pytest.mark.parametrize("loss_fn", sorted(FAKE_LOSSES))
def test_a_fake_loss_reads_exactly_the_inputs_that_are_declared(engine: FakeTrainingEngine, loss_fn: str) -> None:
    read: set[str] = set()
    recorded = tuple(replace(one, loss_fn_inputs=Recording(one.loss_fn_inputs, read)) for one in [datum(loss_fn)] * 2)  # type: ignore[arg-type]
    compute(engine._adapters["m"], Compute(recorded, loss_fn, {}, backward=True))
    assert read == set(LOSSES[loss_fn].inputs)


def test_dpo_follows_from_the_logprobs_of_policy_and_base(engine: FakeTrainingEngine) -> None:
    output = computed(engine, pairs())
    engine.create_adapter("fresh", LORA)
    (base,) = run(engine, pairs(backward=False), model="fresh")
    assert isinstance(base, ComputeOutput)
    weights = [np.array([0.5, 2]), np.array([1.0]), np.array([1.0]), np.array([0.5, 2])]
    ours, theirs = ([np.array(float32_values(one.data)) for one in answer.logprobs] for answer in (output, base))
    rewards = [weight @ (p - q) for weight, p, q in zip(weights, ours, theirs, strict=True)]
    margins = [0.5 * (rewards[0] - rewards[1]), 0.5 * (rewards[2] - rewards[3])]
    assert output.metrics == {
        "loss:sum": pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins), rel=1e-6),
        "dpo/accuracy:mean": 0.5,
        "dpo/margin:mean": pytest.approx(sum(margins) / 2, abs=1e-6),
    }


def test_dpo_raises_the_margin_of_what_it_trains_on() -> None:
    engine = FakeTrainingEngine()
    engine.create_adapter("m", LORA)
    command = replace(pairs(), data=pairs().data[:2])
    assert computed(engine, command).metrics == {"loss:sum": pytest.approx(math.log(2)), "dpo/accuracy:mean": 0.0, "dpo/margin:mean": 0.0}
    run(engine, optim())
    assert computed(engine, command).metrics["dpo/margin:mean"] > 0


def test_the_gradient_of_dpo_is_the_slope_of_its_loss(engine: FakeTrainingEngine) -> None:
    adapter = engine._adapters["m"]
    _, gradient = compute(adapter, pairs())
    for index in range(8):
        losses = []
        for delta in (1e-6, -1e-6):
            adapter.b[index] += delta
            losses.append(compute(adapter, pairs())[0].metrics["loss:sum"])
            adapter.b[index] -= delta
        assert gradient[index] == pytest.approx(adapter.a[index] * (losses[0] - losses[1]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("loss_fn", sorted(FAKE_LOSSES))
def test_an_evaluation_answers_sums_and_changes_nothing(engine: FakeTrainingEngine, loss_fn: str) -> None:
    before = state(engine)
    command = Compute((datum(loss_fn), datum(loss_fn, 4, 5)), loss_fn, {}, backward=False)
    forward = computed(engine, command)
    found = computed(engine, replace(command, metrics_only=True))
    assert (found.logprobs, engine.calls["evaluate"]) == ((), 1)
    values = [float32_values(one.data) for one in forward.logprobs]
    pairs = {"pairs:sum": 1.0} if loss_fn == "dpo" else {}
    sums = {"tokens:sum": 4.0, "weight:sum": 5.0, "nll:sum": -sum(0.5 * first + 2 * second for first, second in values)}
    assert found.metrics == pytest.approx(forward.metrics | pairs | sums)
    assert state(engine) == before


@pytest.mark.parametrize("params", [AdamParams(learning_rate=0.1), SgdParams(learning_rate=0.1, momentum=0.5)])
@pytest.mark.parametrize("command", [train(1, 2), pairs()])
def test_train_step_equals_forward_backward_and_optim_step_bit_for_bit(command: Compute, params: AdamParams | SgdParams) -> None:
    engine, step = FakeTrainingEngine(), OptimStep(optimizer=params, schedule=LrSchedule(warmup_steps=4))
    for model in ("fused", "apart"):
        engine.create_adapter(model, LORA)
        run(engine, train(5), model=model)
    (fused,) = run(engine, TrainStep(command, step), model="fused")
    passed, stepped = run(engine, command, step, model="apart")
    assert isinstance(passed, ComputeOutput)
    assert isinstance(stepped, OptimOutput)
    assert fused == replace(passed, metrics=passed.metrics | stepped.metrics)
    assert stepped.metrics["learning_rate:mean"] == pytest.approx(0.025)
    assert state(engine, "fused") == state(engine, "apart")
    assert engine.history("fused") == engine.history("apart")


BAD = {
    "its pass is refused": TrainStep(train(99_999), optim()),
    "a fault refuses it": TrainStep(train(FAULT_TOKEN, Fault.REFUSE), optim()),
    "its optimizer is another": TrainStep(train(1), OptimStep(optimizer=SgdParams())),
    "it has no backward": TrainStep(train(1, backward=False), optim()),
    "half a pair": TrainStep(replace(pairs(), data=pairs().data[:3]), optim()),
    "its weights overflow": TrainStep(train(1), OptimStep(optimizer=AdamParams(learning_rate=1e308, weight_decay=10.0))),
    "its margin overflows": TrainStep(pairs(beta=1e308), OptimStep(optimizer=AdamParams())),
}


@pytest.mark.proves("R10")
@pytest.mark.parametrize("why", BAD)
def test_a_train_step_that_is_refused_changes_nothing(engine: FakeTrainingEngine, why: str) -> None:
    if why == "its margin overflows":
        engine._adapters["m"].b[:] = [9.0] * 4 + [-9.0] * 4
    before = state(engine)
    (answer,) = run(engine, BAD[why])
    assert isinstance(answer, ValidationFailed)
    assert state(engine) == before


@pytest.mark.parametrize("kind", [AdamParams, SgdParams])
def test_a_step_that_leaves_weights_that_are_not_finite_is_refused(kind: type[AdamParams | SgdParams]) -> None:
    engine = FakeTrainingEngine()
    engine.create_adapter("m", LORA)
    run(engine, TrainStep(train(1, 2, 3), OptimStep(optimizer=kind())), train(1, 2, 3))
    before = state(engine)
    (answer,) = run(engine, OptimStep(optimizer=kind(learning_rate=1e308, weight_decay=1e308)))
    assert isinstance(answer, ValidationFailed)
    assert answer.message.startswith("learning_rate: a step of 1e+308")
    assert state(engine) == before


def test_faults_strike_in_a_train_step_and_in_an_evaluation(engine: FakeTrainingEngine) -> None:
    evaluation = replace(train(FAULT_TOKEN, Fault.RAISE, backward=False), metrics_only=True)
    for command in (TrainStep(train(FAULT_TOKEN, Fault.RAISE), optim()), evaluation):
        before = state(engine)
        with pytest.raises(RuntimeError, match="nothing was mutated"):
            run(engine, command)
        assert state(engine) == before
    before = state(engine)
    with pytest.raises(RuntimeError, match="half"):
        run(engine, TrainStep(train(FAULT_TOKEN, Fault.RAISE_HALFWAY, *range(8)), optim()))
    assert state(engine) != before


@pytest.mark.parametrize("params", [AdamParams(), SgdParams(momentum=0.5, weight_decay=0.1)])
def test_the_optimizer_survives_capture_load_and_restore(params: AdamParams | SgdParams) -> None:
    engine = FakeTrainingEngine()
    engine.create_adapter("m", LORA)
    step = TrainStep(train(1, 2), OptimStep(optimizer=params))
    run(engine, step)
    files = state(engine)
    run(engine, step)
    expected = engine.weights("m")
    other = OptimStep(optimizer=SgdParams() if isinstance(params, AdamParams) else AdamParams())
    engine.restore("m", LORA, files)
    run(engine, step)
    assert engine.weights("m") == expected
    engine.load("m", files, optimizer=True)
    (answer,) = run(engine, other)
    assert isinstance(answer, TinsmithError)
    assert f"has taken 1 steps of {params.type}" in answer.message
    engine.load("m", files, optimizer=False)
    assert all(not isinstance(answer, TinsmithError) for answer in run(engine, train(1), other))


def test_sgd_moves_by_its_buffer() -> None:
    engine = FakeTrainingEngine()
    engine.create_adapter("m", LORA)
    (_, first) = run(engine, train(1), OptimStep(optimizer=SgdParams(learning_rate=1.0, momentum=0.5)))
    assert isinstance(first, OptimOutput)
    moved = engine.weights("m")[2]
    assert abs(moved) == pytest.approx(first.metrics["unclipped_grad_l2:mean"])
    zero = Compute((Datum(model_input(1), {"target_tokens": int64(2), "weights": float32(0)}),), "cross_entropy", {}, backward=True)
    run(engine, zero, OptimStep(optimizer=SgdParams(learning_rate=1.0, momentum=0.5)))
    assert engine.weights("m")[2] == pytest.approx(1.5 * moved)


def test_a_clip_norm_below_0_clips_nothing() -> None:
    engine = FakeTrainingEngine()
    for model, norm in (("off", 0.0), ("below", -1.0), ("on", 1e-3)):
        engine.create_adapter(model, LORA)
        run(engine, train(1, 2, 3), OptimStep(optimizer=SgdParams(grad_clip_norm=norm)), model=model)
    assert engine.weights("off") == engine.weights("below") != engine.weights("on")


def test_numbers_are_checked_as_elsewhere() -> None:
    bad = Datum(model_input(1), {"target_tokens": int64(1), "weights": float32(math.nan)})
    command = Compute((bad,), "cross_entropy", {}, backward=True)
    with pytest.raises(ValidationFailed, match=r"data\[0\]\.loss_fn_inputs\.weights: 1 elements are NaN or infinite"):
        check(command, Limits(100, 8))
