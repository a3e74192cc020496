"""Commands, samples and records as data."""

from array import array

import pytest
from pydantic import ValidationError

from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.losses import LOSSES
from tinsmith.protocol.sampling import SamplingParams
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, SessionRecord, checkpoint_path
from tinsmith.protocol.training import MAX_LORA_RANK, AdamParams, Compute, Kind, LoraConfig


def test_which_kinds_hold_what_back_and_run_again():
    assert {kind for kind in Kind if not kind.is_barrier} == {Kind.FORWARD, Kind.FORWARD_BACKWARD}
    assert {kind for kind in Kind if kind.is_save} == {Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER}
    assert {kind for kind in Kind if kind.is_replayed} == {Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP}


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


def test_every_loss_reads_targets():
    for spec in LOSSES.values():
        assert spec.inputs["target_tokens"].required
        assert all(isinstance(default, float) for default in spec.config.values())


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
