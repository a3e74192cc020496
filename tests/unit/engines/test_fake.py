"""The fake engines keep the promises of the seams, so that what is tested on them holds for others."""

import math
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save

from tests.fakes.training import LORA, int64, model_input, optim, train
from tinsmith.engines.base import Answer, Contents, Job
from tinsmith.engines.fake import FakeTrainingEngine
from tinsmith.engines.fake_faults import EXIT_CODE, FAULT_TOKEN, Fault
from tinsmith.engines.fake_sampler import FakeSamplingEngine
from tinsmith.protocol.errors import InputTokensExceeded, NotFound, TinsmithError, ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.sampling import Sample, SampleOutput, SamplingParams, StopReason
from tinsmith.protocol.tensors import Csr, DType, Tensor, float32_values
from tinsmith.protocol.training import AdamParams, Compute, ComputeOutput, EngineCommand, LoraConfig, OptimOutput, OptimStep


def float32(*values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(DType.FLOAT32, (len(values),) if shape is None else shape, np.array(values, dtype="<f4").tobytes())


def compute(loss_fn: str = "cross_entropy", tokens: tuple[int, ...] = (1, 2, 3), **inputs: Tensor) -> Compute:
    return Compute((Datum(model_input(*tokens), inputs),), loss_fn, {}, backward=True)


@pytest.fixture
def engine() -> FakeTrainingEngine:
    engine = FakeTrainingEngine()
    engine.create_adapter("m", LORA)
    return engine


def run(engine: FakeTrainingEngine, *commands: EngineCommand, model: str = "m") -> list[Answer]:
    return engine.run([Job(model, seq, command) for seq, command in enumerate(commands)])


def logprobs(engine: FakeTrainingEngine, command: Compute) -> list[float]:
    (answer,) = run(engine, replace(command, backward=False))
    assert isinstance(answer, ComputeOutput)
    return list(float32_values(answer.logprobs[0].data))


def test_training_raises_the_logprobs_of_its_targets(engine: FakeTrainingEngine) -> None:
    before = logprobs(engine, train(1, 2, 3))
    answers = run(engine, train(1, 2, 3), optim())
    assert isinstance(answers[0], ComputeOutput)
    assert answers[0].metrics["loss:sum"] == pytest.approx(-sum(before), rel=1e-6)
    assert isinstance(answers[1], OptimOutput)
    assert answers[1].metrics["unclipped_grad_l2:mean"] > 0
    assert all(after > earlier for after, earlier in zip(logprobs(engine, train(1, 2, 3)), before, strict=True))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_sign_of_an_advantage_is_that_of_the_change(engine: FakeTrainingEngine, advantage: float) -> None:
    sampled = logprobs(engine, train(1))
    command = compute("importance_sampling", (1,), target_tokens=int64(2), logprobs=float32(*sampled), advantages=float32(advantage))
    (answer, _) = run(engine, command, optim())
    assert isinstance(answer, ComputeOutput)
    assert answer.metrics["loss:sum"] == pytest.approx(-advantage, rel=1e-5)
    assert math.copysign(1, logprobs(engine, train(1))[0] - sampled[0]) == advantage


def test_the_gradient_is_the_slope_of_the_loss(engine: FakeTrainingEngine) -> None:
    """One plain step of rate e along a changes the loss by -e |g|^2 / a to first order; the seed's `a` scales the slope."""
    (before,) = logprobs(engine, train(1))
    rate = 1e-6
    _, step = run(engine, train(1), optim(rate))
    assert isinstance(step, OptimOutput)
    scaled_slope = step.metrics["unclipped_grad_l2:mean"]
    assert engine.weights("m")[2] == pytest.approx(rate * scaled_slope)
    assert 0.5 * (1 - math.exp(before)) <= scaled_slope <= 1.5 * (1 - math.exp(before))


def test_weights_depend_on_the_seed_and_a_fresh_adapter_is_the_base() -> None:
    engine = FakeTrainingEngine()
    for seed in (1, 2):
        engine.create_adapter(str(seed), LoraConfig(rank=4, seed=seed))
    assert engine.weights("1") == engine.weights("2") == (0.0,) * 8
    for seed in ("1", "2"):
        run(engine, train(1, 2), optim(), model=seed)
    assert engine.weights("1") != engine.weights("2")


def test_order_and_repetition_show() -> None:
    def history(*commands: EngineCommand) -> str:
        engine = FakeTrainingEngine()
        engine.create_adapter("m", LORA)
        run(engine, *commands)
        return engine.history("m")

    a, b = train(1, 2), train(5)
    histories = [history(a, b, optim()), history(b, a, optim()), history(a, a, b, optim()), history(a, b), history(a, optim(), b, optim())]
    assert len(set(histories)) == len(histories)
    assert history(a, b, optim()) == histories[0]


def test_a_step_without_a_gradient_changes_nothing(engine: FakeTrainingEngine) -> None:
    assert run(engine, optim(), optim()) == [OptimOutput({}), OptimOutput({})]
    assert engine.history("m") == ""


def test_clipping_and_decay(engine: FakeTrainingEngine) -> None:
    adam = AdamParams(learning_rate=1.0, beta1=0.0, grad_clip_norm=0.25)
    run(engine, train(1, 2, 3), OptimStep(optimizer=adam))
    assert math.sqrt(sum(value * value for value in engine.weights("m"))) == pytest.approx(0.25)
    before = engine.weights("m")
    run(
        engine,
        compute(target_tokens=int64(1, 2, 3), weights=float32(0, 0, 0)),
        OptimStep(optimizer=AdamParams(learning_rate=0.1, beta1=0, weight_decay=0.5)),
    )
    assert engine.weights("m") == tuple(value * (1 - 0.1 * 0.5) for value in before)


def test_forward_has_no_effect(engine: FakeTrainingEngine) -> None:
    run(engine, train(1, 2, backward=False), optim())
    assert engine.weights("m") == (0.0,) * 8


def test_two_dimensional_targets_dense_and_sparse_agree(engine: FakeTrainingEngine) -> None:
    dense = compute(target_tokens=int64(1, 0, 0, 2, 0, 0, shape=(3, 2)), weights=float32(1, 0, 0, 0.5, 0, 0, shape=(3, 2)))
    ints = lambda *values: np.array(values, dtype="<i8").tobytes()  # noqa: E731
    csr = Csr(ints(0, 1, 2, 2), ints(0, 1))
    sparse = compute(
        target_tokens=Tensor(DType.INT64, (3, 2), ints(1, 2), csr),
        weights=Tensor(DType.FLOAT32, (3, 2), np.array([1, 0.5], dtype="<f4").tobytes(), csr),
    )
    assert run(engine, replace(dense, backward=False)) == run(engine, replace(sparse, backward=False))


@pytest.mark.parametrize("zero", [{"advantages": float32(0)}, {"advantages": float32(1), "weights": float32(0)}])
def test_a_row_without_weight_adds_nothing_whatever_its_ratio(engine: FakeTrainingEngine, zero: dict[str, Tensor]) -> None:
    (answer,) = run(engine, compute("importance_sampling", (1,), target_tokens=int64(1), logprobs=float32(-1e9), **zero))
    assert isinstance(answer, ComputeOutput)
    assert answer.metrics["loss:sum"] == 0


def test_sparse_entries_of_one_cell_add(engine: FakeTrainingEngine) -> None:
    ints = lambda *values: np.array(values, dtype="<i8").tobytes()  # noqa: E731
    halves = Tensor(DType.FLOAT32, (1, 1), np.array([0.25, 0.5], dtype="<f4").tobytes(), Csr(ints(0, 2), ints(0, 0)))
    command = replace(compute(tokens=(1,), target_tokens=int64(1, shape=(1, 1)), weights=halves), backward=False)
    whole = replace(compute(tokens=(1,), target_tokens=int64(1, shape=(1, 1)), weights=float32(0.75, shape=(1, 1))), backward=False)
    assert run(engine, command) == run(engine, whole)


@pytest.mark.proves("R10")
@pytest.mark.parametrize(
    "command",
    [
        compute("no_such_loss", target_tokens=int64(1, 2, 3)),
        compute(),
        compute(target_tokens=int64(1, 2, 3), mask=float32(1, 1, 1)),
        compute(target_tokens=float32(1, 2, 3)),
        replace(train(), data=()),
        compute("infonce"),
        compute(target_tokens=int64(1, 2)),
        compute(target_tokens=int64(shape=(3, 0))),
        compute(target_tokens=int64(1, 2, 3, shape=(3, 1, 1))),
        compute(target_tokens=int64(1, 2, 99999)),
        compute(target_tokens=int64(1, 2, 3), weights=float32(1, math.nan, 1)),
        compute(target_tokens=int64(1, 2, 3, 4, 5, 6, shape=(3, 2)), weights=float32(1, 1, 1)),
        compute(tokens=(1, 2, 99999), target_tokens=int64(1, 2, 3)),
        compute("importance_sampling", (1,), target_tokens=int64(1), logprobs=float32(-1e9), advantages=float32(1)),
        compute("importance_sampling", target_tokens=int64(1, 2, 3), logprobs=float32(0, 0, 0), advantages=float32(1, 1)),
        replace(compute(target_tokens=int64(1, 2, 3)), loss_fn_config={"no_such_key": 1.0}),
    ],
)
def test_a_refusal_is_an_answer_and_has_no_effect(engine: FakeTrainingEngine, command: Compute) -> None:
    answers = run(engine, command, train(1), optim())
    assert isinstance(answers[0], ValidationFailed)
    other = FakeTrainingEngine()
    other.create_adapter("m", LORA)
    run(other, train(1), optim())
    assert (engine.weights("m"), engine.history("m")) == (other.weights("m"), other.history("m"))


def test_other_refusals(engine: FakeTrainingEngine) -> None:
    (too_long,) = run(FakeWith(max_context=2), train(1, 2, 3))
    assert isinstance(too_long, InputTokensExceeded)
    (unknown,) = run(engine, train(1), model="other")
    assert isinstance(unknown, NotFound)
    with pytest.raises(ValidationFailed, match="rank"):
        FakeTrainingEngine(max_rank=4).create_adapter("m", LORA)


def FakeWith(*, max_context: int) -> FakeTrainingEngine:  # noqa: N802 - reads as the class
    engine = FakeTrainingEngine(max_context=max_context)
    engine.create_adapter("m", LORA)
    return engine


@pytest.mark.proves("I8")
def test_a_snapshot_holds_everything_the_unspent_gradient_included(engine: FakeTrainingEngine) -> None:
    run(engine, train(1, 2), optim(), train(3))
    files = engine.capture("m", Contents.SNAPSHOT)
    run(engine, optim(), train(4), optim())
    state = engine.weights("m"), engine.history("m")
    other = FakeTrainingEngine()
    other.restore("m", LORA, files)
    run(other, optim(), train(4), optim())
    assert (other.weights("m"), other.history("m")) == state
    engine.restore("m", LORA, files)
    assert engine.capture("m", Contents.SNAPSHOT) == files


@pytest.mark.proves("P2")
def test_a_capture_is_immutable(engine: FakeTrainingEngine) -> None:
    run(engine, train(1, 2), optim())
    files = dict(engine.capture("m", Contents.SNAPSHOT))
    copies = {name: bytes(content) for name, content in files.items()}
    run(engine, train(5), optim(), train(6), optim())
    assert files == copies


def test_each_capture_contains_the_one_above_it(engine: FakeTrainingEngine) -> None:
    sampler, checkpoint, snapshot = (set(engine.capture("m", contents)) for contents in Contents)
    assert {"adapter_config.json", "adapter_model.safetensors"} == sampler
    assert sampler < checkpoint < snapshot


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_load_replaces_weights_and_by_wish_moments(engine: FakeTrainingEngine, optimizer: bool) -> None:
    run(engine, train(1, 2), optim())
    files = engine.capture("m", Contents.CHECKPOINT)
    saved = engine.weights("m")
    engine.create_adapter("n", LoraConfig(rank=8, seed=9))
    run(engine, train(7), model="n")
    engine.load("n", files, optimizer=optimizer)
    assert engine.weights("n") == saved
    for model in ("m", "n"):
        run(engine, train(4), optim(), model=model)
    assert (engine.weights("n") == engine.weights("m")) is optimizer


@pytest.mark.proves("R11")
def test_a_load_that_is_refused_leaves_no_trace(engine: FakeTrainingEngine) -> None:
    run(engine, train(1, 2), optim())
    before = engine.capture("m", Contents.SNAPSHOT)
    files = dict(engine.capture("m", Contents.CHECKPOINT))
    wide = FakeTrainingEngine()
    wide.create_adapter("w", LoraConfig(rank=64, seed=1))
    for bad in (
        {name: content[:-8] for name, content in files.items()},
        {name: content for name, content in files.items() if name != "optimizer.safetensors"},
        files | {"adapter_config.json": b"{}"},
        files | {"adapter_model.safetensors": wide_vectors()},
        wide.capture("w", Contents.CHECKPOINT),
    ):
        with pytest.raises(ValidationFailed):
            engine.load("m", bad, optimizer=True)
    assert engine.capture("m", Contents.SNAPSHOT) == before


def wide_vectors() -> bytes:
    return bytes(save({"a": np.zeros(9), "b": np.zeros(8)}))


def test_slots_are_limited_and_dropping_frees_one() -> None:
    engine = FakeTrainingEngine(capacity=1)
    engine.create_adapter("m", LORA)
    with pytest.raises(RuntimeError, match="slots"):
        engine.create_adapter("n", LORA)
    with pytest.raises(RuntimeError, match="already"):
        engine.create_adapter("m", LORA)
    engine.drop_adapter("m")
    engine.drop_adapter("never there")
    engine.create_adapter("n", LORA)
    assert engine.residents == {"n"}
    assert engine.capacity == 1


def test_calls_are_counted_and_can_be_intercepted() -> None:
    seen: list[tuple[str, str]] = []
    engine = FakeTrainingEngine(before=lambda operation, subject: seen.append((operation, subject)))
    engine.create_adapter("m", LORA)
    run(engine, train(1), optim())
    engine.ping()
    assert seen == [("create_adapter", "m"), ("forward_backward", "m/0"), ("optim_step", "m/1"), ("ping", "")]
    assert engine.calls["run"] == engine.calls["ping"] == 1
    assert engine.ran == [("m", 0), ("m", 1)]


# --- faults


def test_faults_before_any_effect(engine: FakeTrainingEngine) -> None:
    (refused,) = run(engine, train(FAULT_TOKEN, Fault.REFUSE))
    assert isinstance(refused, ValidationFailed)
    with pytest.raises(RuntimeError, match="nothing was mutated"):
        run(engine, train(FAULT_TOKEN, Fault.RAISE))
    run(engine, optim())
    assert engine.history("m") == ""
    (ordinary,) = run(engine, train(FAULT_TOKEN, 999), model="m")
    assert isinstance(ordinary, ComputeOutput)


def test_a_fault_halfway_leaves_half_an_effect(engine: FakeTrainingEngine) -> None:
    command = train(FAULT_TOKEN, Fault.RAISE_HALFWAY, *range(8))
    with pytest.raises(RuntimeError, match="half"):
        run(engine, command)
    run(engine, train(1), optim())
    half = engine.weights("m")
    assert any(half[:4])
    assert not any(half[4:])


@pytest.mark.parametrize("fault", [Fault.SLEEP, Fault.LATE, Fault.HOLD_LOCK])
def test_slow_faults_end_as_usual(engine: FakeTrainingEngine, fault: Fault) -> None:
    began = time.monotonic()
    (answer,) = run(engine, train(FAULT_TOKEN, fault, 30))
    assert time.monotonic() - began >= 0.03
    assert isinstance(answer, ComputeOutput)


def test_holding_the_lock_stops_other_threads(engine: FakeTrainingEngine) -> None:
    ticks: list[float] = []
    ticking, stop = threading.Event(), threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.monotonic())
            ticking.set()

    ticker = threading.Thread(target=tick)
    ticker.start()
    ticking.wait(5)
    run(engine, train(FAULT_TOKEN, Fault.HOLD_LOCK, 200))
    stop.set()
    ticker.join()
    assert max(later - earlier for earlier, later in zip(ticks, [*ticks[1:], time.monotonic()], strict=True)) >= 0.15


def test_the_exit_fault_ends_the_process() -> None:
    script = (
        "from tests.fakes.training import LORA, train\n"
        "from tinsmith.engines.base import Job\n"
        "from tinsmith.engines.fake import FakeTrainingEngine\n"
        "from tinsmith.engines.fake_faults import FAULT_TOKEN, Fault\n"
        "engine = FakeTrainingEngine()\n"
        "engine.create_adapter('m', LORA)\n"
        "engine.run([Job('m', 1, train(FAULT_TOKEN, Fault.EXIT))])\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == EXIT_CODE


def test_the_hang_fault_never_returns(engine: FakeTrainingEngine) -> None:
    thread = threading.Thread(target=run, args=(engine, train(FAULT_TOKEN, Fault.HANG)), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    engine.ping()


# --- sampling


def sample(*prompt: int, seed: int = 1, num_samples: int = 1, adapter: str | None = None, **params: object) -> Sample:
    return Sample(model_input(*prompt), SamplingParams.model_validate({"seed": seed, "max_tokens": 4, **params}), num_samples, adapter)


def finish(engine: FakeSamplingEngine, request: Sample, ticket: str = "t") -> SampleOutput:
    engine.add(ticket, request)
    while engine.num_live:
        for done, output in engine.step():
            assert done == ticket
            assert isinstance(output, SampleOutput)
            return output
    raise AssertionError("it ended without an answer")


def test_sampling_repeats_by_seed_and_differs_between_rows() -> None:
    engine = FakeSamplingEngine()
    first = finish(engine, sample(1, 2, num_samples=3))
    assert first == finish(engine, sample(1, 2, num_samples=3))
    assert first != finish(engine, sample(1, 2, num_samples=3, seed=2))
    assert len({tuple(sequence.tokens) for sequence in first.sequences}) > 1
    assert all(len(sequence.tokens) == len(sequence.logprobs) == 4 for sequence in first.sequences)
    assert {sequence.stop_reason for sequence in first.sequences} == {StopReason.LENGTH}


def test_greedy_ignores_the_seed() -> None:
    engine = FakeSamplingEngine()
    assert finish(engine, sample(1, 2, temperature=0)) == finish(engine, sample(1, 2, temperature=0, seed=9))


def test_sampler_and_trainer_agree_on_logprobs() -> None:
    trainer = FakeTrainingEngine()
    trainer.create_adapter("m", LORA)
    run(trainer, train(1, 2, 3), optim())
    sampler = FakeSamplingEngine()
    assert not sampler.has_adapter("k")
    sampler.load_adapter("k", trainer.capture("m", Contents.SAMPLER))
    assert sampler.has_adapter("k")
    output = finish(sampler, replace(sample(5, 6, adapter="k"), prompt_logprobs=True, topk_prompt_logprobs=3))
    sequence = output.sequences[0]
    tokens = [5, 6, *sequence.tokens]
    (answer,) = run(
        trainer, Compute((Datum(model_input(*tokens[:-1]), {"target_tokens": int64(*tokens[1:])}),), "cross_entropy", {}, backward=False)
    )
    assert isinstance(answer, ComputeOutput)
    assert output.prompt_logprobs is not None
    mine = [output.prompt_logprobs[1], *sequence.logprobs]
    assert list(float32_values(answer.logprobs[0].data)) == pytest.approx(mine, rel=1e-6)
    assert output.prompt_logprobs[0] is None
    assert output.topk_prompt_logprobs is not None
    assert output.topk_prompt_logprobs[0] is None
    best = output.topk_prompt_logprobs[1]
    assert best is not None
    assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
    assert len(best) == 3


def test_stops() -> None:
    free = finish(FakeSamplingEngine(), sample(1, 2)).sequences[0].tokens
    by_id = finish(FakeSamplingEngine(), sample(1, 2, stop=(free[1],))).sequences[0]
    assert (by_id.tokens, by_id.stop_reason) == (free[:2], StopReason.STOP)
    ending = FakeSamplingEngine(eos_token_ids=(free[0],))
    assert finish(ending, sample(1, 2)).sequences[0].stop_reason is StopReason.STOP
    assert finish(ending, sample(1, 2, stop=())).sequences[0].tokens == free
    assert finish(FakeSamplingEngine(), sample(1, 2, stop=("never",))).sequences[0].tokens == free


def test_the_context_limits_a_sample_without_max_tokens() -> None:
    engine = FakeSamplingEngine(max_context=6)
    assert len(finish(engine, sample(1, 2, max_tokens=None)).sequences[0].tokens) == 4
    assert len(finish(engine, sample(1, 2, max_tokens=100)).sequences[0].tokens) == 4
    full = replace(sample(*range(6), max_tokens=1), prompt_logprobs=True)
    output = finish(engine, full)
    assert (len(output.sequences[0].tokens), len(output.prompt_logprobs or [])) == (1, 6)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (sample(), InputTokensExceeded),
        (sample(*range(7)), InputTokensExceeded),
        (sample(99999), ValidationFailed),
        (sample(1, adapter="k"), NotFound),
        (sample(FAULT_TOKEN, Fault.REFUSE), ValidationFailed),
    ],
)
def test_a_refused_sample_leaves_nothing(request_: Sample, error: type[TinsmithError]) -> None:
    engine = FakeSamplingEngine(max_context=6)
    with pytest.raises(error):
        engine.add("t", request_)
    assert engine.num_live == 0


def test_requests_join_and_leave_between_steps_within_the_rows() -> None:
    engine = FakeSamplingEngine(max_rows=2)
    engine.add("a", sample(1, num_samples=2, max_tokens=2))
    engine.add("b", sample(2, max_tokens=1))
    engine.add("c", sample(3, max_tokens=1))
    assert engine.step() == []
    assert [ticket for ticket, _ in engine.step()] == ["a"]
    engine.cancel("b")
    engine.cancel("never there")
    assert [ticket for ticket, _ in engine.step()] == ["c"]
    assert engine.num_live == 0
    assert engine.max_rows == 2
    engine.ping()


def test_the_least_recently_used_idle_adapter_goes() -> None:
    trainer = FakeTrainingEngine()
    trainer.create_adapter("m", LORA)
    files = trainer.capture("m", Contents.SAMPLER)
    engine = FakeSamplingEngine(max_adapters=2)
    for key in ("a", "b"):
        engine.load_adapter(key, files)
    engine.add("t", sample(1, adapter="a"))
    engine.load_adapter("c", files)
    assert [engine.has_adapter(key) for key in ("a", "b", "c")] == [True, False, True]
    with pytest.raises(ValidationFailed):
        engine.load_adapter("d", {})


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.RAISE_HALFWAY])
def test_a_sample_may_break_a_step_once(fault: Fault) -> None:
    engine = FakeSamplingEngine()
    engine.add("t", sample(FAULT_TOKEN, fault))
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.step() == []


def test_a_sample_may_be_slow() -> None:
    began = time.monotonic()
    finish(FakeSamplingEngine(), sample(FAULT_TOKEN, Fault.LATE, 30))
    assert time.monotonic() - began >= 0.03
