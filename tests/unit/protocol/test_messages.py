"""Commands, samples and records as data."""

from array import array

import pytest
from pydantic import ValidationError

from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.sampling import SamplingParams
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, SessionRecord, checkpoint_path
from tinsmith.protocol.training import (
    MAX_LORA_RANK,
    AdamParams,
    Compute,
    Kind,
    LoraConfig,
    LrSchedule,
    OptimStep,
    SgdParams,
    TrainStep,
)


def test_which_kinds_hold_what_back_and_run_again():
    assert {kind for kind in Kind if not kind.is_barrier} == {Kind.FORWARD, Kind.FORWARD_BACKWARD}
    assert {kind for kind in Kind if kind.is_save} == {Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS_EXTERNAL}
    assert {kind for kind in Kind if kind.is_replayed} == {
        Kind.CREATE_MODEL,
        Kind.LOAD_WEIGHTS,
        Kind.FORWARD_BACKWARD,
        Kind.OPTIM_STEP,
        Kind.TRAIN_STEP,
    }


def test_a_model_input_counts_tokens():
    chunks = tuple(TextChunk(array("i", tokens).tobytes()) for tokens in ([1, 2], [], [3]))
    model_input = ModelInput(chunks)
    assert len(model_input) == 3
    assert model_input.tokens == [1, 2, 3]
    command = Compute((Datum(model_input, {}),) * 2, "cross_entropy", {}, backward=False)
    assert command.num_tokens == 6
    assert command.kind is Kind.FORWARD


def test_the_optimizer_defaults_are_those_of_the_wire():
    assert AdamParams().model_dump() == {
        "type": "adamw",
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }


@pytest.mark.proves("R48")
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (AdamParams, {"learning_rate": -1}),
        (AdamParams, {"learning_rate": float("nan")}),
        (AdamParams, {"beta1": 1}),
        (AdamParams, {"eps": 0}),
        (AdamParams, {"momentum": 1}),
        (SgdParams, {"momentum": 1}),
        (SgdParams, {"learning_rate": -1}),
        (SgdParams, {"eps": 1}),
        (LrSchedule, {"final_fraction": 1.5}),
        (LoraConfig, {"seed": 0, "rank": 0}),
        (LoraConfig, {"seed": 0, "rank": MAX_LORA_RANK + 1}),
        (SamplingParams, {"seed": 0, "temperature": -0.1}),
        (SamplingParams, {"seed": 0, "top_p": 0}),
        (SamplingParams, {"seed": 0, "top_p": 1.1}),
        (SamplingParams, {"seed": 0, "max_tokens": 0}),
        (SamplingParams, {}),
    ],
)
def test_messages_are_closed_and_bounded(model, fields):
    with pytest.raises(ValidationError):
        model(**fields)


def test_greedy_is_a_value():
    assert SamplingParams(seed=0, temperature=0).temperature == 0


def test_every_loss_of_log_probs_reads_targets():
    for spec in LOSSES.values():
        assert (spec.output == "logprobs") is ("target_tokens" in spec.inputs)
        assert all(wanted.is_required for name, wanted in spec.inputs.items() if name == "target_tokens")
        assert all(isinstance(default, float) for default in spec.config.values())


def test_what_a_pass_is_called_by_what_it_does():
    data = (Datum(ModelInput((TextChunk(array("i", [1, 2]).tobytes()),)), {}),)
    passes = {
        Kind.FORWARD: Compute(data, "x", {}, backward=False),
        Kind.FORWARD_BACKWARD: Compute(data, "x", {}, backward=True),
        Kind.EVALUATE: Compute(data, "x", {}, backward=False, metrics_only=True),
        Kind.TRAIN_STEP: TrainStep(Compute(data, "x", {}, backward=True), OptimStep(optimizer=SgdParams())),
    }
    for kind, command in passes.items():
        assert command.kind is kind
        assert command.num_tokens == 2


def test_a_step_names_its_optimizer():
    assert OptimStep.model_validate({"optimizer": {"type": "sgd", "momentum": 0.9}}).optimizer == SgdParams(momentum=0.9)
    with pytest.raises(ValidationError):
        OptimStep.model_validate({"optimizer": {"learning_rate": 0.1}})


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (LrSchedule(), {0: 1, 7: 1}),
        (LrSchedule(warmup_steps=4), {0: 0.25, 1: 0.5, 3: 1, 4: 1, 99: 1}),
        (LrSchedule(kind="linear", total_steps=4), {0: 1, 1: 0.75, 4: 0, 9: 0}),
        (LrSchedule(kind="linear", warmup_steps=2, total_steps=6, final_fraction=0.5), {0: 0.5, 1: 1, 2: 1, 4: 0.75, 6: 0.5, 9: 0.5}),
        (LrSchedule(kind="cosine", total_steps=4, final_fraction=0.2), {0: 1, 2: 0.6, 4: 0.2, 9: 0.2}),
    ],
)
def test_a_schedule_warms_up_and_falls(schedule, factors):
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)


@pytest.mark.parametrize("fields", [{"kind": "linear"}, {"kind": "cosine", "warmup_steps": 5, "total_steps": 5}])
def test_a_schedule_that_falls_needs_an_end_above_its_warm_up(fields):
    with pytest.raises(ValidationError, match="total_steps"):
        LrSchedule(**fields)


def test_a_checkpoint_knows_its_path():
    record = CheckpointRecord(
        tenant="t",
        session_id="s",
        run_id="s:train:0",
        kind=CheckpointKind.SAMPLER,
        name="n",
        artifact="a",
        base_model="b",
        lora=LoraConfig(seed=0),
        created_ms=0,
        size_bytes=1,
    )
    assert record.path == checkpoint_path("s:train:0", CheckpointKind.SAMPLER, "n") == "tinker://s:train:0/sampler_weights/n"


def test_records_of_a_newer_writer_are_read():
    assert SessionRecord.model_validate_json('{"tenant":"t","session_id":"s","created_ms":1,"mood":"good"}').session_id == "s"
