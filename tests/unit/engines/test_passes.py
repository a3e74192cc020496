"""What passes read, what an evaluation answers, what train_step promises, and that engines implement what they are said to."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.engines import loss_cases
from tests.unit.engines.datums import array, compute, datum, ints, supervised, tensor
from tests.unit.engines.peft import computed, refused, run, state
from tinsmith.engines import batch, lora, passes
from tinsmith.engines.batch import Example
from tinsmith.engines.network import Work
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.capabilities import TRAINING_ENGINES
from tinsmith.protocol.errors import InternalError, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.loss_checks import Limits, read_config
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.training import (
    AdamParams,
    Compute,
    ComputeOutput,
    Kind,
    LoraConfig,
    LrSchedule,
    OptimOutput,
    OptimStep,
    SgdParams,
    TrainStep,
)

LORA = LoraConfig(rank=8, seed=11)
STEP = OptimStep(optimizer=AdamParams(learning_rate=1e-3, eps=1e-6))
LENGTHS = (5, 31, 12, 1)


def data_of(loss_fn: str, seed: int = 0) -> list[Datum]:
    rng = np.random.default_rng(seed)
    if loss_fn in loss_cases.LOSSES:
        return loss_cases.data_of(loss_fn, LENGTHS, seed)
    full = [supervised(rng, length) for length in LENGTHS]
    return [replace(one, loss_fn_inputs={name: one.loss_fn_inputs[name] for name in LOSSES[loss_fn].inputs}) for one in full]


def evaluation(loss_fn: str, data: list[Datum] | None = None) -> Compute:
    return replace(compute(data_of(loss_fn) if data is None else data, loss_fn, backward=False), metrics_only=True)


@pytest.fixture
def engine(peft: PeftEngine) -> PeftEngine:
    """With an adapter "m" that has taken a step and has an unspent gradient."""
    for model_id in list(peft._adapters):
        peft.drop_adapter(model_id)
    peft.create_adapter("m", LORA)
    run(peft, "m", compute(data_of("cross_entropy", 9)), STEP, compute(data_of("cross_entropy", 10)))
    return peft


# The tables


def test_the_passes_are_exactly_the_losses_of_the_protocol_and_of_the_capabilities() -> None:
    assert set(passes.PASSES) == set(LOSSES) == TRAINING_ENGINES["peft"].losses


def test_every_optimizer_of_the_capabilities_takes_a_step(engine: PeftEngine) -> None:
    params = {kind.model_fields["type"].default: kind() for kind in (AdamParams, SgdParams)}
    assert set(params) == TRAINING_ENGINES["peft"].optimizers
    for name, optimizer in params.items():
        engine.create_adapter(name, LORA)
        assert isinstance(run(engine, name, compute(data_of("cross_entropy")), OptimStep(optimizer=optimizer))[1], OptimOutput)


def test_every_operation_of_the_engine_is_one_of_the_capabilities() -> None:
    commands = {Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.EVALUATE, Kind.OPTIM_STEP, Kind.TRAIN_STEP}
    assert commands < TRAINING_ENGINES["peft"].operations
    assert TRAINING_ENGINES["peft"].fields == {"micro_batch_tokens"}


class Recording(Mapping[str, torch.Tensor]):
    """Inputs that note which of them are read."""

    def __init__(self, inputs: Mapping[str, torch.Tensor], read: set[str]) -> None:
        self._inputs, self._read = inputs, read

    def __getitem__(self, name: str) -> torch.Tensor:
        self._read.add(name)
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


@pytest.mark.proves("R44")
@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_a_loss_reads_exactly_the_inputs_that_are_declared(engine: PeftEngine, loss_fn: str) -> None:
    read: set[str] = set()
    command = compute(data_of(loss_fn), loss_fn)
    examples = [
        Example(one.tokens_N, Recording(one.inputs, read)) for one in batch.read_examples(command, Limits(vocab_size=49152, max_context=64))
    ]
    adapter = engine._adapters["m"]
    work = Work(loss_fn, read_config(command), examples, [range(len(examples))], torch.zeros(adapter.layout.size))
    passes.PASSES[loss_fn](engine._network, adapter, work)
    assert read == set(LOSSES[loss_fn].inputs)


# Evaluation


@pytest.mark.parametrize("loss_fn", sorted(set(LOSSES) - {"infonce"}))
def test_an_evaluation_answers_sums_that_follow_from_a_forward(engine: PeftEngine, loss_fn: str) -> None:
    before, data = state(engine, "m"), data_of(loss_fn)
    forward = computed(engine, "m", compute(data, loss_fn, backward=False))
    found = computed(engine, "m", evaluation(loss_fn))
    assert (found.logprobs, found.embeddings) == ((), ())
    weights = [array(one.loss_fn_inputs["weights"]).astype(np.float64) for one in data]
    nll = -sum(float(weight @ array(logprobs)) for weight, logprobs in zip(weights, forward.logprobs, strict=True))
    pairs = {"pairs:sum": 2.0} if loss_fn == "dpo" else {}
    sums = {"tokens:sum": float(sum(LENGTHS)), "weight:sum": sum(map(np.sum, weights)), "nll:sum": nll}
    assert found.metrics == pytest.approx(forward.metrics | pairs | sums, rel=1e-5)
    assert state(engine, "m") == before


def test_an_absent_weight_counts_1_a_target(engine: PeftEngine) -> None:
    data = [datum([1, 2, 3], target_tokens=ints([2, 3, 4])), datum([1, 2], target_tokens=ints([[2, 5], [3, 6]]))]
    metrics = computed(engine, "m", evaluation("cross_entropy", data)).metrics
    assert (metrics["weight:sum"], metrics["tokens:sum"]) == (7.0, 5.0)
    assert metrics["nll:sum"] == metrics["loss:sum"]


def test_an_evaluation_of_embeddings_counts_pairs(engine: PeftEngine) -> None:
    forward = computed(engine, "m", compute(data_of("infonce"), "infonce", backward=False))
    found = computed(engine, "m", evaluation("infonce"))
    assert found == ComputeOutput((), forward.metrics | {"pairs:sum": 2.0, "tokens:sum": float(sum(LENGTHS))})


def test_an_evaluation_whose_likelihood_is_not_finite_is_refused(engine: PeftEngine) -> None:
    """The advantage hides the row from the loss, and nothing hides it from the likelihood."""
    rows = {"target_tokens": ints([2]), "logprobs": tensor([-1]), "advantages": tensor([0]), "weights": tensor([1])}
    adapter = engine._adapters["m"]
    adapter.weights_P.fill_(torch.inf)
    answer = refused(engine, "m", evaluation("importance_sampling", [datum([1], **rows)]))
    assert answer.message.startswith("data[0]: importance_sampling: the loss or its gradient is not finite")


@pytest.mark.parametrize("bound", [1, 7, 100_000])
def test_the_command_s_own_micro_batch_changes_no_sum(engine: PeftEngine, bound: int) -> None:
    usual = computed(engine, "m", evaluation("cross_entropy")).metrics
    other = computed(engine, "m", replace(evaluation("cross_entropy"), micro_batch_tokens=bound)).metrics
    assert other == pytest.approx(usual, rel=1e-5)


def test_the_command_s_own_micro_batch_goes_before_the_engine_s(engine: PeftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = batch.pad
    monkeypatch.setattr(batch, "pad", lambda examples: sizes.append(len(examples)) or original(examples))
    computed(engine, "m", replace(evaluation("cross_entropy"), micro_batch_tokens=1))
    assert sizes == [1, 1, 1, 1]
    sizes.clear()
    computed(engine, "m", replace(evaluation("cross_entropy"), micro_batch_tokens=1000))
    assert sizes == [4]


# train_step


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
@pytest.mark.parametrize("params", [AdamParams(learning_rate=1e-3, eps=1e-6, grad_clip_norm=0.5), SgdParams(momentum=0.9)])
def test_train_step_equals_forward_backward_and_optim_step_bit_for_bit(
    engine: PeftEngine, loss_fn: str, params: AdamParams | SgdParams
) -> None:
    """With what was accumulated before."""
    command, step = compute(data_of(loss_fn), loss_fn), OptimStep(optimizer=params, schedule=LrSchedule(warmup_steps=3))
    results = []
    for model_id in ("fused", "apart"):
        engine.create_adapter(model_id, LORA)
        run(engine, model_id, compute(data_of("cross_entropy", 4)))
    for _ in range(2):
        fused = computed(engine, "fused", TrainStep(command, step))
        passed, stepped = run(engine, "apart", command, step)
        assert isinstance(passed, ComputeOutput)
        assert isinstance(stepped, OptimOutput)
        assert fused == replace(passed, metrics=passed.metrics | stepped.metrics)
        assert set(stepped.metrics) == {"unclipped_grad_l2:mean", "learning_rate:mean"}
        results.append(stepped.metrics["learning_rate:mean"])
        assert state(engine, "fused") == state(engine, "apart")
    assert results == pytest.approx([params.learning_rate / 3, params.learning_rate * 2 / 3])


def test_a_step_reports_its_learning_rate_only_where_a_schedule_sets_it(engine: PeftEngine) -> None:
    (answer,) = run(engine, "m", STEP)
    assert isinstance(answer, OptimOutput)
    assert set(answer.metrics) == {"unclipped_grad_l2:mean"}


BAD = {
    "its pass is refused": TrainStep(compute([datum([1, 2], target_tokens=ints([2, 3, 4]))]), STEP),
    "its loss overflows": TrainStep(compute([datum([1], target_tokens=ints([2]), weights=tensor([3e38]))]), STEP),
    "its optimizer is another": TrainStep(compute(data_of("cross_entropy")), OptimStep(optimizer=SgdParams())),
    "it has no backward": TrainStep(compute(data_of("cross_entropy"), backward=False), STEP),
}


@pytest.mark.proves("R10")
@pytest.mark.parametrize("why", BAD)
def test_a_train_step_that_is_refused_leaves_weights_moments_and_gradient_alone(engine: PeftEngine, why: str) -> None:
    before = state(engine, "m")
    assert isinstance(refused(engine, "m", BAD[why]), ValidationFailed)
    assert state(engine, "m") == before


@pytest.mark.proves("R10")
def test_a_train_step_whose_norm_is_not_finite_leaves_everything_as_it_was(engine: PeftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    grad = engine._adapters["m"].grad_P
    assert grad is not None
    grad[0] = torch.nan
    before = state(engine, "m")
    command = TrainStep(compute(data_of("cross_entropy")), STEP)
    assert isinstance(refused(engine, "m", command), ValidationFailed)  # the sum is found out before the step
    monkeypatch.setattr(lora, "_is_finite", lambda _: True)
    assert isinstance(refused(engine, "m", command), InternalError)
    assert state(engine, "m") == before


@pytest.mark.proves("R10")
@pytest.mark.parametrize("params", [AdamParams(learning_rate=1e308), AdamParams(learning_rate=3e38)])
def test_a_step_that_would_spoil_the_weights_is_refused_and_training_goes_on(engine: PeftEngine, params: AdamParams) -> None:
    before, step = state(engine, "m"), OptimStep(optimizer=params)
    for command in (step, TrainStep(compute(data_of("cross_entropy")), step)):
        refusal = refused(engine, "m", command)
        assert isinstance(refusal, ValidationFailed)
        assert "learning_rate" in refusal.message
        assert state(engine, "m") == before
    assert isinstance(run(engine, "m", STEP)[0], OptimOutput)


@pytest.mark.proves("R10")
@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
def test_an_exception_in_a_loss_is_no_success_and_leaves_nothing(engine: PeftEngine, monkeypatch: pytest.MonkeyPatch, loss_fn: str) -> None:
    before = state(engine, "m")

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(passes, "PASSES", {loss_fn: broken})
    for command in (compute(data_of(loss_fn), loss_fn), TrainStep(compute(data_of(loss_fn), loss_fn), STEP)):
        with pytest.raises(ZeroDivisionError):
            run(engine, "m", command)
    assert state(engine, "m") == before


@pytest.mark.parametrize("first", [AdamParams(), SgdParams(momentum=0.9)])
def test_the_optimizer_survives_capture_and_restore(engine: PeftEngine, first: AdamParams | SgdParams) -> None:
    engine.create_adapter("a", LORA)
    step = TrainStep(compute(data_of("cross_entropy")), OptimStep(optimizer=first))
    run(engine, "a", step, compute(data_of("cross_entropy", 1)))
    files = state(engine, "a")
    run(engine, "a", step)
    expected = state(engine, "a")
    engine.restore("b", LORA, files)
    assert state(engine, "b") == files
    other = SgdParams() if isinstance(first, AdamParams) else AdamParams()
    assert "takes none of" in refused(engine, "b", OptimStep(optimizer=other)).message  # type: ignore[arg-type]
    run(engine, "b", step)
    assert state(engine, "b") == expected
    engine.load("b", files, optimizer=False)
    assert isinstance(run(engine, "b", compute(data_of("cross_entropy")), OptimStep(optimizer=other))[1], OptimOutput)
